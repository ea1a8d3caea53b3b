"""Hooks of every rank read values that modules leave on themselves while the stages run; values left elsewhere are refused.

A hook runs on every rank, and a block on the rank of its stage only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor, nn

from lightning_fxpipe import FxPipeError, FxPipeStrategy, UnsupportedError
from lightning_fxpipe.distributed.topology import make_topology
from lightning_fxpipe.runtime.left_state import LeftState
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.begin()

    def begin(self) -> None:
        """Sets what it keeps."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        self.leave(h.detach())
        return h

    def leave(self, h: Tensor) -> None:
        """Leaves something of a call."""

    def read(self) -> Any:
        """Returns the value that hooks log."""


class Number(Block):
    def begin(self) -> None:
        self.num_calls = 0

    def leave(self, h: Tensor) -> None:
        self.num_calls += 1

    def read(self) -> Any:
        return float(self.num_calls)


class Rows(Block):
    def leave(self, h: Tensor) -> None:
        self.hidden = h

    def read(self) -> Any:
        return self.hidden.abs().sum()


class Mean(Block):
    def leave(self, h: Tensor) -> None:
        self.average = h.mean()

    def read(self) -> Any:
        return self.average


class Entry(Block):
    def begin(self) -> None:
        self.by_name: dict[str, Any] = {}

    def leave(self, h: Tensor) -> None:
        self.by_name["mean"] = h.mean()

    def read(self) -> Any:
        return self.by_name["mean"]


class Count(Block):
    def begin(self) -> None:
        self.counts: dict[str, int] = {}

    def leave(self, h: Tensor) -> None:
        self.counts["calls"] = self.counts.get("calls", 0) + 1

    def read(self) -> Any:
        return float(self.counts["calls"])


class Entries(Block):
    def begin(self) -> None:
        self.means: list[Tensor] = []

    def leave(self, h: Tensor) -> None:
        self.means.append(h.mean())

    def read(self) -> Any:
        return torch.stack(self.means).sum()


class Statistics:
    def __init__(self) -> None:
        self.count, self.mean, self.total = 0.0, torch.zeros(()), torch.zeros(())

    def update(self, h: Tensor) -> None:
        self.count += len(h)
        self.mean = h.mean()
        self.total.add_(h.sum())


class InAnObject(Block):
    def begin(self) -> None:
        self.statistics = Statistics()

    def leave(self, h: Tensor) -> None:
        self.statistics.update(h)

    def read(self) -> Any:
        return self.statistics.count + self.statistics.mean + self.statistics.total


class MeanInAnObject(InAnObject):
    def leave(self, h: Tensor) -> None:
        self.statistics.mean = h.mean()

    def read(self) -> Any:
        return self.statistics.mean


class Watches(L.Callback):
    """Reads all blocks after each batch."""

    def __init__(self) -> None:
        self.read = list[float]()

    def look(self, module: Any) -> None:
        for index, block in enumerate(module.backbone):
            value = block.read()
            self.read.append(float(value))
            module.log(f"block_{index}", value)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.look(module)

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.look(module)


class OnTheLayer(L.Callback):
    def on_fit_start(self, trainer: Any, module: Any) -> None:
        for layer in module.backbone:
            layer.register_forward_hook(self.keep)

    @staticmethod
    def keep(layer: Any, args: Any, result: Tensor) -> None:
        layer.mean = result.detach().mean()

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        for name, layer in module.backbone.named_children():
            module.log(name, layer.mean)


class Keeps(Net):
    shuffle = False
    kind: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(self.kind() for _ in range(4)))


class StepReads(Keeps):
    """Every rank runs its step, with a pipeline for each call of the model."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for index, block in enumerate(self.backbone):
            self.log(f"step_{index}", block.read())  # type: ignore[operator]
        return loss


class Scale:
    def __init__(self) -> None:
        self.now = 1.0


class Scaled(Block):
    def begin(self) -> None:
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.now


class StepSets(Net):
    """The step sets numbers after the call, in objects of blocks of all stages, for the next step."""

    shuffle = False

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(Scaled() for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for index, block in enumerate(self.backbone):
            block.scale.now = 1 + 0.1 * index * batch_idx  # type: ignore[union-attr]
        return loss


def kept(trainer: Any, module: Any, folder: Path) -> Any:
    return [callback.read for callback in trainer.callbacks if isinstance(callback, Watches)]


def _run(module: type[Keeps], kind: type[Block], num_microbatches: int) -> Run:
    return Run(
        module=type(f"{module.__name__}{kind.__name__}", (module,), {"kind": kind}),
        callbacks=lambda folder: [Watches()],
        look=kept,
        strategy={"num_microbatches": num_microbatches},
        options={"max_epochs": 1},
    )


# With two microbatches, those which a tensor or a count shows are not cut.
_KINDS = (Number, Rows, Mean, Entry, Count, Entries, InAnObject)
RUNS = {f"{kind.__name__}{count}": _run(Keeps, kind, count) for kind in _KINDS for count in (1, 2)}
RUNS |= {f"the step reads {kind.__name__}": _run(StepReads, kind, 2) for kind in (Entry, MeanInAnObject)}

RUNS["the step sets"] = Run(module=StepSets, options={"max_epochs": 1})
RUNS["on a layer"] = Run(callbacks=lambda folder: [OnTheLayer()], options={"max_epochs": 1})


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    return go(RUNS[name], Path(folder) / f"{name}{stages}", stages)


@pytest.mark.parametrize(("stages", "offset"), [(2, 0), (3, 1)])
def test_hooks_read_what_blocks_have_left(ranks: Callable[[int], RankPool], tmp_path: Path, stages: int, offset: int) -> None:
    names = list(RUNS)
    compare(ranks, do, names[offset:] + names[:offset], tmp_path, stages)


class Collects(L.Callback):
    """A forward hook fills what hooks of all ranks have."""

    def __init__(self) -> None:
        self.means: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        for name, layer in module.backbone.named_children():
            layer.register_forward_hook(lambda layer, args, result, name=name: self.means.update({name: result.mean()}))


class Logs(Collects):
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        for name, mean in self.means.items():
            module.log(name, mean)


class OnlyEmpties(Collects):
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.means.clear()


_TOTALS = {"calls": 0}


class Totals(Block):
    """All blocks have the same dict."""

    def begin(self) -> None:
        self.totals = _TOTALS

    def leave(self, h: Tensor) -> None:
        self.totals["calls"] += 1

    def read(self) -> Any:
        return float(self.totals["calls"])


_HOOKED: dict[str, tuple[type[L.Callback], type[Block] | None]] = {
    "a callback": (Logs, None),
    "emptied": (OnlyEmpties, None),
    "shared": (Watches, Totals),
}


def hooked(name: str, folder: str) -> str:
    """The message that ends a run, or the warnings of one that ends well."""
    callback_kind, kind = _HOOKED[name]
    callback = callback_kind()
    module = Net() if kind is None else type("Keeping", (Keeps,), {"kind": kind})()
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, "default_root_dir": folder}
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            make_trainer(devices=2, strategy=FxPipeStrategy(num_microbatches=2), callbacks=[callback], **options).fit(module)
    except FxPipeError as error:
        return str(error)
    return "".join(str(each.message) for each in told)


def test_what_forward_hooks_leave_elsewhere_is_refused_where_hooks_read_it(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool = ranks(2)
    told = "".join(pool.run(hooked, "emptied", str(tmp_path)))
    assert told.count("Forward hooks leave values outside of the modules: means. Each rank has those of its stages.") == 1
    try:
        for message in pool.run(hooked, "a callback", str(tmp_path)):
            assert "trainer.callbacks[0].means['0']" in message
            assert "Store it as an attribute of the module that computes it" in message
    finally:
        pool.kill()


def test_what_two_ranks_leave_in_one_place_is_refused(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    pool = ranks(2)
    try:
        for message in pool.run(hooked, "shared", str(tmp_path)):
            assert "Modules of several stages change the same object: self.backbone.0.totals['calls']" in message
    finally:
        pool.kill()


def left_late() -> str:
    """Returns the message about a tensor that a block begins to leave when its batches are split already."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    topology = make_topology(torch.device("cpu"))
    root = nn.Sequential(Entry(), Entry())
    state = LeftState(root, topology, frozenset({"by_name"}), print)
    state.begin_stage(is_cut=True, carried=frozenset())
    root[topology.rank](torch.zeros(2, 12))
    try:
        state.share()
    except UnsupportedError as error:
        return str(error)
    return ""


def test_a_tensor_of_a_microbatch_is_refused(ranks: Callable[[int], RankPool]) -> None:
    for message in ranks(2).run(left_late):
        assert "A module leaves a tensor of a single microbatch, which hooks read: self." in message
