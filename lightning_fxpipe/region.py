"""Finds the call that is pipelined by running the user's step until it happens, and replaces that call during a step.

The *region* is the first outermost call, inside the step, of a module with parameters to train. What the step does before
(the *prelude*) is ordinary Python, run wherever the region's inputs are needed; what it does after is ordinary Python on the
last stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat import patched_attributes, silenced_loggers, tree_leaves, tree_map
from lightning_fxpipe.errors import TraceError, UnsupportedError
from lightning_fxpipe.exchange import Attributes, kept_generators
from lightning_fxpipe.frames import user_source
from lightning_fxpipe.metriccalls import MetricCalls, held_metrics
from lightning_fxpipe.recordable import RegionCall
from lightning_fxpipe.rng import isolated_rng
from lightning_fxpipe.torchcalls import CallContext

IsRegion = Callable[[nn.Module], bool]


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """A call of user code that calls the model somewhere inside.

    Attributes:
        function: The step.
        args: Its arguments; the batch, or one microbatch of it, comes first.
        kwargs: Its keyword arguments.
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
    def of_step(cls, step: Callable[..., Any], batch: Any) -> StepCall:
        """A LightningModule's step on the first batch of the first dataloader."""
        indices = list(inspect.signature(step).parameters.values())[1:]
        return cls(function=step, args=(batch, *(0 for p in indices if p.default is p.empty)), kwargs={})


def trains(module: nn.Module) -> bool:
    """Whether a call of the module, made now, trains its parameters. A teacher called under ``no_grad`` does not."""
    return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())


def holds_any(module: nn.Module) -> bool:
    """Whether the module has parameters."""
    return next(module.parameters(), None) is not None


class _RegionReached(BaseException):
    """Ends the step at the region's call; not an ``Exception``, so that the step's own handlers let it pass."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self.args_, self.kwargs_ = module, args, kwargs
        tensor = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        self.context = CallContext.current(tensor.device.type if tensor is not None else "cpu")


def find_region(root: nn.Module, step: StepCall, *, batch_size: int, is_region: IsRegion = trains) -> RegionCall:
    """Runs the step up to the region's call and returns that call. Random number generators and what the step
    sets on the module are left as they were.

    Raises:
        TraceError: The step never makes such a call.
        UnsupportedError: Parameters are used before it, so that gradients would have to flow out of the pipeline.
    """
    paths = {id(module): path for path, module in reversed(list(root.named_modules()))}
    original_call = nn.Module.__call__

    prelude: dict[str, None] = {}
    buffers: list[tuple[Tensor, Tensor]] = []

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) in paths and holds_any(module):
            if is_region(module):
                raise _RegionReached(module, args, kwargs)
            prelude[paths[id(module)]] = None
            # This run is one more than the user's: a BatchNorm in it must not count twice.
            buffers.extend((buffer, buffer.clone()) for buffer in module.buffers())
        return original_call(module, *args, **kwargs)

    attributes = [Attributes(module) for module in root.modules()]
    muted = [(root, name, _ignore) for name in ("log", "log_dict") if hasattr(root, name)]
    with (
        _undone(attributes),
        isolated_rng(),
        kept_generators(root),
        patched_attributes((nn.Module, "__call__", call), *muted),
        silenced_loggers(root),
        MetricCalls(held_metrics(root)).capture(),
    ):
        try:
            # On copies, because a step may change its batch in place, and this run is one more than the user's.
            args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (step.args, step.kwargs))
            step.function(*args, **kwargs)
        except _RegionReached as reached:
            found = RegionCall(
                path=paths[id(reached.module)],
                args=reached.args_,
                kwargs=reached.kwargs_,
                batch_size=batch_size,
                prelude_paths=tuple(prelude),
                context=reached.context,
            )
        else:
            raise _no_region(step.function)
        finally:
            with torch.no_grad():
                for buffer, before in reversed(buffers):
                    buffer.copy_(before)
    if torch.is_grad_enabled() and any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((found.args, found.kwargs))
    ):
        raise UnsupportedError(
            f"The step trains something before it calls {found.path or 'the module'}.",
            where=getattr(step.function, "__qualname__", None),
            observed="an input of the pipelined call requires a gradient",
            expected="inputs that depend on no parameter",
            todo="Move what comes before into the forward of the module that the step calls.",
        )
    return found


@contextmanager
def _undone(attributes: list[Attributes]) -> Iterator[None]:
    try:
        yield
    finally:
        for before in attributes:
            before.restore()


def _no_region(function: Callable[..., Any]) -> TraceError:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return TraceError(
        "The step never calls a model with parameters to train, so there is nothing to pipeline.",
        where=f"{getattr(function, '__qualname__', function)}"
        + (f", {code.co_filename}:{code.co_firstlineno}" if code else ""),
        observed="the step returned without such a call",
        expected="a call such as self(x) or self.model(x)",
        todo="Call the module itself rather than one of its methods, and check that its parameters require gradients.",
    )


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None


class StageExit(BaseException):
    """Leaves the user's step on a stage that is not the last, carrying what the stage sends."""

    def __init__(self, outputs: tuple[Tensor, ...]) -> None:
        self.outputs = outputs


@contextmanager
def replaced_region(root: nn.Module, path: str, run: Callable[..., Any]) -> Iterator[None]:
    """During the block, the region's forward is ``run``, once.

    ``forward`` is replaced on the instance, so that hooks on the module itself run as always.
    """
    calls = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise UnsupportedError(
                f"The step calls {path or 'the module'} twice.",
                where=user_source(),
                observed="a second call of the pipelined module in one step",
                expected="one call",
                todo="Concatenate the inputs of both calls along the batch dimension, or move both calls into one forward.",
            )
        return run(*args, **kwargs)

    with patched_attributes((root.get_submodule(path), "forward", forward)):
        yield
