"""The calls of a step that all ranks run (``runtime.joint_step``), and the plan for them.

Such a step is no one graph: it goes on with what a call gave, trains, and calls again. So each module that it calls is planned
by itself, over all stages: a generator has a part on every rank, and so has a discriminator. Each call is then a pipeline of
all ranks, and each rank has an equal share of the memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_fxpipe._compat.lightning import own_replaced
from lightning_fxpipe._compat.torch import FakeTensor, has_hooks, outside_fakes, patched_attributes, size_hint, tree_map
from lightning_fxpipe.errors import FxPipeError, PartitionError, TraceError, UnsupportedError
from lightning_fxpipe.microbatch.split import batch_size
from lightning_fxpipe.planner.cost import canonical_fqns
from lightning_fxpipe.planner.plan import PartitionPlan, StageSpec
from lightning_fxpipe.planner.planning import plan_region
from lightning_fxpipe.pytree.structure import NotFillable, Template
from lightning_fxpipe.reporting.messages import logger
from lightning_fxpipe.rng import isolated_rng
from lightning_fxpipe.tracing.discovery import WholeStep
from lightning_fxpipe.tracing.fake_run import fake_run
from lightning_fxpipe.tracing.made_tensors import MadeTensors
from lightning_fxpipe.tracing.prelude import say_nothing
from lightning_fxpipe.tracing.recordable import RegionCall
from lightning_fxpipe.tracing.region import NoModelCall, StepCall, holds_any
from lightning_fxpipe.tracing.signals import MustStayWhole, RecordError
from lightning_fxpipe.tracing.span import run_step, step_name
from lightning_fxpipe.tracing.torch_calls import LOOKS, tensors_among
from lightning_fxpipe.tracing.value_looks import look_unrecorded
from lightning_fxpipe.user_code.calls import calls_through, classes_with_own_call
from lightning_fxpipe.user_code.frames import user_source
from lightning_fxpipe.user_code.objects import lasting_objects
from lightning_fxpipe.user_code.placement import device_of


class UnitNotRecorded(Exception):
    """A call of the module ``path`` cannot be recorded; perhaps the calls that its code makes can."""

    def __init__(self, path: str, error: FxPipeError) -> None:
        super().__init__(path)
        self.path, self.error = path, error


def find_units(
    root: nn.Module,
    step: StepCall,
    *,
    num_samples: int,
    batch_dim: int = 0,
    device: torch.device | None = None,
    accepts_part: bool = True,
    opened: Collection[str] = (),
) -> list[RegionCall]:
    """The outermost calls of modules with parameters in a step, the first of each module, with made-up tensors.

    The step runs on fake tensors, and trains nothing.

    Args:
        root, step: The LightningModule, and the step with a batch.
        num_samples, batch_dim: Samples in that, and which dimension of its tensors they are.
        device: Where the module is taken to be; by default where the batch is.
        accepts_part: Whether the calls up to an error of the step are returned; else that is raised, as where there is none.
        opened: Paths of modules whose code is taken for the step's: the calls inside are found.

    Raises:
        NoModelCall: There is none.
        UnitNotRecorded: The step uses what a call has left elsewhere than in its result: as an attribute, or by a hook.
    """
    device = device or device_of(Template.of((step.args, dict(step.kwargs))).tensors)
    whole = WholeStep(step=step, batch_size=num_samples, batch_dim=batch_dim, root=root)
    calls = _Calls(root, batch_dim, opened)
    end: BaseException | None = None
    with isolated_rng(), fake_run(root, whole, lambda path, _: path != "", device) as run, run.recorder.pause():
        try:
            with _trains_nothing(root), calls_through(calls):
                run_step(root, step, run.example, say_nothing)
        except (Exception, RecordError, MustStayWhole) as error:
            logger.debug("%s does not complete on tensors without data", step_name(step), exc_info=True)
            end = error
    if calls.left is not None:
        raise calls.left
    if isinstance(end, Exception) and not (calls.found and accepts_part):
        raise end
    if not calls.found:
        raise NoModelCall(
            "The step never calls a model with parameters to train, so there is nothing to pipeline.",
            where=step_name(step),
            observed="the step returned without such a call",
            expected="a call such as self(x) or self.model(x)",
            todo="Call the module itself rather than one of its methods.",
        ) from end
    return list(calls.found.values())


def plan_units(
    root: nn.Module, units: Sequence[RegionCall], *, num_stages: int, device: torch.device | None = None
) -> PartitionPlan:
    """A plan for all the calls: each module over all stages; one that cannot be cut so often over the lightest ones.

    Raises:
        UnitNotRecorded: A call cannot be recorded.
        PartitionError: A stage would have nothing.
    """
    plans: list[tuple[int, PartitionPlan]] = []
    staged: set[str] = set()
    loads = [0] * num_stages  # parameters
    names = canonical_fqns(root)
    # A module comes before those inside it: where both are called, it is the one that has to be cut.
    for unit in sorted(units, key=lambda unit: unit.path.count(".") + bool(unit.path)):
        if all(names[fqn] in staged for fqn, _ in root.get_submodule(unit.path).named_parameters(prefix=unit.path)):
            continue
        try:
            plan = _plan_call(root, unit, num_stages, device)
        except (TraceError, UnsupportedError) as error:
            raise UnitNotRecorded(unit.path, error) from error
        first = _lightest(loads, [stage.num_parameters for stage in plan.stages])
        plans.append((first, plan))
        for stage in plan.stages:
            loads[first + stage.index] += stage.num_parameters
            staged.update(stage.fqns)
    if not plans or not all(loads):
        raise PartitionError(
            f"Cannot form {num_stages} stages.",
            observed="stages of the modules that the step calls: "
            + ", ".join(f"{plan.num_stages} of {plan.region}" for _, plan in plans),
            expected="a part of one of these modules in each stage",
            todo="Use fewer devices, one per stage.",
        )
    return _merge(plans, num_stages)


def _plan_call(root: nn.Module, unit: RegionCall, num_stages: int, device: torch.device | None) -> PartitionPlan:
    """The plan of a call, in as many stages as can have parameters."""
    for count in range(num_stages, 1, -1):
        with suppress(PartitionError):
            plan = plan_region(root, unit, num_stages=count, device=device)
            if all(stage.num_parameters for stage in plan.stages):
                return plan
    return plan_region(root, unit, num_stages=1, device=device)


def _lightest(loads: Sequence[int], weights: Sequence[int]) -> int:
    """The first of the stages over which a module is laid, so that the heaviest of them is as light as can be; else late."""
    firsts = range(len(loads) - len(weights), -1, -1)
    return min(firsts, key=lambda first: max(loads[first + index] + weight for index, weight in enumerate(weights)))


def _merge(plans: Sequence[tuple[int, PartitionPlan]], num_stages: int) -> PartitionPlan:
    first = plans[0][1]
    stages = []
    for index in range(num_stages):
        placed = [(shift, plan.stages[index - shift]) for shift, plan in plans if 0 <= index - shift < plan.num_stages]
        parts = [part for _, part in placed]
        stages.append(
            StageSpec(
                index=index,
                first_module=next((part.first_module for part in parts if part.first_module), ""),
                last_module=next((part.last_module for part in reversed(parts) if part.last_module), ""),
                fqns=tuple(dict.fromkeys(fqn for part in parts for fqn in part.fqns)),
                num_parameters=sum(part.num_parameters for part in parts),
                outputs=tuple(_shift(tensor, shift) for shift, part in placed for tensor in part.outputs),
            )
        )
    staged = {fqn for stage in stages for fqn in stage.fqns}
    return dataclasses.replace(
        first,
        region=", ".join(plan.region for _, plan in plans),
        stages=tuple(stages),
        outside_fqns=tuple(fqn for fqn in first.parameter_shapes if fqn not in staged),
        outside_reason="",
        prelude_fqns=(),
        opened=tuple(dict.fromkeys(path for _, plan in plans for path in plan.opened)),
        kept_whole={path: reason for _, plan in plans for path, reason in plan.kept_whole.items()},
        recomputed=tuple(
            dataclasses.replace(tensor, stages=tuple(stage + shift for stage in tensor.stages))
            for shift, plan in plans
            for tensor in plan.recomputed
        ),
    )


def _shift(tensor: Any, shift: int) -> Any:
    consumers = tuple(stage + shift for stage in tensor.consumer_stages)
    receiver = tensor.receiver_stage if tensor.receiver_stage is None else tensor.receiver_stage + shift
    return dataclasses.replace(
        tensor, producer_stage=tensor.producer_stage + shift, consumer_stages=consumers, receiver_stage=receiver
    )


class _Calls(TorchFunctionMode):
    """Notes the first call of each module; what looks at values sees ones."""

    def __init__(self, root: nn.Module, batch_dim: int, opened: Collection[str]) -> None:
        super().__init__()
        self.found: dict[str, RegionCall] = {}
        self._opened = opened
        self._root = root
        self._batch_dim = batch_dim
        self._paths = {id(module): path for path, module in reversed(list(root.named_modules()))}
        self._inside: str | None = None  # the module whose call runs
        self._made = MadeTensors()  # in such calls, and no results
        self.left: UnitNotRecorded | None = None  # a call that leaves a tensor which the step uses

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in LOOKS and isinstance(args[0], FakeTensor):
            return look_unrecorded(func, args[0])
        result = func(*args, **(kwargs or {}))
        if self._inside is not None:
            for tensor in tensors_among((result,)):
                self._made.add(tensor, self._inside)
        elif self.left is None:
            makers = map(self._made.maker, tensors_among((args, kwargs)))
            self.left = next((_leaving(path) for path in makers if path is not None), None)
        return result

    def classes_with_own_call(self) -> set[type[nn.Module]]:
        """Classes of the modules, and their bases, that override ``nn.Module.__call__``."""
        return classes_with_own_call(self._root.modules())

    def call_module(self, original_call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Makes the call, on fakes."""
        path = self._paths.get(id(module))
        if self._inside is not None or path is None or path in self._opened or not holds_any(module):
            return original_call(module, *args, **kwargs)
        if path not in self.found:
            self._note(path, args, kwargs)
        self._inside = path
        try:
            result = original_call(module, *args, **kwargs)
            if any(map(has_hooks, module.modules())):  # which may have kept it
                result = tree_map(lambda leaf: leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf, result)
        finally:
            self._inside = None
        for tensor in tensors_among((result,)):
            self._made.forget(tensor)
        return result

    def _note(self, path: str, args: Any, kwargs: Any) -> None:
        try:
            template = Template.of((args, kwargs), shared=lasting_objects(self._root))
        except NotFillable:
            return  # it is told when the call is made
        tensors = [_made_up(tensor) for tensor in template.tensors]
        args, kwargs = template.structure.fill(tensors, [size_hint(size) for size in template.sizes])
        try:
            num_samples = batch_size((args, kwargs), self._batch_dim)
        except FxPipeError:
            num_samples = 1
        self.found[path] = RegionCall(
            path=path,
            args=args,
            kwargs=kwargs,
            batch_size=num_samples,
            batch_dim=self._batch_dim,
            is_one_of_many=True,
        )


def _leaving(path: str) -> UnitNotRecorded:
    name = path or "the module"
    error = TraceError(
        f"The step uses a tensor that its call of {name} computes but does not return.",
        where=user_source(),
        observed="a tensor that is stored in a module attribute or by a hook instead of returned by the call",
        expected="only results of calls, because the step runs on every rank",
        todo="Return the tensor from the module's forward.",
    )
    return UnitNotRecorded(path, error)


def _made_up(tensor: Tensor) -> Tensor:
    with outside_fakes():
        shape = [size_hint(size) for size in tensor.shape]
        return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device).requires_grad_(tensor.requires_grad)


def _trains_nothing(root: nn.Module) -> AbstractContextManager[None]:
    """In the block backward passes compute nothing, and nothing is switched off and on."""

    def gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for tensor in ([inputs] if isinstance(inputs, Tensor) else inputs))

    names = ("manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients")
    return patched_attributes(
        (Tensor, "backward", say_nothing),
        (torch.autograd, "backward", say_nothing),
        (torch.autograd, "grad", gradients),
        *own_replaced(root, say_nothing, *names),
    )
