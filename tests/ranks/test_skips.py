"""Tensors that go past stages: gradients of every step by name, and outputs, against one device; and what is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy
from lightning_fxpipe._compat.torch import patched_attributes
from lightning_fxpipe.schedules.executor import Executor
from lightning_fxpipe.schedules.program import Message
from lightning_fxpipe.simulation.actions import ActionTable
from tests.models import UNet
from tests.owntables import SPLIT_V, random_table
from tests.ranks.pool import RankPool

WIDTH, NUM_STEPS, BATCH = 8, 6, 12  # of two epochs, whose last batches have 7 samples
Run = Callable[["Skipping", Tensor], Tensor]


class Skipping(LightningModule):
    """Layers in a row, and what ``run`` takes past them."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.run = run
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("validation", (self(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.3)

    def between(self, first: int, end: int, h: Tensor) -> Tensor:
        for layer in self.layers[first:end]:
            h = layer(h)
        return h


def like_a_u(m: Skipping, x: Tensor) -> Tensor:
    """From the first stage to the last, and from the second to the third."""
    a = m.between(0, 1, x)
    b = m.between(2, 3, m.between(1, 2, a))
    return m.between(5, 8, m.between(4, 5, m.between(3, 4, b)) + b) + a


def used_by_several(m: Skipping, x: Tensor) -> Tensor:
    """As an encoder's result is: in the second stage, not in the third, and in the last."""
    code = m.between(0, 2, x)
    h = m.between(3, 4, m.between(2, 3, code) * code)
    return m.between(6, 8, m.between(4, 6, h)) + code * code


def of_numbers_and_without_gradient(m: Skipping, x: Tensor) -> Tensor:
    h = m.between(0, 2, x)
    order, fixed = torch.argsort(h.detach(), dim=1), m.frozen(x.cumsum(1))
    return m.between(2, 8, h).gather(1, order) * fixed


def whose_gradient_nobody_computes(m: Skipping, x: Tensor) -> Tensor:
    a = m.between(0, 2, x)
    b = m.between(2, 4, a)
    return m.between(4, 8, b) + a.detach() * 2 + (b * 0 if m.training else b)


def changed_in_place(m: Skipping, x: Tensor) -> Tensor:
    a = m.between(0, 2, x)
    h = m.between(2, 6, a)
    return m.between(6, 8, h) + (a * 1).mul_(2)


class OfImages(Skipping):
    """A U-Net."""

    def __init__(self) -> None:
        super().__init__(lambda m, x: m.net(x))  # type: ignore[operator]
        torch.manual_seed(4)
        self.layers = nn.ModuleList()
        self.net = UNet()


RUNS: dict[str, Run] = {
    run.__name__: run
    for run in (like_a_u, used_by_several, of_numbers_and_without_gradient, whose_gradient_nobody_computes, changed_in_place)
}
KINDS = [*RUNS, "u_net"]
OFTEN = ("like_a_u", "whose_gradient_nobody_computes")


class Recording(Callback):
    """The gradients of each step, and what is logged."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        named = ((fqn, parameter.grad) for fqn, parameter in module.named_parameters())
        self.steps.append({fqn: gradient.detach().clone() for fqn, gradient in named if gradient is not None})

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        self.steps[-1]["the loss"] = trainer.callback_metrics["loss"].clone()


def recorded(kind: str, schedule: str | ActionTable | None, devices: int = 1) -> tuple[list[dict[str, Tensor]], float, int]:
    """Runs on every rank: the gradients of each step and its loss, the validation loss, and how many messages this rank has
    sent past a stage. The last microbatch of an epoch has one sample."""
    strategy: Any = "auto"
    if schedule is not None:
        options: dict[str, Any] = {} if kind == "u_net" else {"split_points": ["layers.2", "layers.4", "layers.6"]}
        options["schedule"] = ActionTable.from_csv(SPLIT_V) if schedule == "a table" else schedule
        if isinstance(options["schedule"], str):
            options["num_microbatches"] = 5
            options |= {"num_stages": 4} if devices == 1 else {"stages_per_rank": 4 // devices}
        strategy = FxPipeStrategy(**options)
    generator = torch.Generator().manual_seed(4)
    shape = (1, 16, 16) if kind == "u_net" else (WIDTH,)
    data = TensorDataset(*(torch.randn(3 * BATCH - 5, *shape, generator=generator) for _ in range(2)))
    recording, sent, quiet = Recording(), [], {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    send = Executor._send

    def counted(self: Executor, message: Message) -> None:
        edges = (self._program.edges[value.edge] for value in message.values)
        sent.extend(edge for edge in edges if edge.target > edge.source + 1)
        send(self, message)

    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=2,
        num_sanity_val_steps=0,
        callbacks=[recording],
        enable_model_summary=False,
        **quiet,  # type: ignore[arg-type]
    )
    with patched_attributes((Executor, "_send", counted)):
        loader = DataLoader(data, batch_size=BATCH)
        trainer.fit(OfImages() if kind == "u_net" else Skipping(RUNS[kind]), loader, loader)
    return recording.steps, float(trainer.callback_metrics["validation"]), len(sent)


@cache
def on_one_device(kind: str) -> tuple[list[dict[str, Tensor]], float, int]:
    return recorded(kind, None)


def assert_equals_one_device(found: tuple[list[dict[str, Tensor]], float, int], kind: str) -> None:
    expected = on_one_device(kind)
    assert len(found[0]) == len(expected[0]) == NUM_STEPS
    for index, (mine, theirs) in enumerate(zip(found[0], expected[0], strict=True)):
        assert mine.keys() == theirs.keys()
        for fqn, gradient in mine.items():
            message = f"step {index}, {fqn}: {{}}"
            torch.testing.assert_close(gradient, theirs[fqn], rtol=1e-5, atol=1e-6, msg=message.format)
    assert found[1] == pytest.approx(expected[1], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        pytest.param(kind, schedule, marks=() if schedule == "1f1b" or kind in OFTEN else pytest.mark.slow)
        for kind in KINDS
        for schedule in ("gpipe", "1f1b", "zb_h1")
    ],
)
def test_four_ranks_equal_one_device(ranks: Callable[[int], RankPool], kind: str, schedule: str) -> None:
    results = ranks(4).run(recorded, kind, schedule, 4)
    for result in results:
        assert_equals_one_device(result, kind)
    assert sum(num_sent for *_, num_sent in results)


@pytest.mark.parametrize(
    "schedule", ["looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "a table"]
)
@pytest.mark.parametrize("kind", ["like_a_u", "used_by_several", "u_net"])
def test_stages_of_one_rank_give_each_other_what_they_have(ranks: Callable[[int], RankPool], kind: str, schedule: str) -> None:
    """In a V, a skip like a U's need not leave its rank; in rounds, one over two stages need not. The table takes microbatches
    in any order, and goes forward with all of them first in each epoch's last batch, which has others."""
    results = ranks(2).run(recorded, kind, schedule, 2)
    for result in results:
        assert_equals_one_device(result, kind)
    num_sent = sum(num_sent for *_, num_sent in results)
    if kind != "u_net":
        assert (num_sent == 0) == ((kind == "like_a_u") == (schedule in ("zbv_zero_bubble", "a table")))


def recorded_with_tables(seeds: Sequence[int]) -> list[Any]:
    """Runs on every rank."""
    return [recorded(KINDS[seed % len(KINDS)], random_table(seed), 2) for seed in seeds]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 48, 12))
def test_any_order_equals_one_device(ranks: Callable[[int], RankPool], first: int) -> None:
    seeds = range(first, first + 12)
    for result in ranks(2).run(recorded_with_tables, seeds, timeout_seconds=240):
        for seed, found in zip(seeds, result, strict=True):
            assert_equals_one_device(found, KINDS[seed % len(KINDS)])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_of_one_process_equal_one_device(kind: str, schedule: str) -> None:
    found = recorded(kind, schedule)
    assert_equals_one_device(found, kind)
    assert found[2] == 0


SEEN: list[int] = []  # not on the module: what changes with each call keeps a batch whole


class Fails(nn.Module):
    """Fails at a later microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(1)
        if len(SEEN) == 9:
            raise ArithmeticError("of the third stage")
        return x


def failing(schedule: str) -> str:
    """Runs on every rank: what the run ends with."""
    SEEN.clear()
    module = Skipping(like_a_u)
    module.layers[4] = nn.Sequential(module.layers[4], Fails())
    points = ["layers.2", "layers.4", "layers.6"]
    strategy = FxPipeStrategy(schedule=schedule, num_microbatches=4, split_points=points)  # type: ignore[arg-type]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=4, max_epochs=1, **quiet)  # type: ignore[arg-type]
    data = TensorDataset(*torch.randn(2, 4 * BATCH, WIDTH))
    with pytest.raises(Exception, match="of the third stage") as ended:
        trainer.fit(module, DataLoader(data, batch_size=BATCH))
    return type(ended.value).__name__


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_that_wait_for_a_skip_are_told_of_an_error(schedule: str) -> None:
    """The last stage waits for what the third should send, the first for a gradient past it."""
    pool = RankPool(4)  # of its own: ranks that have lost each other are of no more use
    try:
        assert pool.run(failing, schedule, timeout_seconds=60) == ["PeerError", "ArithmeticError", "PeerError", "PeerError"]
    finally:
        pool.kill()
