"""The torch schedule objects, through the public surface of ``torch.distributed.pipelining`` alone.

How the public classes are used (seen in torch 2.13 and 2.15; ``tests/ranks/test_schedule.py`` holds them to it):

* Metadata is static: ``input_args`` and ``output_args`` are given, so no forward runs only to learn shapes.
* Each microbatch's forward gets its own index (``mb``) and looks everything else up by it; ``step`` is called with
  ``mb=torch.arange(M)``, which torch cuts into M one-element tensors.
* The backward pass of a region is a pipeline of its own, in the reverse order of the stages. Only 1F1B leaves it to torch:
  there the last stage's forward returns the weighted loss; ``loss_fn`` hands it through, ``scale_grads=False``.
* Between two steps nothing of a batch is kept, nor memory for the next one (``_compat.pipelining``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from lightning_fxpipe._compat.pipelining import FrugalStage
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.stages.build import TensorSpec

ScheduleName = Literal["auto", "gpipe", "1f1b"]

RunMicrobatch = Callable[[int, tuple[Tensor, ...]], "Tensor | tuple[Tensor, ...]"]


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """Share of a step that a rank idles with GPipe or 1F1B and equal stages: (P-1)/(M+P-1) (GPipe, section 2.3)."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


class _MicrobatchAdapter(nn.Module):
    """What torch calls for each microbatch: gives the received tensors and the microbatch's index to ``run``."""

    def __init__(self) -> None:
        super().__init__()
        self.run: RunMicrobatch | None = None

    def forward(self, *received: Tensor, mb: Tensor) -> Tensor | tuple[Tensor, ...]:
        assert self.run is not None
        return self.run(int(mb), received)


class Pipeline:
    """One rank's part of a pass of microbatches of one shape through all ranks.

    Args:
        stage_index: The rank's place.
        num_stages: Places, one a rank.
        received: Specs of the tensors received from the previous place; empty for the first.
        sent: Specs of the tensors sent to the next place; None for the last.
        num_microbatches: Microbatches in one call of :meth:`step`.
        is_interleaved: Whether torch runs backward, too, one microbatch after another's forward pass (1F1B); the last place
            then gives each microbatch's weighted loss. With fewer microbatches than stages all forward passes come first.
            Else there are forward passes only.
        device: Device of the received tensors.
        group: Process group in which rank i has place i.
    """

    def __init__(
        self,
        *,
        stage_index: int,
        num_stages: int,
        received: tuple[TensorSpec, ...],
        sent: tuple[TensorSpec, ...] | None,
        num_microbatches: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        is_interleaved: bool = False,
    ) -> None:
        self._adapter = _MicrobatchAdapter()
        scalar = torch.empty((), device="meta", requires_grad=is_interleaved)
        self._stage = FrugalStage(
            self._adapter,
            stage_index,
            num_stages,
            device,
            input_args=_examples(received, is_interleaved),
            output_args=(scalar,) if sent is None else _examples(sent, is_interleaved),
            group=group,
        )
        self._num_microbatches = num_microbatches
        self._has_losses = is_interleaved and sent is None
        self._failed = False
        kind = Schedule1F1B if is_interleaved and num_microbatches >= num_stages else ScheduleGPipe
        self._schedule = kind(
            self._stage, num_microbatches, loss_fn=_pass_loss_through if is_interleaved else None, scale_grads=False
        )

    def step(self, run: RunMicrobatch) -> None:
        """Runs all microbatches. Called by every rank of the pipeline.

        Args:
            run: Computes one microbatch, from its index and what was received, which is its own. Returns what is sent; on the
                last rank a scalar.

        Raises:
            Exception: What ``run`` raised, without the wrapper that torch puts around it.
        """
        if self._failed:
            # torch keeps the losses of the step that failed, and would run their backward instead of the new ones.
            raise UnsupportedError(
                "The pipeline cannot go on after a step that failed.",
                todo="Make a new Trainer and module, and resume from a checkpoint.",
            )
        count = self._num_microbatches
        self._adapter.run, self._failed = run, True
        try:
            target = torch.zeros(count) if self._has_losses else None
            self._schedule.step(mb=torch.arange(count), target=target, return_outputs=False)
            self._stage.clear_runtime_states()  # torch does so with the next step only
            self._failed = False
            return
        except RuntimeError as error:
            # torch reports any failure of a stage as a RuntimeError with shapes; the user's own error is its cause.
            failure = error.__cause__
            if not isinstance(failure, Exception):
                raise
        finally:
            self._adapter.run = None  # it holds the batch
        raise failure  # out here, where it keeps what led to it


def _pass_loss_through(loss: Tensor, target: Tensor) -> Tensor:
    return loss


def _examples(specs: tuple[TensorSpec, ...], has_gradients: bool) -> tuple[Tensor, ...]:
    """Tensors of which torch reads shape, stride, dtype and ``requires_grad`` only."""
    return tuple(
        torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad and has_gradients)
        for spec in specs
    )
