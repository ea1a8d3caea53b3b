"""Batches that are not tensors with one batch dimension, as on one device: graphs, and lists with a dict for each sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fxpipe.distributed.agreement import check_agreement
from lightning_fxpipe.independence.division import NotDivisible
from lightning_fxpipe.runtime import same_cuts
from lightning_fxpipe.runtime.pass_setup import PassSetups
from tests.ranks.pool import RankPool
from tests.ranks.runs import Run, compare, go


class Graph:
    """A graph as libraries for them make one: a plain object."""

    def __init__(self, x: Tensor, edge_index: Tensor, y: Tensor) -> None:
        self.x, self.edge_index, self.y = x, edge_index, y


class GraphTuple(NamedTuple):
    x: Tensor
    edge_index: Tensor
    y: Tensor


@dataclasses.dataclass
class GraphRecord:
    x: Tensor
    edge_index: Tensor
    y: Tensor


def graph(index: int, make: Callable[..., Any]) -> Any:
    """A graph, of another size than the next."""
    generator = torch.Generator().manual_seed(index)
    nodes, edges = 5 + index % 3, 9 + index % 2
    edge_index = torch.randint(0, nodes, (2, edges), generator=generator)
    return make(torch.randn(nodes, 6, generator=generator), edge_index, torch.randn(1, generator=generator))


class Convolution(nn.Module):
    """A layer over a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return torch.tanh(x + torch.zeros_like(x).index_add(0, edge_index[1], self.linear(x)[edge_index[0]]))


class Lit(L.LightningModule):
    """Has layers, an optimizer and the data that it is given."""

    def __init__(self, data: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.data = data

    def train_dataloader(self) -> Any:
        return self.data()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class GraphModel(Lit):
    """A graph network that changes its batch, as preprocessing in a step does."""

    def __init__(self, data: Callable[[], Any]) -> None:
        super().__init__(data)
        self.layers = nn.ModuleList(Convolution() for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index)
        return self.head(x).mean(dim=0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, Graph):
            batch.x = batch.x / 2
            batch.edge_index.clamp_(max=3)
        loss = nn.functional.mse_loss(self(batch.x, batch.edge_index), batch.y)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=1)
        return loss


class Detector(Lit):
    """Images and, for each, as many boxes as there are."""

    def __init__(self, data: Callable[[], Any]) -> None:
        super().__init__(data)
        self.backbone = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x).mean(dim=(2, 3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        x = torch.stack([nn.functional.pad(image, (0, 8 - image.shape[2], 0, 8 - image.shape[1])) for image in images])
        centres = torch.stack([target["boxes"].mean(dim=0) for target in targets])
        loss = nn.functional.mse_loss(self(x), centres)
        self.log("loss", loss, batch_size=len(images))
        return loss


class Numbers(Lit):
    """Makes its own data from numbers."""

    def __init__(self, data: Callable[[], Any]) -> None:
        super().__init__(data)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.arange(12.0, device=self.device).reshape(3, 4) * batch["scale"]
        loss = self.model(x).pow(2).mean()
        self.log("loss", loss, batch_size=3)
        return loss


class OwnCount(Lit):
    """Takes out or repeats samples of some batches, by their values."""

    def __init__(self, data: Callable[[], Any], times: int) -> None:
        super().__init__(data)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.times = times

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch[0, 0] > 0:
            batch = batch.repeat(self.times, 1) if self.times else batch[:5]
        loss = self.model(batch).pow(2).mean()
        self.log("loss", loss, batch_size=len(batch))
        return loss


class Rows(Lit):
    """Treats samples one by one."""

    def __init__(self, data: Callable[[], Any]) -> None:
        super().__init__(data)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch).pow(2).mean()


class ValidatedRows(Rows):
    """Looks at how good it is."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.model(batch).abs().mean())

    def val_dataloader(self) -> Any:
        return self.data()


def graphs(make: Callable[..., Any]) -> Any:
    return DataLoader([graph(index, make) for index in range(4)], batch_size=None)


def numbers() -> Any:
    return DataLoader([{"scale": 1.0}, {"scale": 0.5}], batch_size=None)  # type: ignore[arg-type]


def rows() -> Any:
    return DataLoader(torch.randn(48, 4, generator=torch.Generator().manual_seed(1)), batch_size=8)  # type: ignore[arg-type]


def detections() -> Any:
    """Batches of four images of different sizes; where all have as many boxes, it is as many as there are images."""
    samples = []
    for index in range(8):
        generator = torch.Generator().manual_seed(index)
        count = 4 if index < 4 else 1 + index % 3
        image = torch.randn(3, 6 + index % 3, 7 + index % 2, generator=generator)
        samples.append((image, {"boxes": torch.randn(count, 4, generator=generator), "labels": torch.ones(count)}))
    return DataLoader(samples, batch_size=4, collate_fn=lambda batch: tuple(map(list, zip(*batch, strict=True))))  # type: ignore[arg-type]


def _run(module: Callable[[], L.LightningModule], num_microbatches: int | str) -> Run:
    return Run(module=module, options={"max_epochs": 1}, strategy={"num_microbatches": num_microbatches})


assigned = PassSetups._assigned
OTHER_GRAPHS = "other graphs of validation"
ONE_CANNOT_CUT = "a rank that finds no cut"
RUNS: dict[str, Callable[[], Run]] = {
    ONE_CANNOT_CUT: lambda: _run(partial(Rows, rows), 2),
    OTHER_GRAPHS: lambda: _run(partial(ValidatedRows, rows), 2),
    "object": lambda: _run(partial(GraphModel, partial(graphs, Graph)), 1),
    "named tuple": lambda: _run(partial(GraphModel, partial(graphs, GraphTuple)), 1),
    "dataclass, auto": lambda: _run(partial(GraphModel, partial(graphs, GraphRecord)), "auto"),
    "boxes": lambda: _run(partial(Detector, detections), 1),
    "boxes, two microbatches": lambda: _run(partial(Detector, detections), 2),
    "numbers": lambda: _run(partial(Numbers, numbers), "auto"),
    "fewer samples than in the batch": lambda: _run(partial(OwnCount, rows, 0), 2),
    "more samples than in the batch": lambda: _run(partial(OwnCount, rows, 4), 2),
}


def fails_on_one(self: PassSetups, traced: Any) -> Any:
    """As ``PassSetups._assigned``, but for one rank."""
    if self._topology.is_last:
        raise NotDivisible("this rank knows something else")
    return assigned(self, traced)


def differs_in_evaluation(group: Any, value: Any, error: Exception, reasons: Any) -> None:
    """As ``check_agreement``, where the ranks' graphs of steps that train nothing differ."""
    if not torch.is_grad_enabled():
        raise error
    check_agreement(group, value, error, reasons)


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    """One run."""
    with pytest.MonkeyPatch.context() as patch:
        if name == ONE_CANNOT_CUT:
            patch.setattr(PassSetups, "_assigned", fails_on_one)
        if name == OTHER_GRAPHS:
            patch.setattr(same_cuts, "check_agreement", differs_in_evaluation)
        return go(RUNS[name](), Path(folder), stages)


def test_batches_of_any_kind_train_as_on_one_device(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    compare(ranks, do, [name for name in RUNS if name not in (ONE_CANNOT_CUT, OTHER_GRAPHS)], tmp_path, 2)


def test_ranks_that_would_cut_a_batch_in_other_ways_do_not_cut_it(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    """What a module has kept of an earlier batch, only its stage's rank knows; the others waited for its microbatches."""
    compare(ranks, do, [ONE_CANNOT_CUT], tmp_path, 2)


def test_validation_of_which_ranks_record_other_graphs_runs_on_one(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    """Its code may look at buffers, which are filled on their stage's rank; the run ended there."""
    compare(ranks, do, [OTHER_GRAPHS], tmp_path, 2)
