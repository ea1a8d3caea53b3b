"""The Trainer's precision plugin where the backward pass runs inside the step, and each rank has a part of the gradients.

What the plugin does to the loss before the backward pass is done to it in the schedule, so that half-precision gradients
overflow and underflow as on one device. A gradient scaler's finding that gradients are infinite, and the norm by which they are
clipped, are those of the whole model on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor, autograd
from torch.optim import Optimizer

from lightning_fxpipe._compat import watch_unscaling
from lightning_fxpipe.step import StepKind

ScaleLoss = Callable[[Tensor], Tensor]


class PipelinePrecision:
    """Attaches a precision plugin to a pipeline.

    Args:
        plugin: The plugin.
        group: The pipeline's ranks, for messages between CPUs.
        clip_by_norm: Clips the gradients of an optimizer by the norm of the whole model's.
        outside: Makes a function one that sees this rank's stage only.
    """

    def __init__(
        self,
        plugin: Any,
        group: dist.ProcessGroup | None,
        clip_by_norm: Callable[[Optimizer, int | float], None],
        outside: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._plugin = plugin
        self._group = group
        scaler = scaler_of(plugin)
        self._end_watch = watch_unscaling(scaler, self._share_overflow) if scaler is not None else None
        # Lightning clips by the norm of the parameters that it sees; they are one stage's.
        plugin.clip_grad_by_norm = clip_by_norm
        plugin.clip_grad_by_value = outside(type(plugin).clip_grad_by_value.__get__(plugin))

    def detach(self) -> None:
        """Leaves the plugin as it was."""
        for clip in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(self._plugin).pop(clip, None)
        if self._end_watch is not None:
            self._end_watch()
            self._end_watch = None

    @property
    def scale_loss(self) -> ScaleLoss | None:
        """What the schedule does to the loss before its backward pass."""
        scaler = scaler_of(self._plugin)
        scale: ScaleLoss | None = None if scaler is None else scaler.scale
        return scale

    def before_backward(self, loss: Tensor, module: Any) -> tuple[Tensor, float]:
        """Runs the plugin's part before a backward pass.

        Args:
            loss: The batch's loss.
            module: The LightningModule.

        Returns:
            What the plugin made of the loss, and the factor by which the gradients of the schedule must still be multiplied.
        """
        if type(self._plugin).pre_backward in (Precision.pre_backward, MixedPrecision.pre_backward):
            return self._plugin.pre_backward(loss, module), 1.0
        # A plugin of the user's: gradients are those of the loss times the derivative of what it does with it.
        with torch.enable_grad():
            leaf = loss.detach().requires_grad_()
            made = self._plugin.pre_backward(leaf.clone(), module)
            factor = autograd.grad(made, leaf)[0] if made.requires_grad else torch.ones(())
            done = self.scale_loss or torch.clone
            (already,) = autograd.grad(done(leaf), leaf)
        return made.detach(), float(factor) / float(already)

    def _share_overflow(self, found: dict[torch.device, Tensor]) -> None:
        """Every rank has the flags of all: a step is skipped by all stages or by none."""
        flag = torch.stack([flag.detach().cpu().reshape(()) for flag in found.values()]).amax()
        if self._group is not None:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        for own in found.values():
            own.fill_(flag)


def scaler_of(plugin: Any) -> Any:
    """The plugin's gradient scaler; None where it has none, or one that is switched off."""
    scaler = getattr(plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def step_context(plugin: Any, kind: StepKind) -> AbstractContextManager[Any]:
    """The plugin's context for a step."""
    contexts = {
        StepKind.TRAIN: plugin.train_step_context,
        StepKind.VALIDATE: plugin.val_step_context,
        StepKind.TEST: plugin.test_step_context,
        StepKind.PREDICT: plugin.predict_step_context,
    }
    context: AbstractContextManager[Any] = contexts[kind]()
    return context
