"""The torch schedule objects, through the public surface of ``torch.distributed.pipelining`` alone.

How the public classes are used (seen in torch 2.13 and 2.15; ``tests/distributed/test_schedule.py`` holds them to it):

* Metadata is static: ``input_args`` and ``output_args`` are given, so no forward runs only to learn shapes.
* Each microbatch's forward gets its own index (``mb``) and looks everything else up by it; ``step`` is called with
  ``mb=torch.arange(M)``, which torch cuts into M one-element tensors.
* In training the last stage's forward returns the weighted loss; ``loss_fn`` hands it through, ``scale_grads=False``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.split import TensorSpec

ScheduleName = Literal["gpipe", "1f1b"]

RunMicrobatch = Callable[[int, tuple[Tensor, ...]], "Tensor | tuple[Tensor, ...]"]


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """Share of a step that a rank idles with GPipe or 1F1B and equal stages: (P-1)/(M+P-1) (GPipe, section 2.3)."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


class _MicrobatchAdapter(nn.Module):
    """What torch calls for each microbatch: gives the received tensors and the microbatch's index to ``run``."""

    def __init__(self, run: RunMicrobatch) -> None:
        super().__init__()
        self._run = run

    def forward(self, *received: Tensor, mb: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self._run(int(mb), received)


class Pipeline:
    """One rank's part of the schedule for microbatches of one shape.

    Args:
        run: Computes one microbatch. Returns the stage's outputs; on the last stage a scalar, in training the weighted loss.
        stage_index: The rank's stage.
        num_stages: Stages of the pipeline, one a rank.
        received: Specs of the tensors received from the previous stage; empty for the first.
        sent: Specs of the tensors sent to the next stage; None for the last.
        num_microbatches: Microbatches in one call of :meth:`step`.
        schedule: Schedule for training. 1F1B needs at least as many microbatches as stages and falls back to GPipe below that;
            evaluation always fills and drains.
        training: Whether a backward pass follows.
        device: Device of the received tensors.
        group: Process group in which rank i holds stage i.
    """

    def __init__(
        self,
        run: RunMicrobatch,
        *,
        stage_index: int,
        num_stages: int,
        received: tuple[TensorSpec, ...],
        sent: tuple[TensorSpec, ...] | None,
        num_microbatches: int,
        schedule: ScheduleName,
        training: bool,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        outputs = (torch.empty((), device="meta", requires_grad=training),) if sent is None else _examples(sent, training)
        stage = PipelineStage(
            _MicrobatchAdapter(run),
            stage_index,
            num_stages,
            device,
            input_args=_examples(received, training),
            output_args=outputs,
            group=group,
        )
        self._is_last = sent is None
        self._failed = False
        self._training = training
        self._num_microbatches = num_microbatches
        kind = Schedule1F1B if training and schedule == "1f1b" and num_microbatches >= num_stages else ScheduleGPipe
        loss_fn = _pass_loss_through if training else None
        self._schedule = kind(stage, num_microbatches, loss_fn=loss_fn, scale_grads=False)

    def step(self) -> None:
        """Runs all microbatches, forward and, in training, backward. Called by every rank of the pipeline.

        Raises:
            Exception: What ``run`` raised, without the wrapper that torch puts around it.
        """
        count = self._num_microbatches
        target = torch.zeros(count) if self._training and self._is_last else None
        if self._failed:
            # torch keeps the losses of the step that failed, and would run their backward instead of the new ones.
            raise UnsupportedError(
                "The pipeline cannot go on after a step that failed.",
                todo="Make a new Trainer and module, and resume from a checkpoint.",
            )
        self._failed = True
        try:
            self._schedule.step(mb=torch.arange(count), target=target, return_outputs=False)
            self._failed = False
            return
        except RuntimeError as error:
            # torch reports any failure of a stage as a RuntimeError with shapes; the user's own error is its cause.
            failure = error.__cause__
            if not isinstance(failure, Exception):
                raise
        raise failure  # out here, where it keeps what led to it


def _pass_loss_through(loss: Tensor, target: Tensor) -> Tensor:
    return loss


def _examples(specs: tuple[TensorSpec, ...], training: bool) -> tuple[Tensor, ...]:
    """Tensors of which torch reads shape, stride, dtype and ``requires_grad`` only."""
    return tuple(
        torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad and training)
        for spec in specs
    )
