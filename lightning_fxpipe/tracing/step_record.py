"""The calls that a step makes itself, as they were recorded: what is needed to walk through the step's Python again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_fxpipe._compat.torch import TreeSpec
from lightning_fxpipe.pytree.structure import Template
from lightning_fxpipe.tracing.torch_calls import CallContext


@dataclass(frozen=True, slots=True)
class TensorKey:
    """Identity of a tensor within one run of a step: where it comes from, and its position there.

    ``call`` is the number of the call that made it; -1 for the batch. A parameter, buffer or constant has its name instead.
    """

    call: int
    position: int
    name: str = ""

    @property
    def is_held(self) -> bool:
        """True if no call of the step has made it: it is a parameter, buffer or constant."""
        return self.call < 0 and bool(self.name)


@dataclass(frozen=True, kw_only=True)
class Span:
    """Which of a step's calls are the region.

    Attributes:
        first, last: Numbers of the first and last call.
        wanted: The tensors that later code uses, in the order in which they are made.
        answers: What code before the region has seen when it looked at values, by the number of the call.
        transparent: Paths of modules whose forward counts as the step's own code: it is its calls that have numbers.
    """

    first: int
    last: int
    wanted: tuple[TensorKey, ...]
    answers: Mapping[int, Any] = field(default_factory=dict)
    transparent: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """A call that the step makes itself, within the region.

    Attributes:
        number: Its number among the step's calls.
        name: Name of the function, or path of the module.
        arguments: Its arguments, flattened: a :class:`TensorKey` for a tensor, a :class:`SymbolicSize`, or the constant.
        structure: Structure of the arguments.
        result: What it returned, with holes for the tensors; None where the call must be made anew because it is no part of
            the graph.
        keys: Identity of each tensor in the result.
        sides: Tensors that the call left on modules as attributes: path of the module, attribute, identity.
        is_module: Whether it is the call of a module.
        source: ``file:line`` of the call.
        is_aside: Whether the last stage makes it itself when the region has run, see ``tracing.calls_aside``.
        answer: The value that it has read from a tensor of the batch; None for other calls.
        context: Modes that it was made under, such as ``no_grad``; None for those that the step began under.
    """

    number: int
    name: str
    arguments: tuple[Any, ...]
    structure: TreeSpec
    result: Template | None
    keys: tuple[TensorKey, ...]
    sides: tuple[tuple[str, str, TensorKey], ...]
    is_module: bool
    source: str | None
    is_aside: bool
    answer: Any = None
    context: CallContext | None = None


@dataclass(frozen=True, kw_only=True)
class StepRecord(Span):
    """A region that spans several of a step's calls, as it was recorded; its ``wanted`` tensors are the graph's outputs.

    Attributes:
        calls: The calls between the first and the last, in order.
        inputs: Where each of the graph's inputs comes from.
    """

    calls: tuple[RecordedCall, ...]
    inputs: tuple[TensorKey, ...]
