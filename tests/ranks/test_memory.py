"""What a batch has needed is given back when its step is over; Python's search for cycles may be long in coming."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fxpipe import FxPipeStrategy
from lightning_fxpipe.schedules.executor import Channels, Executor
from lightning_fxpipe.schedules.program import BOTH_WAYS, Edge, program_of
from lightning_fxpipe.schedules.stage_graph import StageGraph, StageGraphs
from lightning_fxpipe.simulation.actions import FORWARD, Action
from lightning_fxpipe.simulation.orders import gpipe, one_forward_one_backward
from lightning_fxpipe.stages.build import TensorSpec
from tests.lit import make_trainer
from tests.livebytes import LiveBytes, without_garbage
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net

Ranks = Callable[[int], RankPool]
WIDTH = 64  # of weights that nothing else is as large as
NUM_CLASSES = 23  # nor has results as large


class Wide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES))


class Counts(L.Callback):
    """Counts the tensors that are as wide as the model after each batch: weights, gradients, activations."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and not each.is_meta]
        self.found.append(len({each.untyped_storage().data_ptr() for each in tensors if WIDTH in each.shape}))


class Results(L.Callback):
    """Counts the samples of which there are results of the model when the backward pass begins."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_before_backward(self, *args: Any) -> None:
        results = [
            each for each in gc.get_objects() if type(each) is Tensor and each.dim() == 2 and each.shape[1] == NUM_CLASSES
        ]
        self.found.append(sum({each.untyped_storage().data_ptr(): len(each) for each in results}.values()))


def count(counts: Any, schedule: Any) -> list[int]:
    """Runs on every rank."""
    torch.manual_seed(1)
    strategy = FxPipeStrategy(num_microbatches=4, schedule=schedule)
    trainer = make_trainer(max_epochs=2, limit_val_batches=0, strategy=strategy, devices=2, callbacks=[counts])
    with without_garbage():
        trainer.fit(Wide())
    return counts.found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_no_batch_is_kept(ranks: Ranks, schedule: str) -> None:
    """An exception that ends a stage's step keeps the frames that it came through while somebody has it, and these their
    tensors; a hook that gives autograd the very result of an operation keeps both for ever."""
    for found in ranks(2).run(count, Counts(), schedule):
        assert len(found) == 12
        assert max(found[:5]) <= found[0], found
        assert max(found[6:]) <= found[6], found  # the first epoch's last batch is smaller, and has buffers of its own


def test_results_of_microbatches_are_not_kept(ranks: Ranks) -> None:
    """A microbatch's results are copied to their place in the batch's as they come; its backward pass needs their graph only.
    The batch's are the step's own, and gone when it has made a loss of them."""
    found, _ = ranks(2).run(count, Results(), "gpipe")  # rank 0 has the last stage
    assert found[1:5] == [0] * 4, found  # after the first batch, which is looked at more closely


# ------------------------------------------------------------------ the peak of a step


@contextmanager
def measured_batches() -> Iterator[list[tuple[int, int]]]:
    """For each training batch in the block, the bytes of tensors when it begins, and the most while it runs."""
    found: list[tuple[int, int]] = []
    run = _AutomaticOptimization.run

    def measured(self: Any, *args: Any) -> Any:
        live = LiveBytes()
        start = live.now
        with live:
            result = run(self, *args)
        found.append((start, live.peak))
        return result

    _AutomaticOptimization.run = measured  # type: ignore[method-assign]
    try:
        yield found
    finally:
        _AutomaticOptimization.run = run  # type: ignore[method-assign]


class Square(Wide):
    """Weights that take much more than what is computed with them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 128), *(nn.Linear(128, 128) for _ in range(6)))
        self.head = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)), nn.Linear(128, NUM_CLASSES))


def peaks(kind: type[L.LightningModule], schedule: Any, num_microbatches: int = 4) -> tuple[list[tuple[int, int]], int]:
    """Runs on every rank: the bytes for each batch, and those of the rank's parameters."""
    torch.manual_seed(1)
    strategy = FxPipeStrategy(num_microbatches=num_microbatches, schedule=schedule, gather_after_run=False)
    trainer = make_trainer(max_epochs=1, limit_val_batches=0, strategy=strategy, devices=2)
    with without_garbage(), measured_batches() as found:
        module = kind()
        trainer.fit(module)
    return found, sum(p.numel() * p.element_size() for p in module.parameters() if not p.is_meta)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gradients_are_there_once(ranks: Ranks, schedule: str) -> None:
    """Lightning sets those of the batch before to zero when the step has run; with 1F1B the new ones were there by then."""
    for found, num_bytes in ranks(2).run(peaks, Square, schedule):
        assert len(found) == 6
        for start, peak in found[1:]:
            assert peak - start < num_bytes / 2, (start, peak, num_bytes)  # a microbatch's own, of one layer after the other


TALL_WIDTH, TALL_LAYERS, TALL_ROWS, TALL_MICROBATCHES = 64, 12, 32, 8
TALL_RESULT = TALL_ROWS * TALL_WIDTH * 4  # bytes of a layer's result for a microbatch


class Tall(L.LightningModule):
    """Of each layer autograd saves the result; all of them take more than the weights."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(TALL_WIDTH, TALL_WIDTH), nn.Tanh()) for _ in range(TALL_LAYERS))
        self.model = nn.Sequential(*layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).mean()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(6 * TALL_ROWS * TALL_MICROBATCHES, TALL_WIDTH), TALL_ROWS * TALL_MICROBATCHES)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def peaks_of_tall(schedule: Any) -> list[tuple[int, int]]:
    """Runs on every rank."""
    return peaks(Tall, schedule, num_microbatches=TALL_MICROBATCHES)[0]


@pytest.mark.parametrize(("schedule", "in_flight"), [("1f1b", (1, 2)), ("gpipe", (TALL_MICROBATCHES, TALL_MICROBATCHES))])
def test_a_step_needs_what_the_schedule_says(ranks: Ranks, schedule: str, in_flight: tuple[int, int]) -> None:
    """Weights, their gradients, the optimizer's states, what autograd saves of the microbatches under way, and two boundaries
    for each stage: no second gradients, no results of batches or microbatches that nobody needs any more. Rank 0 has the last
    stage."""
    for found, num_microbatches in zip(
        ranks(2).run(peaks_of_tall, schedule), in_flight, strict=True
    ):  # rank 0 has the last stage
        saved = num_microbatches * TALL_LAYERS // 2 * TALL_RESULT
        boundaries = 2 * 2 * TALL_RESULT
        results = TALL_MICROBATCHES * TALL_RESULT if schedule == "gpipe" else 0  # the step's loss is made of the whole batch
        backward = 3 * TALL_RESULT + 2 * TALL_WIDTH * TALL_WIDTH * 4  # a layer's, with what is added to a gradient
        for start, peak in found[2:]:  # from the second batch on there are gradients and states when it begins
            assert peak - start <= saved + boundaries + results + backward, (start, peak)


# ------------------------------------------------------------------ what crosses the cuts

NUM_ENTRIES = 10_000  # of what crosses each cut; a stage saves nothing else
NUM_MICROBATCHES = 8


def run_pipeline(training: bool) -> list[tuple[float, float]]:
    """Runs on every rank: for each of three steps, how many boundaries' bytes live when it begins, and at most."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    parameter = nn.Parameter(torch.ones(1))
    spec = TensorSpec(shape=(NUM_ENTRIES,), dtype=torch.float32, requires_grad=True)
    edges = [Edge(source=stage, target=stage + 1, spec=spec) for stage in range(num_ranks - 1)]
    table = (one_forward_one_backward if training else gpipe)(num_ranks, NUM_MICROBATCHES)
    graphs = StageGraphs()

    def compute(action: Action, received: tuple[Tensor, ...]) -> Sequence[Tensor]:
        if action.kind is not FORWARD:
            return graphs.backward(action, received)
        leaves = [tensor.requires_grad_(training) for tensor in received]
        with torch.set_grad_enabled(training):
            made = leaves[0] + parameter if leaves else parameter.expand(NUM_ENTRIES).clone()
            made = made.sum() if rank == num_ranks - 1 else made
        if training:
            gradient = torch.ones(()) if rank == num_ranks - 1 else None
            graphs.put(action, StageGraph.of(leaves, [made]), splits=False, gradient=gradient)
        return () if rank == num_ranks - 1 else [made.detach()]

    executor = Executor(
        program_of(table, edges, rank, kinds=BOTH_WAYS if training else {FORWARD}),
        device=torch.device("cpu"),
        channels=Channels(onward=None, back=None, global_ranks=tuple(range(num_ranks))),
    )
    found: list[tuple[float, float]] = []
    with without_garbage():
        for _ in range(3):
            live = LiveBytes()
            start = live.now
            with live:
                executor.step(compute)
            found.append((start, live.peak))
    one = NUM_ENTRIES * 4
    return [((start - found[0][0]) / one, (peak - start) / one) for start, peak in found]


def test_1f1b_has_boundaries_of_as_many_microbatches_as_stages(ranks: Ranks) -> None:
    """Buffers for all microbatches, kept between steps, would be there for up to eight shapes of batches."""
    for found in ranks(3).run(run_pipeline, True):
        for start, most in found[1:]:
            assert start < 0.1, found
            assert most < 2 * 3 + 2.1, found  # received and sent by three; and gradients, of which one comes and one goes


def test_evaluation_keeps_no_boundaries(ranks: Ranks) -> None:
    for found in ranks(3).run(run_pipeline, False):
        assert max(start for start, _ in found) < 0.1, found
