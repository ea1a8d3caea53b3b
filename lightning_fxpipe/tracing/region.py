"""Finds the call that is pipelined by running the user's step until it happens, and replaces that call during a step.

The *region* is the first outermost call, inside the step, of a module with parameters to train. What the step does before
(the *prelude*) is ordinary Python, run wherever the region's inputs are needed; what it does after is ordinary Python on the
last stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.lightning import takes_batch_idx
from lightning_fxpipe._compat.torch import patched_attributes, tree_leaves
from lightning_fxpipe.errors import TraceError, UnsupportedError
from lightning_fxpipe.tracing.input_gradient import depends_on_parameters, input_gradient
from lightning_fxpipe.tracing.parameter_use import further_call
from lightning_fxpipe.tracing.prelude import dry_run_of_prelude
from lightning_fxpipe.tracing.recordable import RegionCall
from lightning_fxpipe.tracing.structure_guards import InPlaceOf
from lightning_fxpipe.tracing.torch_calls import CallContext
from lightning_fxpipe.user_code.frames import user_source
from lightning_fxpipe.user_code.placement import device_of
from lightning_fxpipe.user_code.step_code import code_of

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
IsRegion = Callable[[nn.Module], bool]


class NoModelCall(TraceError):
    """The step came to its end without a call of a model that is pipelined."""


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """A call of user code, the step, that calls the model somewhere inside.

    The batch, or one microbatch of it, is the first of ``args``.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of_training(cls, module: nn.Module, batch: Any) -> StepCall:
        """The training step of a LightningModule; for another module its own call, with the batch as arguments."""
        step = getattr(module, "training_step", None)
        if step is not None:
            return cls.of_step(step, batch)
        if isinstance(batch, Mapping):
            return cls(function=module, args=(), kwargs=dict(batch))
        return cls(function=module, args=tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), kwargs={})

    @classmethod
    def of_step(cls, step: Callable[..., Any], batch: Any, *, batch_idx: int = 0) -> StepCall:
        """A LightningModule's step on a batch of the first dataloader, with the arguments that the Trainer gives it."""
        takes_index = takes_batch_idx(step)
        required = [p for p in inspect.signature(step).parameters.values() if p.default is p.empty and p.kind in _POSITIONAL]
        count = max(1 + takes_index, min(len(required), 3))
        return cls(function=step, args=(batch, batch_idx, 0)[:count], kwargs={})


def trains(module: nn.Module) -> bool:
    """Returns True if a call of the module, made now, trains its parameters. A teacher called under ``no_grad`` does not."""
    return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())


def holds_any(module: nn.Module) -> bool:
    """Returns True if the module has parameters."""
    return next(module.parameters(), None) is not None


class _RegionReached(BaseException):
    """Ends the step at the region's call; not an ``Exception``, so that the step's own handlers let it pass."""


def find_region(
    root: nn.Module,
    step: StepCall,
    *,
    batch_size: int,
    batch_dim: int = 0,
    device: torch.device | None = None,
    is_region: IsRegion = trains,
    at_call: Callable[[RegionCall], Any] | None = None,
) -> RegionCall:
    """Runs the step up to the region's call and returns that call. Random number generators and what the step
    sets on the module are left as they were.

    Args:
        root: The LightningModule.
        step: The step, with a microbatch.
        batch_size: Samples in that.
        batch_dim: Dimension of the batch in its tensors.
        device: Where the module, wherever it is, is taken to be.
        is_region: True for a module whose call is pipelined.
        at_call: Runs at the call, when the code before it has set what it sets.

    Raises:
        NoModelCall: The step never makes such a call.
        UnsupportedError: Parameters are used before it, so that gradients would have to flow out of the pipeline.
    """
    paths = {id(module): path for path, module in reversed(list(root.named_modules()))}
    original_call = nn.Module.__call__

    prelude: dict[str, None] = {}

    def reach(function: Callable[[RegionCall], Any]) -> Any:
        result: list[Any] = []

        def at_call(call: RegionCall) -> None:
            result.append(function(call))

        find_region(root, step, batch_size=batch_size, batch_dim=batch_dim, device=device, is_region=is_region, at_call=at_call)
        return result[0]

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) in paths and holds_any(module) and not run.is_aside:
            if is_region(module):
                found_on = device or device_of(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
                found.append(
                    RegionCall(
                        path=paths[id(module)],
                        args=args,
                        kwargs=kwargs,
                        batch_size=batch_size,
                        batch_dim=batch_dim,
                        prelude_paths=tuple(prelude),
                        context=CallContext.current(found_on.type),
                        reach=reach,
                    )
                )
                if at_call is not None:
                    try:  # the step may catch what is raised here
                        with run.aside(), found[0].numbers_on(root):
                            at_call(found[0])
                    except BaseException as error:
                        failed.append(error)
                raise _RegionReached
            prelude[paths[id(module)]] = None
        return original_call(module, *args, **kwargs)

    # The first counts, though the step may go on where it catches everything. No exception is kept: it would keep the frames
    # that it came through, and these their tensors.
    found: list[RegionCall] = []
    failed: list[BaseException] = []  # of at_call
    try:
        with (
            patched_attributes((nn.Module, "__call__", call)),
            dry_run_of_prelude(root, step.function, step.args, step.kwargs, device) as run,
        ):
            step.function(*run.args, **run.kwargs)
    except (_RegionReached, Exception):
        if not found:
            raise
    if failed:
        raise failed.pop()
    if not found:
        raise _no_region(step.function)
    region = replace(found[0], prelude=run.facts)
    leaves = [leaf for leaf in tree_leaves((region.args, region.kwargs)) if isinstance(leaf, Tensor)]
    trained = [leaf for leaf in leaves if leaf.requires_grad] if torch.is_grad_enabled() else []
    if trained and not depends_on_parameters(trained, root):
        raise input_gradient(_source(step.function))
    if trained:
        raise UnsupportedError(
            f"The step uses trainable parameters before it calls {region.path or 'the module'}.",
            where=getattr(step.function, "__qualname__", None),
            observed="an input of the pipelined call requires a gradient",
            expected="inputs that depend on no parameter",
            todo="Move the earlier code into the forward of the module that the step calls.",
        )
    return region


def _source(function: Callable[..., Any]) -> str:
    code = code_of(function)
    name = str(getattr(function, "__qualname__", function))
    return f"{name}, {code.co_filename}:{code.co_firstlineno}" if code else name


def _no_region(function: Callable[..., Any]) -> NoModelCall:
    return NoModelCall(
        "The step never calls a model with parameters to train, so there is nothing to pipeline.",
        where=_source(function),
        observed="the step returned without such a call",
        expected="a call such as self(x) or self.model(x)",
        todo="Call the module itself rather than one of its methods, and check that its parameters require gradients.",
    )


class StageExit(BaseException):
    """Leaves the user's step on a stage that is not the last, carrying what the stage sends."""

    def __init__(self, outputs: tuple[Tensor, ...]) -> None:
        self.outputs = outputs


class Leaving:
    """How the region was left.

    A step may catch what the region raises, with ``except:`` even a :class:`StageExit`. One device would then go on; in a
    pipeline the other ranks wait for what this one was to compute.

    Attributes:
        error: The error that the region has raised.
        has_exited: Whether the step has been left where it was over for this rank.
    """

    error: BaseException | None = None
    has_exited = False

    def noting_errors(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, the region, of which is noted what it raises."""

        def noting(*args: Any) -> Any:
            try:
                return run(*args)
            except StageExit:  # with every batch: what is kept of it would keep the batch until Python looks for cycles
                self.has_exited = True
                raise
            except BaseException as error:
                self.error = error
                raise

        return noting

    def has_ended_step(self) -> bool:
        """Returns True if this rank's part of the step was over with the region; raises the error with which it failed."""
        if self.error is not None:
            raise self.error
        return self.has_exited


class replaced_region:
    """During the block, the region's forward is ``run``, once.

    ``forward`` is replaced on the instance, so that hooks on the module itself run as always.
    """

    # No generator: such a block is around each microbatch.
    def __init__(self, root: nn.Module, path: str, run: Callable[..., Any]) -> None:
        self._path = path
        self._run: Callable[..., Any] | None = run
        self._refused: UnsupportedError | None = None  # which the step may catch
        module = root.get_submodule(path)
        self._patched = patched_attributes((module, "forward", InPlaceOf(vars(module).get("forward"), self._forward)))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        run, self._run = self._run, None
        if run is not None:
            return run(*args, **kwargs)
        self._refused = further_call(self._path)
        raise self._refused

    def __enter__(self) -> None:
        self._patched.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._patched.__exit__(kind, error, traceback)
        if self._refused is not None and error is None:
            raise self._refused


@contextmanager
def no_model_called(root: nn.Module) -> Iterator[None]:
    """In the block, a call of a module whose parameters are in the stages is an error.

    Raises:
        UnsupportedError: There was one.
    """
    original_call = nn.Module.__call__
    refused: UnsupportedError | None = None  # which the step may catch

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal refused
        if any(parameter.is_meta for parameter in module.parameters()):
            refused = UnsupportedError(
                "The step calls the model only for some batches or microbatches.",
                where=user_source(),
                observed=f"a call of {type(module).__name__}, although the step returned without it before",
                expected="a choice that depends only on the batch's shapes, its constants and plain attributes",
                todo="Call the model for every batch, or set num_microbatches=1.",
            )
            raise refused
        return original_call(module, *args, **kwargs)

    with patched_attributes((nn.Module, "__call__", call)):
        yield
    if refused is not None:
        raise refused
