"""What can be traced, and when two of them are alike: one call of a module here, several calls of a step in
:mod:`lightning_fxpipe.span`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat import TreeSpec, tree_flatten, tree_leaves
from lightning_fxpipe.errors import TraceError
from lightning_fxpipe.record import CallContext, Recorder, RecorderSettings
from lightning_fxpipe.shapes import DimGroups
from lightning_fxpipe.steprecord import StepRecord

INPUT_PREFIX = "region_input_"

CONSTANT_TYPES = (type(None), bool, int, float, str, complex, torch.dtype, torch.device, slice, range)


@dataclass(frozen=True, kw_only=True)
class RegionCall:
    """The call that is pipelined, as seen in one run of the user's step.

    Attributes:
        path: Path of the called module inside the root.
        args, kwargs: Its arguments, with real tensors.
        batch_size: Samples in them; a tensor whose first dimension has this size is taken to be batched.
        prelude_paths: Modules with parameters that the step called before, without training them.
        context: Modes that the step makes it under; None stands for those of the moment.
        varying: Dimensions of the tensors in :meth:`example`, besides the batch, whose sizes the trace should not depend on.
    """

    path: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch_size: int
    prelude_paths: tuple[str, ...] = ()
    context: CallContext | None = None
    varying: DimGroups = ()

    @property
    def label(self) -> str:
        """What it is, for messages."""
        return self.path or "the module"

    @property
    def example_names(self) -> tuple[str, str]:
        """What the two parts of :meth:`example` are called in messages."""
        return "args", "kwargs"

    @property
    def opened_path(self) -> str | None:
        """Module that is always opened, because its own forward is what is recorded."""
        return self.path

    def example(self) -> Any:
        """What it gets, as a tree of tensors and constants."""
        return self.args, dict(self.kwargs)

    def source(self, root: nn.Module) -> str:
        """``file:line`` of the recorded code."""
        code = getattr(inspect.unwrap(type(root.get_submodule(self.path)).forward), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else "source unknown"

    def make_recorder(self, settings: RecorderSettings) -> Recorder:
        """A recorder for it."""
        return Recorder(settings, region_path=self.path)

    def run(self, root: nn.Module, recorder: Recorder, example: Any) -> Any:
        """Makes the call on fakes of :meth:`example`, under the recorder; returns what later code may use."""
        for index, tensor in enumerate(leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)):
            recorder.add_input(f"{INPUT_PREFIX}{index}", tensor)
        args, kwargs = example
        return root.get_submodule(self.path).forward(*args, **kwargs)

    def record_of(self, recorder: Recorder) -> StepRecord | None:
        """What is needed to repeat the step's other calls: nothing, with a single one."""
        return None


class Recordable(Protocol):
    """What can be pipelined: a call of one module (:class:`RegionCall`), or several calls of a step
    (:class:`lightning_fxpipe.span.StepRegion`)."""

    @property
    def batch_size(self) -> int:
        """Samples in the example."""
        ...

    @property
    def prelude_paths(self) -> tuple[str, ...]:
        """Modules with parameters that the step called before."""
        ...

    @property
    def context(self) -> CallContext | None:
        """Modes that it is made under; None stands for those of the moment."""
        ...

    @property
    def varying(self) -> DimGroups:
        """Dimensions of the example's tensors, besides the batch, whose sizes the trace should not depend on."""
        ...

    @property
    def label(self) -> str:
        """What it is, for messages."""
        ...

    @property
    def example_names(self) -> tuple[str, str]:
        """What the two parts of the example are called in messages."""
        ...

    @property
    def opened_path(self) -> str | None:
        """Module whose own forward is recorded, if there is one."""
        ...

    def example(self) -> Any:
        """What it gets, as a tree of tensors and constants."""
        ...

    def source(self, root: nn.Module) -> str:
        """``file:line`` of the recorded code."""
        ...

    def make_recorder(self, settings: RecorderSettings) -> Recorder:
        """A recorder for it."""
        ...

    def run(self, root: nn.Module, recorder: Any, example: Any) -> Any:
        """Runs it on fakes of the example, under the recorder; returns what later code may use."""
        ...

    def record_of(self, recorder: Any) -> StepRecord | None:
        """What is needed to repeat the step's other calls."""
        ...


@dataclass(frozen=True, kw_only=True)
class Signature:
    """All that must be equal for a trace to be used again, but for the sizes of the tensors."""

    label: str
    path: str | None  # of the module whose forward was recorded; None where a step's own code was
    structure: TreeSpec
    leaves: tuple[Any, ...]  # constants, and (rank, dtype, device, requires_grad) of tensors
    training: tuple[bool, ...]
    trainable: tuple[bool, ...]
    context: CallContext


def sign(root: nn.Module, call: Recordable) -> tuple[Signature, tuple[tuple[int, ...], ...]]:
    """The signature of a call and the shapes of its tensors.

    Raises:
        TraceError: An argument is neither a tensor nor a plain constant.
    """
    context = call.context or CallContext.current(device_type(call))
    leaves, structure = tree_flatten(call.example())
    described: list[Any] = []
    shapes: list[tuple[int, ...]] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            described.append((leaf.dim(), leaf.dtype, leaf.device, leaf.requires_grad))
            shapes.append(tuple(leaf.shape))
        elif isinstance(leaf, CONSTANT_TYPES):
            described.append((type(leaf), leaf))
        else:
            raise TraceError(
                f"The call of {call.label} has an argument that cannot be recorded.",
                observed=f"an object of type {type(leaf).__name__}",
                expected="tensors and plain values, in dicts, lists, tuples or types registered as pytrees",
                todo="Pass the object's tensors instead, or register its type with torch.utils._pytree.",
            )
    region = root.get_submodule(call.opened_path or "")
    signature = Signature(
        label=call.label,
        path=call.opened_path,
        structure=structure,
        leaves=tuple(described),
        training=tuple(module.training for module in region.modules()),
        trainable=tuple(parameter.requires_grad for parameter in region.parameters()),
        context=context,
    )
    return signature, tuple(shapes)


def device_type(call: Recordable) -> str:
    """Device of the first tensor that it gets."""
    return next((leaf.device.type for leaf in tree_leaves(call.example()) if isinstance(leaf, Tensor)), "cpu")
