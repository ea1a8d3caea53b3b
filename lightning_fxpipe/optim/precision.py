"""The Trainer's precision plugin where each rank has a part of the gradients.

A gradient scaler's finding that gradients are infinite, and the norm by which they are
clipped, are those of the whole model on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_fxpipe._compat.torch import patched_attributes, unscaling_watched
from lightning_fxpipe.user_code.step import StepKind


class PipelinePrecision:
    """Attaches a precision plugin to a pipeline.

    Args:
        plugin: As Lightning has it.
        group: The pipeline's ranks.
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
        # Lightning clips by the norm of the parameters that it sees; they are one stage's.
        patches = [
            (plugin, "clip_grad_by_norm", clip_by_norm),
            (plugin, "clip_grad_by_value", outside(type(plugin).clip_grad_by_value.__get__(plugin))),
        ]
        scaler = scaler_of(plugin)
        if scaler is not None:
            patches.append(unscaling_watched(scaler, self._share_overflow))
        self._patches = ExitStack()
        self._patches.enter_context(patched_attributes(*patches))

    def detach(self) -> None:
        """Leaves the plugin as it was."""
        self._patches.close()

    def scale(self) -> float:
        """By which the plugin multiplies a loss; the host waits for the device to know it."""
        scaler = scaler_of(self._plugin)
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _share_overflow(self, found: dict[torch.device, Tensor]) -> None:
        """Every rank has the flags of all: a step is skipped by all stages or by none."""
        first, *others = found.values()
        flag = torch.stack([first.detach().reshape(()), *(other.to(first.device).reshape(()) for other in others)]).amax()
        if self._group is not None:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        for own in found.values():
            own.copy_(flag.expand_as(own))


def scaler_of(plugin: Any) -> Any:
    """The plugin's gradient scaler; None where it has none, or one that is switched off."""
    scaler = getattr(plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def step_context(plugin: Any, kind: StepKind) -> AbstractContextManager[Any]:
    """The plugin's context for a step."""
    contexts: dict[StepKind, Callable[[], AbstractContextManager[Any]]] = {
        StepKind.TRAIN: plugin.train_step_context,
        StepKind.VALIDATE: plugin.val_step_context,
        StepKind.TEST: plugin.test_step_context,
        StepKind.PREDICT: plugin.predict_step_context,
    }
    return contexts[kind]()
