"""A callback and a module that write down every hook of Lightning: when it is called, with what, and what it sees."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import Tensor
from torch.optim import Optimizer

from tests.ranks.runs import Net


@dataclass
class Event:
    """One call of a hook."""

    name: str
    arguments: Any
    state: dict[str, Any]
    gradients: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)


# Called before the module is split, or on data: what they could see of parameters is no matter of hooks.
BLIND = {
    "setup",
    "configure_model",
    "configure_callbacks",
    "on_exception",
    "state_dict",
    "load_state_dict",
    *(n for n in vars(DataHooks) if n != "teardown"),
}
MODULE_HOOKS = [
    name
    for kind in (ModelHooks, DataHooks, CheckpointHooks)
    for name, value in vars(kind).items()
    if inspect.isfunction(value) and not name.startswith("_") and name != "configure_sharded_model"
] + [
    *("configure_optimizers", "configure_callbacks", "configure_gradient_clipping"),
    *("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
]
CALLBACK_HOOKS = [n for n, value in vars(L.Callback).items() if inspect.isfunction(value) and not n.startswith("_")]


def summary(tensor: Tensor | None) -> Any:
    """Two numbers that stand for a tensor's values."""
    if tensor is None:
        return None
    values = tensor.detach().double()
    return tuple(tensor.shape), float(values.sum()), float(values.norm())


def described(value: Any) -> Any:
    """What an argument is, so that runs can be compared."""
    if isinstance(value, Tensor):
        return summary(value)
    if isinstance(value, Optimizer):
        return type(value).__name__, [group["lr"] for group in value.param_groups]
    if isinstance(value, Mapping):
        if "state_dict" in value:  # a checkpoint
            return sorted(value)
        return {key: described(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(entry) for entry in value]
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def record(trace: list[Event], name: str, module: Any, arguments: Any) -> None:
    """Adds a call of a hook."""
    trainer = module.trainer
    state = {
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batch": (trainer.fit_loop.batch_idx, trainer.fit_loop.total_batch_idx, trainer.is_last_batch),
        "stage": str(trainer.state.stage),
        "stop": trainer.should_stop,
        "training": module.training,
        "grad": torch.is_grad_enabled(),  # with gloo, Lightning takes no_grad for inference_mode
        "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
        "metrics": {key: float(metric) for key, metric in trainer.callback_metrics.items()},
        "requires_grad": [p.requires_grad for p in module.parameters()],
    }
    event = Event(name, described(arguments), state)
    if name.rpartition(".")[2] not in BLIND:
        event.gradients = {fqn: summary(p.grad) for fqn, p in module.named_parameters()}
        event.parameters = {fqn: summary(p) for fqn, p in module.named_parameters()}
    trace.append(event)


def _recording(owner: type, name: str, prefix: str, find: Callable[[Any, tuple[Any, ...]], Any]) -> Callable[..., Any]:
    original = getattr(owner, name)

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = find(self, args)
        if module is not None and module._trainer is not None:
            record(self.trace, f"{prefix}.{name}", module, (args, kwargs))
        return original(self, *args, **kwargs)

    hook.__name__ = name  # not functools.wraps: Lightning would take it for its own
    return hook


class TraceCallback(L.Callback):
    """Records all hooks of a callback."""

    def __init__(self) -> None:
        self.trace: list[Event] = []
        self.module: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.module = pl_module


for _name in CALLBACK_HOOKS:
    setattr(
        TraceCallback,
        _name,
        _recording(TraceCallback, _name, "callback", lambda self, args: args[1] if len(args) > 1 else None),
    )


def traced(base: type = Net) -> type:
    """A subclass of a module that records all hooks of a LightningModule in the class's ``trace``."""
    namespace: dict[str, Any] = {"trace": []}
    for name in MODULE_HOOKS:
        namespace[name] = _recording(base, name, "module", lambda self, args: self)
    return type(f"Traced{base.__name__}", (base,), namespace)
