"""What the user's own code keeps, counts and collects is what it is on one device, wherever it keeps it, on every rank."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go

Ranks = Callable[[int], RankPool]

COUNTS: dict[str, list[int]] = {"steps": []}
NUMBER = 0


def count_up() -> None:
    global NUMBER
    NUMBER += 1
    COUNTS["steps"].append(NUMBER)


class Meter:
    """As in thousands of projects."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sum, self.count, self.values = 0.0, 0, []

    def update(self, value: float, n: int = 1) -> None:
        self.sum += value * n
        self.count += n
        self.values.append(value)


class Slotted:
    __slots__ = ("history", "steps")

    def __init__(self) -> None:
        self.steps, self.history = 0, []


class Keeper(Net):
    """Keeps state of many kinds, before the model's call and after it."""

    shuffle = False
    losses: list[float] = []
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        global NUMBER
        NUMBER = 0
        COUNTS["steps"].clear()
        type(self).losses, type(self).calls = [], 0
        self.stats: dict[str, Any] = {"train": {"n": 0, "sizes": []}, "val": {"n": 0, "sizes": []}}
        self.lists: list[list[float]] = [[], []]
        self.meter, self.val_meter, self.slotted = Meter(), Meter(), Slotted()
        self.recent: deque[float] = deque(maxlen=2)
        self.grouped: defaultdict[str, list[float]] = defaultdict(list)
        self.ordered: OrderedDict[str, list[int]] = OrderedDict(first=[0], second=[0])
        self.counter: Counter[int] = Counter()
        self.array = np.zeros(5)
        self.history: list[float] = []
        self.shared = self.backbone.shared = Meter()  # type: ignore[assignment]
        self.pair = (Meter(), [0])

    def prelude(self, batch: Any, kind: str) -> None:
        self.stats[kind]["n"] += 1
        self.lists[0].append(float(len(batch[0])))
        self.slotted.steps += 1
        self.counter.update(["seen"])
        self.ordered.move_to_end("first")
        self.array[0] += 1
        count_up()
        type(self).calls += 1

    def rest(self, loss: Tensor, batch: Any, kind: str) -> None:
        value = loss.item()
        (self.meter if kind == "train" else self.val_meter).update(value, len(batch[0]))
        self.stats[kind]["sizes"].append(len(batch[0]))
        self.lists[1].append(value)
        self.slotted.history.append(value)
        self.recent.append(value)
        self.grouped[kind].append(value)
        self.ordered["second"].append(len(self.ordered["second"]))
        self.array[1] += value
        self.history.append(value)
        self.losses.append(value)
        self.shared.update(value)
        self.pair[0].update(value)
        self.pair[1].append(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.prelude(batch, "train")
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.rest(loss, batch, "train")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.prelude(batch, "val")
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.rest(loss, batch, "val")
        self.log("val_loss", loss)

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.meter.sum / max(self.meter.count, 1))
        self.meter.reset()


class WarmsUp(Net):
    """Sets the learning rate in the step, after the model's call, when there are optimizers only."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        return loss


class SetsRate(Net):
    """The same before the call, where every rank does it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        return super().training_step(batch, batch_idx)


class ThroughData(Net):
    """Writes to what it keeps by ``.data``, a tensor of its own with a version of its own."""

    shuffle = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.mean, self.largest = torch.zeros(2), [torch.zeros(())]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.data[1:].add_(loss.detach())
        self.mean.data.mul_(0.9).add_(loss.detach(), alpha=0.1)
        torch.maximum(self.largest[0].data, loss.detach(), out=self.largest[0].data)
        return loss


def kept_through_data(trainer: Any, module: Any, folder: Path) -> Any:
    return [module.seen, module.mean, module.largest[0]]


class Normalises(Net):
    """Has running statistics outside of the pipeline: what comes after a look at values stays on the last stage. torch writes
    to them without a sign: neither their version nor the kernel's schema shows it."""

    shuffle = False

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        for name in ("first", "second", "third", "fourth"):
            self.register_buffer(f"{name}_mean", torch.zeros(5))
            self.register_buffer(f"{name}_var", torch.ones(5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        x = self.norm(logits[:, : max(5, int(batch[1].max()))])
        y = x.detach() + batch_idx
        nn.functional.batch_norm(y, self.first_mean, self.first_var, training=True)
        torch.batch_norm(y, None, None, self.second_mean, self.second_var, True, 0.1, 1e-5, False)
        nn.functional.instance_norm(y.T[None].expand(2, 5, -1), running_var=self.third_var, running_mean=self.third_mean)
        nn.functional.batch_norm(y, self.fourth_mean, self.fourth_var)
        return nn.functional.cross_entropy(x, batch[1])


def statistics(trainer: Any, module: Any, folder: Path) -> Any:
    return dict(module.named_buffers())


class Remembers(nn.Sequential):
    """A part of the model that stays whole and keeps things: attention maps, counts, a flag."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.calls, self.has_been_used, self.features = 0, False, None
        self.sizes: dict[str, list[int]] = {"all": []}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.has_been_used = True
        self.sizes["all"].append(len(x))
        y: Tensor = super().forward(x)
        self.features = y.detach()  # type: ignore[assignment]
        return y


class InForward(Net):
    shuffle = False

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(Remembers(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)))


class Counting(nn.Module):
    """Counts between its layers, where only the last stage's rank runs its code, in objects that others know, too."""

    def __init__(self, totals: dict[str, int], others: list[Remembers]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3))
        self.calls, self.totals, self.others, self.sizes = 0, totals, others, [0]

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            self.calls += 1
            self.totals[f"layer {index}"] = self.totals.get(f"layer {index}", 0) + len(x)
        self.sizes.append(len(x))
        self.others[0].calls = self.calls
        return x * (1 + self.others[0].calls / 100)


class BetweenLayers(Net):
    shuffle = False

    def __init__(self) -> None:
        super().__init__()
        self.totals: dict[str, int] = {}
        self.other = [Remembers()]  # no submodule
        self.backbone = Counting(self.totals, self.other)  # type: ignore[assignment]


def counted_between_layers(trainer: Any, module: Any, folder: Path) -> Any:
    counting = module.backbone
    same = counting.totals is module.totals and counting.others is module.other
    return [counting.calls, counting.totals, counting.sizes, module.other[0].calls, same]


def kept_by_layers(trainer: Any, module: Any, folder: Path) -> Any:
    return [[layer.calls, layer.has_been_used, layer.sizes, layer.features] for layer in module.backbone]


def state_of(trainer: Any, module: Any, folder: Path) -> Any:
    """What is to be the same."""
    if not isinstance(module, Keeper):
        return []
    meters = [(m.sum, m.count, list(m.values)) for m in (module.meter, module.val_meter, module.shared, module.pair[0])]
    same = module.backbone.shared is module.shared
    plain = [module.stats, module.lists, list(module.recent), dict(module.grouped), dict(module.ordered), dict(module.counter)]
    more = [module.array.tolist(), module.slotted.steps, module.slotted.history, module.history, module.pair[1], same]
    return [meters, plain, more, list(type(module).losses), type(module).calls, NUMBER, list(COUNTS["steps"])]


ONE = {"num_microbatches": 1}
RUNS: dict[str, Run] = {
    "fit": Run(module=Keeper, look=state_of, strategy=ONE, calls=("fit",)),
    "fit in microbatches": Run(module=Keeper, look=state_of, strategy={"num_microbatches": 2}),
    "validate": Run(module=Keeper, look=state_of, calls=("validate",)),
    "fit+validate": Run(module=Keeper, look=state_of, strategy=ONE, calls=("fit", "validate"), options={"max_epochs": 1}),
    "by data": Run(module=ThroughData, look=kept_through_data, strategy=ONE),
    "by data, in turns": Run(module=ThroughData, look=kept_through_data, strategy={"num_microbatches": 2, "schedule": "1f1b"}),
    "statistics": Run(module=Normalises, look=statistics, strategy=ONE),
    "statistics in microbatches": Run(module=Normalises, look=statistics, strategy={"num_microbatches": 2}),
    "in forward": Run(module=InForward, look=kept_by_layers, strategy=ONE),
    "between layers": Run(module=BetweenLayers, look=counted_between_layers, strategy=ONE),
    "warms up": Run(module=WarmsUp, strategy=ONE),
    "sets the rate": Run(module=SetsRate, strategy=ONE),
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    return go(RUNS[name], Path(folder) / f"{name}{stages}", stages)


@pytest.mark.parametrize("stages", [2])
def test_state_is_that_of_one_device(ranks: Ranks, tmp_path: Path, stages: int) -> None:
    compare(ranks, do, list(RUNS), tmp_path, stages)


class LooksOnly(Keeper):
    """Ends the run where the first batch would begin: what is there then is what planning has left."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


LEFT = {
    f"left by {count} microbatches": Run(
        module=LooksOnly,
        look=state_of,
        strategy={"num_microbatches": count},
        options={"max_epochs": 1, "num_sanity_val_steps": 0},
    )
    for count in (1, 4)
}


def do_nothing(name: str, folder: str, stages: int) -> Any:
    torch.manual_seed(1)
    return go(LEFT[name], Path(folder) / f"{name}{stages}", stages)["looked"]


def _all(names: list[str], folder: str, stages: int) -> Any:
    return [do_nothing(name, folder, stages) for name in names]


def test_planning_leaves_nothing_behind(ranks: Ranks, tmp_path: Path) -> None:
    names = list(LEFT)
    expected = _all(names, str(tmp_path), 0)
    for result in ranks(2).run(_all, names, str(tmp_path), 2):
        assert result == expected
