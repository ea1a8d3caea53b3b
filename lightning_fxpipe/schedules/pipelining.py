"""The torch schedule objects, through the public surface of ``torch.distributed.pipelining`` alone.

How the public classes are used (seen in torch 2.13 and 2.15; ``tests/ranks/test_schedule.py`` holds them to it):

* Metadata is static: ``input_args`` and ``output_args`` are given, so no forward runs only to learn shapes.
* Each microbatch's forward gets its own index (``mb``) and looks everything else up by it; ``step`` is called with
  ``mb=torch.arange(M)``, which torch cuts into M one-element tensors.
* The backward pass of a region is a pipeline of its own, in the reverse order of the stages. It is left to torch only where
  microbatches go forward and backward by turns: there the last stage's forward returns the weighted loss; ``loss_fn`` hands it
  through, ``scale_grads=False``.
* A pass that goes one way, with one stage on each rank, needs no schedule (``schedules.one_way``).
* What goes past stages goes past the schedule, too (``schedules.skips``).
* Between two steps nothing of a batch is kept, nor memory for the next one (``_compat.pipelining``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from lightning_fxpipe._compat.autograd import with_own_node
from lightning_fxpipe._compat.pipelining import FrugalStage, TableSchedule, unlogged, watched
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.schedules.by_name import Order
from lightning_fxpipe.schedules.one_way import OneWay
from lightning_fxpipe.schedules.places import Noting, Place, RunMicrobatch
from lightning_fxpipe.schedules.skips import SkipGradients, SkipMessages, around
from lightning_fxpipe.schedules.split_backward import HookWatch, may_split
from lightning_fxpipe.simulation.actions import ActionTable
from lightning_fxpipe.stages.build import TensorSpec


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """Share of a step that a rank idles with GPipe or 1F1B and equal stages: (P-1)/(M+P-1) (GPipe, section 2.3)."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


class _MicrobatchAdapter(nn.Module):
    """What torch calls for each microbatch: gives the received tensors and the microbatch's index to ``run``."""

    def __init__(self, place: Place, skips: SkipGradients | None) -> None:
        super().__init__()
        self.run: RunMicrobatch | None = None
        self.place = place
        self.skips = skips
        self._watch = HookWatch()
        self._splits: dict[int, bool] = {}  # by microbatch

    def forward(self, *received: Tensor, mb: Tensor) -> Tensor | tuple[Tensor, ...]:
        assert self.run is not None
        place, index = self.place, int(mb)
        if self.skips is not None:
            received = (*self.skips.receive(index), *received)
        if place.parameters is None:
            return self._without_skips(index, self.run(place.stage, index, received))
        with self._watch.watching():
            outputs = self.run(place.stage, index, received)
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        # torch detaches them in place after the first half of their backward pass, and the second may need what was sent.
        outputs = tuple(with_own_node(output) if output.requires_grad else output for output in outputs)
        self._splits[index] = not self._watch.has_seen_any and may_split(received, outputs, place.parameters)
        return outputs[0] if place.sent is None else self._without_skips(index, outputs)

    def _without_skips(self, index: int, outputs: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """What the next place gets; the rest is sent."""
        num_out = len(self.place.skips_out)
        if self.skips is None or not num_out:
            return outputs
        assert isinstance(outputs, tuple)
        self.skips.send(index, outputs[:num_out])
        return outputs[num_out:]

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
        self._failed = False
        self._passing: _ByTorch | OneWay
        self._places = {place.stage: place for place in places}
        self._onward = self._back = None
        if any(place.skips_in or place.skips_out for place in places):
            messages = partial(SkipMessages, num_microbatches=num_microbatches, device=device, group=group)
            self._onward = messages()
            if has_backward:
                # 1F1B has no more microbatches on the way than places; other orders may.
                self._back = messages(num_kept=num_places if order is Schedule1F1B else None)
        if order is ScheduleGPipe and not has_backward:
            (place,) = places
            self._passing = OneWay(place, num_microbatches=num_microbatches, device=device, group=group, noting=noting)
        else:
            self._passing = _ByTorch(
                places,
                num_places=num_places,
                num_microbatches=num_microbatches,
                order=order,
                device=device,
                group=group,
                skips=None if self._onward is None or self._back is None else (self._onward, self._back),
                has_backward=has_backward,
                noting=noting,
            )

    def step(self, run: RunMicrobatch) -> None:
        """Runs all microbatches. Called by every rank of the pipeline.

        Args:
            run: Computes one microbatch of a stage.

        Raises:
            Exception: What ``run`` raised, without the wrapper that torch puts around it.
        """
        if self._failed:
            # torch keeps the losses of the step that failed, and would run their backward instead of the new ones.
            raise UnsupportedError(
                "The pipeline cannot continue after a failed step.",
                todo="Create a new Trainer and module, and resume from a checkpoint.",
            )
        self._failed = True
        if self._onward is not None:
            for place in self._places.values():
                self._onward.ask(place.skips_in, 0)
            if self._back is None:
                run = around(run, self._places, self._onward)
        self._passing.step(run)
        for messages in filter(None, (self._onward, self._back)):
            messages.finish()
        self._failed = False


class _ByTorch:
    """A pass that torch's schedules run; arguments as those of :class:`Pipeline`, and messages of skips, onward and back."""

    def __init__(
        self,
        places: Sequence[Place],
        *,
        num_places: int,
        num_microbatches: int,
        order: Order,
        device: torch.device,
        group: dist.ProcessGroup | None,
        skips: tuple[SkipMessages, SkipMessages] | None,
        has_backward: bool,
        noting: Noting | None,
    ) -> None:
        self._noting = noting
        scalar = torch.empty((), device="meta", requires_grad=has_backward)
        self._adapters = [
            _MicrobatchAdapter(place, None if skips is None else SkipGradients(place, *skips)) for place in places
        ]
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
                skips=adapter.skips,
            )
            for place, adapter in zip(places, self._adapters, strict=True)
        ]
        self._num_microbatches = num_microbatches
        self._has_losses = has_backward and any(place.sent is None for place in places)
        self._schedule = _schedule(order, self._stages, num_microbatches, _pass_loss_through if has_backward else None)

    def step(self, run: RunMicrobatch) -> None:
        """As :meth:`Pipeline.step`."""
        count = self._num_microbatches
        for adapter in self._adapters:
            adapter.run = run
        try:
            target = torch.zeros(count) if self._has_losses else None
            with unlogged(), self._noted():
                self._schedule.step(mb=torch.arange(count), target=target, return_outputs=False)
            for stage in self._stages:
                stage.clear_runtime_states()  # torch does so with the next step only
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
        return self._watched(noting) if noting is not None and noting.recorder.is_in_step else nullcontext()

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
