"""Tensors and other state that several blocks have, whoever changes it: the step, the code around the blocks, a block, or an
evaluation that cannot go through the stages."""

from __future__ import annotations

import threading
from collections import ChainMap, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe import FxPipeError, FxPipeStrategy
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go

_local = threading.local()
_local.scale = 1.0


class Block(nn.Module):
    """One of four, which have an object together."""

    def __init__(self, shared: Any, index: int) -> None:
        super().__init__()
        self.linear, self.shared, self.index, self.num_calls = nn.Linear(12, 12), shared, index, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.step(x)

    def step(self, x: Tensor) -> Tensor:
        """Computes the result of a call."""
        return x + torch.tanh(self.linear(x) + self.shared)


class Blocks(nn.Module):
    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.shared = self.make()
        self.num_calls = 0
        self.blocks = nn.ModuleList(self.block(self.shared, index) for index in range(4))

    def make(self) -> Any:
        """Makes what the blocks have together."""
        return torch.zeros(12)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Shares(Net):
    shuffle = False
    model: type[Blocks] = Blocks

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.model()  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.begin(batch[0], batch_idx)
        return super().training_step(batch, batch_idx)

    def begin(self, x: Tensor, batch_idx: int) -> None:
        """Runs before the model's call."""


# ------------------------------------------------------------------ a block changes a tensor


class FillsABank(Block):
    def step(self, x: Tensor) -> Tensor:
        if self.index == 0:
            self.shared[self.num_calls % 4] = x.detach().mean(0)
        return x + torch.tanh(self.linear(x) + self.shared.mean(0))


class BankOfTheFirst(Blocks):
    block = FillsABank

    def make(self) -> Tensor:
        return torch.zeros(4, 12)


class LastFills(Block):
    def step(self, x: Tensor) -> Tensor:
        result = super().step(x)
        if self.index == 3:
            self.shared.copy_(x.detach().mean(0))
        return result


class OfTheLast(Blocks):
    block = LastFills


class ScalesInADict(Block):
    def step(self, x: Tensor) -> Tensor:
        if self.index == 0:
            self.shared["scale"].mul_(1.1)
        return x + torch.tanh(self.linear(x) * self.shared["scale"])


class ScaleInADict(Blocks):
    block = ScalesInADict

    def make(self) -> Any:
        return {"scale": torch.ones(1)}


class Skips(Block):
    """Passes a tensor on in a list, which is empty again in the end."""

    def step(self, x: Tensor) -> Tensor:
        key = min(self.index, 3 - self.index)
        if self.index > 1:
            x = x + self.shared[key].pop()
        x = torch.tanh(self.linear(x))
        if self.index < 2:
            self.shared[key].append(x)
        return x


class SkipsInLists(Blocks):
    block = Skips

    def make(self) -> Any:
        return defaultdict(list)


# ------------------------------------------------------------------ the code around the blocks changes something


class ReadsAnEntry(Block):
    def step(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) * self.shared["scale"])


class AnnealsForBlocks(Blocks):
    """Its validation cannot go through the stages, because blocks read what the code around them sets."""

    block = ReadsAnEntry

    def make(self) -> Any:
        return {"scale": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        self.shared["scale"] = 1 + 0.1 * self.num_calls
        self.num_calls += 1
        return super().forward(x)


# ------------------------------------------------------------------ the step does


class Sets(Shares):
    def begin(self, x: Tensor, batch_idx: int) -> None:
        for block in self.backbone.blocks:  # type: ignore[union-attr]
            block.shared = x.mean(0)  # type: ignore[union-attr, assignment]


class Fills(Shares):
    def begin(self, x: Tensor, batch_idx: int) -> None:
        self.backbone.shared.mul_(0.9).add_(x.mean(0), alpha=0.1)  # type: ignore[operator, union-attr]


class Queues(Blocks):
    class _Sums(Block):
        def step(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.linear(x) + sum(self.shared))

    block = _Sums

    def make(self) -> Any:
        return deque([torch.zeros(12)], maxlen=3)


class Appends(Shares):
    model = Queues

    def begin(self, x: Tensor, batch_idx: int) -> None:
        self.backbone.shared.append(x.mean(0))  # type: ignore[operator, union-attr]


class SharedBuffer(Blocks):
    """One buffer of all blocks, which the first changes before the stages begin, and which their backward passes read."""

    class _Scales(Block):
        scale: Tensor

        def __init__(self, shared: Any, index: int) -> None:
            super().__init__(shared, index)
            self.register_buffer("scale", shared["scale"])

        def step(self, x: Tensor) -> Tensor:
            if self.index == 0:
                self.scale.add_(0.1)
            return x + torch.tanh(self.linear(x) * self.scale)

    block = _Scales
    make = ScaleInADict.make


# ------------------------------------------------------------------ an evaluation on one rank


class Counts(Block):
    def __init__(self, shared: Any, index: int) -> None:
        super().__init__(shared, index)
        self.average = torch.zeros(12)

    def step(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x + torch.tanh(self.linear(x) * (1 + 0.1 * self.num_calls) + self.average)


class WithCounts(Blocks):
    block = Counts


class RunsWhole(Shares):
    """Its validation goes twice through two blocks, unless it looks at a value: on one rank, where all blocks count."""

    model = WithCounts

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, blocks = batch[0], self.backbone.blocks  # type: ignore[union-attr]
        for _ in range(2):
            x = blocks[1](blocks[0](x))  # type: ignore[index, operator]
            if x.mean() > 100:
                break
        x = blocks[3](blocks[2](x))  # type: ignore[index, operator]
        self.log("val_loss", nn.functional.cross_entropy(self.head(x), batch[1]))


# ------------------------------------------------------------------ a block sets what others read: they share a stage


class Chained(Block):
    def step(self, x: Tensor) -> Tensor:
        if self.index == 0:
            self.shared["scale"] = 1 + 0.1 * self.num_calls
        return x + torch.tanh(self.linear(x) * self.shared["scale"])


class InThread(Block):
    def step(self, x: Tensor) -> Tensor:
        if self.index == 0:
            _local.scale = 1 + 0.1 * self.num_calls
        return x + torch.tanh(self.linear(x) * _local.scale)


class CountsInATensor(Block):
    """The first counts its calls in a tensor, which follows from no input, and which the others read there."""

    def __init__(self, shared: Any, index: int) -> None:
        super().__init__(shared, index)
        self.steps = torch.zeros(())
        if index == 0:
            shared.append(self)

    def step(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return x + torch.tanh(self.linear(x) * (1 + 0.1 * self.shared[0].steps))


def _sharing(block: type[Block], make: Callable[[], Any]) -> type[Blocks]:
    return type(f"Of{block.__name__}", (Blocks,), {"block": block, "make": lambda self: make()})


def _with(kind: type[Blocks]) -> type[Shares]:
    return type(f"With{kind.__name__}", (Shares,), {"model": kind})


_KINDS: tuple[type[Shares], ...] = (
    *map(_with, (BankOfTheFirst, OfTheLast, ScaleInADict, SkipsInLists, AnnealsForBlocks, SharedBuffer)),
    _with(_sharing(CountsInATensor, list)),
    *(Sets, Fills, Appends, RunsWhole),
)
_IN_ONE_STAGE: tuple[type[Shares], ...] = (
    _with(_sharing(Chained, lambda: ChainMap({"scale": 1.0}))),
    _with(_sharing(InThread, dict)),
)
# Validation comes after some steps, and before others.
_OPTIONS = {"num_sanity_val_steps": 0, "max_epochs": 1, "val_check_interval": 3}
RUNS = {
    kind.__name__: Run(module=kind, strategy={"num_microbatches": 1}, options=_OPTIONS) for kind in (*_KINDS, *_IN_ONE_STAGE)
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    _local.scale = 1.0
    return go(RUNS[name], Path(folder) / f"{name}{stages}", stages)


@pytest.mark.parametrize("stages", [2, 3])
def test_shared_state_is_that_of_one_device(ranks: Callable[[int], RankPool], tmp_path: Path, stages: int) -> None:
    names = [kind.__name__ for kind in (*_KINDS, *(_IN_ONE_STAGE if stages == 2 else ()))]
    compare(ranks, do, names, tmp_path, stages)


# ------------------------------------------------------------------ refused


class ChangesLater(Block):
    def step(self, x: Tensor) -> Tensor:
        if self.index == 0 and self.num_calls > 3:
            self.change()
        return x + torch.tanh(self.linear(x) * self.shared["scale"])

    def change(self) -> None:
        """Changes what the others read, in the fourth call."""
        self.shared["scale"] += 1.0


class WritesLater(ChangesLater):
    def change(self) -> None:
        self.shared["scale"].mul_(1.1)


class ReplacesLater(ChangesLater):
    def change(self) -> None:
        self.shared["scale"] = torch.full((1,), 1.5)


_REFUSED: dict[str, tuple[type[Block], Callable[[], Any]]] = {
    "an entry made by reading": (ChangesLater, lambda: defaultdict(float)),
    "written later": (WritesLater, lambda: {"scale": torch.ones(1)}),
    "replaced later": (ReplacesLater, lambda: {"scale": torch.ones(1)}),
}


def refused(name: str, folder: str) -> str:
    """The message that ends a run."""
    module = _with(_sharing(*_REFUSED[name]))()
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, "default_root_dir": folder}
    try:
        make_trainer(devices=2, strategy=FxPipeStrategy(num_microbatches=1), **options).fit(module)
    except FxPipeError as error:
        return "".join([str(error), *getattr(error, "__notes__", [])])
    return ""


@pytest.mark.parametrize("name", list(_REFUSED))
def test_what_only_one_rank_would_see_is_refused(ranks: Callable[[int], RankPool], tmp_path: Path, name: str) -> None:
    pool = ranks(2)
    try:
        for message in pool.run(refused, name, str(tmp_path)):
            assert "Modules exchange a value through a shared object" in message
    finally:
        pool.kill()
