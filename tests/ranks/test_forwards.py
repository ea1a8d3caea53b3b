"""State that a model's own forward counts, keeps and caches between its layers equals that of one device."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go

_logger = logging.getLogger("tests.forwards")


class Layers(nn.Module):
    """Five layers; what else a model has is in subclasses, and what is compared of it at the end of a run in ``kept``."""

    kept: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4))
        self.num_calls, self.scale = 0, 1.0
        self.begin()

    def begin(self) -> None:
        """Sets what else the model has."""


class CountsInTheMiddle(Layers):
    kept = ("num_calls",)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        self.num_calls += 1
        return self.layers[3](self.layers[2](x))


class CountsInTraining(Layers):
    kept = ("num_calls",)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.training:
                self.num_calls += 1
        return x


class Anneals(Layers):
    kept = ("scale",)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x)) * self.scale
        self.scale *= 0.9
        return self.layers[3](self.layers[2](x))


class Alternates(Layers):
    def begin(self) -> None:
        self.extra = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        self.num_calls += 1
        if self.num_calls % 2:
            x = self.extra(x)
        return self.layers[3](self.layers[2](x))


class CountsInContainers(Layers):
    kept = ("totals", "recent", "sizes")

    def begin(self) -> None:
        self.totals: Counter[str] = Counter()
        self.recent: deque[int] = deque(maxlen=3)
        self.sizes = np.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            self.totals["calls"] += 1
            self.recent.append(len(x))
            self.sizes[index] += len(x)
        return x


class SetsAFlagOnce(Layers):
    kept = ("has_warned",)

    def begin(self) -> None:
        self.has_warned = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if not self.has_warned:
                self.has_warned = True
                _logger.warning("%s is called", type(self).__name__)
        return x


class MakesTables(Layers):
    """On its first call: where nothing is yet, by size, and as a property."""

    def begin(self) -> None:
        self.mask: Tensor | None = None
        self.by_size: dict[int, Tensor] = {}

    @cached_property
    def table(self) -> Tensor:
        return torch.linspace(0, 1, 12)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + self.table
            if self.mask is None:
                self.mask = torch.linspace(1, 2, 12)
            if x.shape[1] not in self.by_size:
                self.by_size[x.shape[1]] = torch.linspace(0, 1, x.shape[1])
            x = x * self.mask + self.by_size[x.shape[1]]
        return x


class KeepsItsState(Layers):
    """From one batch to the next, as recurrent models do; there is none at first."""

    def begin(self) -> None:
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        state = self.state
        for layer in self.layers:
            x = layer(x)
        self.state = x.detach().mean(0)
        return x if state is None else x + 0.1 * state


class KeepsAList(Layers):
    def begin(self) -> None:
        self.states: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        states = list(self.states)
        for index, layer in enumerate(self.layers):
            x = layer(x) + 0.1 * states[index] if states else layer(x)
            self.states.append(x.detach().mean(0))
        self.states = self.states[-4:]
        return x


class HasAMemory(Layers):
    def begin(self) -> None:
        self.memory = torch.zeros(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        mean = self.memory.mean(0)
        self.memory = torch.cat([self.memory, x.detach()])[-16:]
        return x + 0.1 * mean


class Tells(Layers):
    """Prints, logs and takes the time; nothing of it is part of the model."""

    def begin(self) -> None:
        self.seconds: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        begin = time.perf_counter()
        for index, layer in enumerate(self.layers):
            x = layer(x)
            _logger.info("layer %d: %s", index, tuple(x.shape))
            print("layer", index)
            self.seconds.append(time.perf_counter() - begin)
        return x


class UsesNumpy(Layers):
    """A number that changes, in functions of numpy: an input of the trace, and no reason for a new one."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        self.num_calls += 1
        x = x * (1 + np.cos(np.pi * np.minimum(self.num_calls / 20, 1.0)))
        return self.layers[3](self.layers[2](x))


_KINDS: tuple[type[Layers], ...] = (
    CountsInTheMiddle,
    CountsInTraining,
    Anneals,
    Alternates,
    CountsInContainers,
    SetsAFlagOnce,
    MakesTables,
    KeepsItsState,
    KeepsAList,
    HasAMemory,
    Tells,
    UsesNumpy,
)


class WithLayers(Net):
    """The ordinary module with one of these as its backbone."""

    shuffle = False
    kind: type[Layers]

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.kind()  # type: ignore[assignment]


def module_with(kind: type[Layers]) -> type[WithLayers]:
    """Returns the class of a module with such a backbone."""
    return type(f"With{kind.__name__}", (WithLayers,), {"kind": kind})


class Compiled(Layers):
    """``torch.compile`` gives a module that has its attributes from another one."""

    def begin(self) -> None:
        for index in (1, 2):
            self.layers[index] = torch.compile(self.layers[index], backend="eager")  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Fades(Layers):
    """A part that fades in: the branch is for some values only of a number that is an input of the trace."""

    def begin(self) -> None:
        self.old = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        new = self.layers[3](self.layers[2](x))
        return self.scale * new + (1 - self.scale) * self.old(x) if self.scale < 1 else new


class FadesIn(WithLayers):
    kind = Fades

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.backbone.scale = (1.0, 1.0, 0.3, 0.6, 1.0, 0.5)[batch_idx]  # type: ignore[assignment]


class LeavesTensors(Net):
    """The root's forward leaves tensors for the step and hooks; what the step does before needs values, so it runs as it is."""

    shuffle = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.backbone(x)
        self.hidden = hidden
        self.weights = {"softmax": hidden.softmax(-1), "unused": None}
        return self.head(hidden)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        chosen = torch.nonzero(batch[0][:, 0] > -9).squeeze(-1)
        order = torch.from_numpy(np.arange(len(chosen))[::-1].copy())
        x, y = batch[0][order], batch[1][order]
        return nn.functional.cross_entropy(self(x), y) + self.weights["softmax"].square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("hidden", self.hidden.detach().square().mean())


def left(trainer: Any, module: Any, folder: Path) -> Any:
    return module.hidden.tolist(), {name: value if value is None else value.tolist() for name, value in module.weights.items()}


def kept(trainer: Any, module: Any, folder: Path) -> Any:
    return [np.asarray(getattr(module.backbone, name)).tolist() for name in module.backbone.kept if name != "totals"] + [
        dict(getattr(module.backbone, "totals", {}))
    ]


RUNS = {
    kind.__name__: Run(module=module_with(kind), look=kept, strategy={"num_microbatches": 1}, calls=("fit", "validate"))
    for kind in (*_KINDS, Compiled)
} | {
    "fades in": Run(module=FadesIn, strategy={"num_microbatches": 1}),
    "leaves tensors": Run(module=LeavesTensors, calls=("fit", "validate")),
    "leaves tensors, 1F1B": Run(module=LeavesTensors, look=left, strategy={"num_microbatches": 2, "schedule": "1f1b"}),
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    return go(RUNS[name], Path(folder) / f"{name}{stages}", stages)


@pytest.mark.parametrize("stages", [2])
def test_forwards_with_state_are_those_of_one_device(ranks: Callable[[int], RankPool], tmp_path: Path, stages: int) -> None:
    compare(ranks, do, list(RUNS), tmp_path, stages)
