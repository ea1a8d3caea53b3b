"""Settings of a recorder: facts about the module and the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_fxpipe.tracing.held_numbers import CallArgument
from lightning_fxpipe.tracing.signals import Learned
from lightning_fxpipe.user_code.snapshot import Snapshot


@dataclass(frozen=True, kw_only=True)
class RecorderSettings:
    """Facts about the module that a recorder needs.

    Attributes:
        modules: Each module once, by its path.
        tensor_fqns: FQN of each (fake) parameter and buffer, by ``id``.
        is_whole: Whether a module, given its path and itself, stays whole.
        device_type: Device whose autocast state is part of a node's context.
        lasting: By ``id``, objects that modules keep from one call to the next.
        answers_looks: Whether a module inside the region's that looks at values of the inputs may be opened.
        learned: What earlier recordings have shown.
        inputs: The real inputs, by the graph's placeholders.
        sizes: Values of the symbols.
        before: What the modules' code can change, as it was before.
        begin_region: Called where the recorded code begins, when the code before it has run; True if some numbers are inputs.
        number_argument: Returns what a call of the step gets in place of one of its arguments: a symbol, or the argument.
    """

    modules: Mapping[str, nn.Module]
    tensor_fqns: Mapping[int, str]
    is_whole: Callable[[str, nn.Module], bool]
    device_type: str
    lasting: Mapping[int, Any]
    answers_looks: bool = True
    learned: Learned = field(default_factory=Learned)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    sizes: Mapping[Any, int] = field(default_factory=dict)
    before: Snapshot | None = None
    begin_region: Callable[[], bool] = lambda: False
    number_argument: Callable[[CallArgument, Any], Any] = lambda place, value: value


def is_torch_leaf(path: str, module: nn.Module) -> bool:
    """The finest granularity, ``torch.fx.Tracer``'s own: torch.nn modules stay whole, but for Sequential."""
    return module.__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(module, nn.Sequential)
