"""The torch schedule objects, through the public surface of ``torch.distributed.pipelining`` alone.

How the public classes are used (seen in torch 2.13 and 2.15; ``tests/ranks/test_schedule.py`` holds them to it):

* Metadata is static: ``input_args`` and ``output_args`` are given, so no forward runs only to learn shapes.
* Each microbatch's forward gets its own index (``mb``) and looks everything else up by it; ``step`` is called with
  ``mb=torch.arange(M)``, which torch cuts into M one-element tensors.
* The backward pass of a region is a pipeline of its own, in the reverse order of the stages. It is left to torch only where
  microbatches go forward and backward by turns: there the last stage's forward returns the weighted loss; ``loss_fn`` hands it
  through, ``scale_grads=False``.
* Between two steps nothing of a batch is kept, nor memory for the next one (``_compat.pipelining``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from lightning_fxpipe._compat.autograd import with_own_node
from lightning_fxpipe._compat.pipelining import FrugalStage, TableSchedule, unlogged, watched
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.recording.recorder import Recorder
from lightning_fxpipe.schedules.by_name import Order
from lightning_fxpipe.schedules.split_backward import HookWatch, may_split
from lightning_fxpipe.simulation.actions import FORWARD, Action, ActionTable, Kind
from lightning_fxpipe.stages.build import TensorSpec

_NOTHING = nullcontext()
RunMicrobatch = Callable[[int, int, tuple[Tensor, ...]], "Tensor | tuple[Tensor, ...]"]


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """Share of a step that a rank idles with GPipe or 1F1B and equal stages: (P-1)/(M+P-1) (GPipe, section 2.3)."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


@dataclass(frozen=True, kw_only=True)
class Noting:
    """How the actions of a pass are noted.

    Attributes:
        recorder: Notes them, while a step is recorded.
        first: Number in the batch of the first of the pass's microbatches.
        kind: What a pass that goes one way does; None for one that goes both.
    """

    recorder: Recorder
    first: int
    kind: Kind | None

    def action(self, stage: int, computes: str, index: int) -> AbstractContextManager[None]:
        """In the block a stage computes something, as torch writes it, for a microbatch of the pass."""
        if self.kind is not None and computes != FORWARD.value:
            return _NOTHING  # of a table of actions forward and back, half of which do nothing
        return self.recorder.undivided(Action(stage, self.kind or Kind(computes), self.first + index))


@dataclass(frozen=True, kw_only=True)
class Place:
    """One of a rank's stages in a pass.

    Attributes:
        stage: The stage.
        index: Its number on the way of the pass.
        received: Specs of the tensors received from the place before; empty for the first.
        sent: Specs of the tensors sent to the next place; None for the last.
        parameters: Those whose gradients the stage computes, where they may come later than those of its inputs; else None.
    """

    stage: int
    index: int
    received: tuple[TensorSpec, ...]
    sent: tuple[TensorSpec, ...] | None
    parameters: tuple[nn.Parameter, ...] | None = None


class _MicrobatchAdapter(nn.Module):
    """What torch calls for each microbatch: gives the received tensors and the microbatch's index to ``run``."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.run: RunMicrobatch | None = None
        self.place = place
        self._watch = HookWatch()
        self._splits: dict[int, bool] = {}  # by microbatch

    def forward(self, *received: Tensor, mb: Tensor) -> Tensor | tuple[Tensor, ...]:
        assert self.run is not None
        place, index = self.place, int(mb)
        if place.parameters is None:
            return self.run(place.stage, index, received)
        with self._watch.watching():
            outputs = self.run(place.stage, index, received)
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        # torch detaches them in place after the first half of their backward pass, and the second may need what was sent.
        outputs = tuple(with_own_node(output) if output.requires_grad else output for output in outputs)
        self._splits[index] = not self._watch.has_seen_any and may_split(received, outputs, place.parameters)
        return outputs[0] if place.sent is None else outputs

    def parameters(self, recurse: bool = True) -> Any:
        """Those of the stage, which is no submodule: torch asks for them where it splits backward passes."""
        return iter(self.place.parameters or ())

    def splits(self, index: int) -> bool:
        """Whether the backward pass of a microbatch may be split. The first place's runs as a whole when torch splits it."""
        return self._splits.get(index, False) or self.place.index == 0


class Pipeline:
    """One rank's part of a pass of microbatches of one shape through all ranks.

    Args:
        places: The rank's stages, in the order of the pass.
        num_places: Those of all ranks.
        num_microbatches: Microbatches in one call of :meth:`step`.
        order: In which order the ranks do what.
        device: Device of the received tensors.
        group: Process group whose ranks the order is for.
        has_backward: Whether torch runs backward, too; the last place then gives each microbatch's weighted loss. Else there
            are forward passes only, and the order's backward actions do nothing.
        noting: How its actions are noted; None: they are not.
    """

    def __init__(
        self,
        places: Sequence[Place],
        *,
        num_places: int,
        num_microbatches: int,
        order: Order,
        device: torch.device,
        group: dist.ProcessGroup | None,
        has_backward: bool = False,
        noting: Noting | None = None,
    ) -> None:
        self._noting = noting
        scalar = torch.empty((), device="meta", requires_grad=has_backward)
        self._adapters = [_MicrobatchAdapter(place) for place in places]
        self._stages = [
            FrugalStage(
                adapter,
                place.index,
                num_places,
                device,
                input_args=_examples(place.received, has_backward),
                output_args=(scalar,) if place.sent is None else _examples(place.sent, has_backward),
                group=group,
                splits=adapter.splits,
            )
            for place, adapter in zip(places, self._adapters, strict=True)
        ]
        self._num_microbatches = num_microbatches
        self._has_losses = has_backward and any(place.sent is None for place in places)
        self._failed = False
        self._schedule = _schedule(order, self._stages, num_microbatches, _pass_loss_through if has_backward else None)

    def step(self, run: RunMicrobatch) -> None:
        """Runs all microbatches. Called by every rank of the pipeline.

        Args:
            run: Computes one microbatch of a stage, from the stage, the microbatch's index and what was received, which is its
                own. Returns what is sent; of the last place a scalar.

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
        self._failed = True
        for adapter in self._adapters:
            adapter.run = run
        try:
            target = torch.zeros(count) if self._has_losses else None
            with unlogged(), self._noted():
                self._schedule.step(mb=torch.arange(count), target=target, return_outputs=False)
            for stage in self._stages:
                stage.clear_runtime_states()  # torch does so with the next step only
            self._failed = False
            return
        except RuntimeError as error:
            # torch reports any failure of a stage as a RuntimeError with shapes; the user's own error is its cause.
            failure = error.__cause__
            if not isinstance(failure, Exception):
                raise
        finally:
            for adapter in self._adapters:
                adapter.run = None  # it holds the batch
        raise failure  # out here, where it keeps what led to it

    def _noted(self) -> AbstractContextManager[None]:
        """In the block the pass runs; where this rank does no action of it, it waits."""
        noting = self._noting
        return self._watched(noting) if noting is not None and noting.recorder.is_in_step else _NOTHING

    @contextmanager
    def _watched(self, noting: Noting) -> Iterator[None]:
        with ExitStack() as watches:
            for adapter, stage in zip(self._adapters, self._stages, strict=True):
                watches.enter_context(watched(stage, partial(noting.action, adapter.place.stage)))
            watches.enter_context(noting.recorder.waiting())
            yield


def _schedule(order: Order, stages: Sequence[FrugalStage], num_microbatches: int, loss: Callable[..., Tensor] | None) -> Any:
    """What runs an order."""
    if isinstance(order, ActionTable):
        rows = [[str(action) for action in actions] for actions in order.ranks]
        return TableSchedule(stages, num_microbatches, rows, loss_fn=loss, scale_grads=False)
    if issubclass(order, PipelineScheduleSingle):
        (stage,) = stages
        return order(stage, num_microbatches, loss_fn=loss, scale_grads=False)
    return order([*stages], num_microbatches, loss_fn=loss, scale_grads=False)


def _pass_loss_through(loss: Tensor, target: Tensor) -> Tensor:
    return loss


def _examples(specs: tuple[TensorSpec, ...], has_gradients: bool) -> tuple[Tensor, ...]:
    """Tensors of which torch reads shape, stride, dtype and ``requires_grad`` only."""
    return tuple(
        torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad and has_gradients)
        for spec in specs
    )
