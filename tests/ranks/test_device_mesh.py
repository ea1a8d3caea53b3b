"""``self.device_mesh``: replicas and places in the pipeline, where Lightning's ModelParallelStrategy has its axes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lightning_fxpipe import FxPipeStrategy, UnsupportedError
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net

Ranks = Callable[[int], RankPool]


class Meshed(Net):
    """Looks at the mesh, and talks over its axes, in all places."""

    def configure_model(self) -> None:
        self.configured = self.look()

    def look(self) -> dict[str, Any]:
        mesh = self.device_mesh
        assert mesh is not None
        assert mesh is self.trainer.strategy.device_mesh  # type: ignore[attr-defined]
        return {
            "names": mesh.mesh_dim_names,
            "mesh": mesh.mesh.tolist(),
            "places": [mesh.get_local_rank(name) for name in mesh.mesh_dim_names or ()],
            "sizes": [mesh[name].size() for name in mesh.mesh_dim_names or ()],
            "device": mesh.device_type,
        }

    def on_train_start(self) -> None:
        assert self.device_mesh is not None
        self.seen = self.look()
        self.sums = []
        for name in ("data_parallel", "pipeline"):
            mine = torch.tensor(2.0 ** self.device_mesh.get_local_rank(name))
            dist.all_reduce(mine, group=self.device_mesh.get_group(name))
            self.sums.append(float(mine))
        copied = copy.deepcopy(self.device_mesh), pickle.loads(pickle.dumps(self.device_mesh))
        assert all(one.mesh_dim_names == self.device_mesh.mesh_dim_names for one in copied)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.device_mesh is not None
        group = self.device_mesh.get_group("data_parallel")
        center = batch[0].mean(0)
        dist.all_reduce(center, group=group)
        loss = nn.functional.cross_entropy(self(batch[0] - center / self.device_mesh["data_parallel"].size()), batch[1])
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        self.log("mean", mean / self.trainer.world_size)
        self.log("known", loss, sync_dist=True)
        return loss


def look(devices: int, stages: int, **options: Any) -> dict[str, Any]:
    """Runs on every rank."""
    module = Meshed()
    strategy = FxPipeStrategy(num_stages=stages, num_microbatches=2, **options)
    trainer = make_trainer(max_epochs=1, strategy=strategy, devices=devices)
    trainer.fit(module)
    assert module.device_mesh is None
    assert float(trainer.callback_metrics["mean"]) == pytest.approx(float(trainer.callback_metrics["known"]), abs=1e-6)
    assert module.configured == module.seen
    stage = strategy.topology.stages[0]
    return {**module.seen, "sums": module.sums, "stage": stage, "rank": dist.get_rank()}


@pytest.mark.parametrize(
    ("devices", "stages"),
    [(4, 2), (2, 2), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(4, 4, marks=pytest.mark.slow)],
)
def test_the_mesh_has_replicas_and_places(ranks: Ranks, devices: int, stages: int) -> None:
    replicas = devices // stages
    for rank, found in enumerate(ranks(devices).run(look, devices, stages)):
        assert found["rank"] == rank
        assert found["names"] == ("data_parallel", "pipeline")
        assert found["sizes"] == [replicas, stages]
        assert found["device"] == "cpu"
        replica, place = found["places"]
        assert found["mesh"][replica][place] == rank
        assert place == stages - 1 - found["stage"]  # the last stage is on the first rank
        assert sorted(sum(found["mesh"], [])) == list(range(devices))
        assert found["sums"] == [2.0**replicas - 1, 2.0**stages - 1]


@pytest.mark.slow
def test_the_places_of_a_v_go_with_the_ranks(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(2).run(look, 2, 4, schedule="zbv_zero_bubble")):
        assert found["mesh"] == [[0, 1]]
        assert found["places"] == [0, rank]


class Spread(Net):
    def configure_model(self) -> None:
        assert self.device_mesh is not None
        weight = distribute_tensor(self.head[0].weight.detach(), self.device_mesh["data_parallel"], [Replicate()])
        assert isinstance(weight, DTensor)
        self.head[0].weight = nn.Parameter(weight)


def try_spread() -> str:
    """Runs on every rank."""
    trainer = make_trainer(max_epochs=1, strategy=FxPipeStrategy(num_stages=2), devices=2)
    with pytest.raises(UnsupportedError) as caught:
        trainer.fit(Spread())
    return str(caught.value)


def test_parameters_that_are_spread_already_are_refused(ranks: Ranks) -> None:
    for told in ranks(2).run(try_spread):
        words = " ".join(told.split())
        assert "parameters that are already sharded over devices (head.0.weight)" in words
        assert "remove fully_shard and parallelize_module" in words


def test_one_device_has_a_mesh_of_one() -> None:
    module = Meshed()
    seen: list[Any] = []

    class Look(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            seen.append(pl_module.device_mesh)

    trainer = make_trainer(max_epochs=1, strategy=FxPipeStrategy(num_microbatches=2), devices=1, callbacks=[Look()])
    trainer.fit(module)
    assert module.seen["mesh"] == [[0]]
    assert module.seen["sizes"] == [1, 1]
    assert seen[0] is not None
    assert module.device_mesh is None
