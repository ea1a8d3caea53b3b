"""User code that asks how many replicas there are, or talks to them, does in a pipeline what it does on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import all_gather, get_world_size
from torch.distributed.nn.functional import all_reduce as all_reduce_with_gradients
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_fxpipe import FxPipeStrategy, UnsupportedError
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go

Ranks = Callable[[int], RankPool]


class Gather(torch.autograd.Function):
    """As many contrastive losses have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        gathered = [torch.zeros_like(x) for _ in range(get_world_size())]
        all_gather(gathered, x)
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        summed = torch.stack(gradients)
        dist.all_reduce(summed)
        return summed[dist.get_rank()]


class AsksForReplicas(Net):
    """Scales its rate, its inputs and its loss by what it is told."""

    def setup(self, stage: str) -> None:
        self.replicas = self.trainer.world_size, self.trainer.num_devices, self.trainer.num_nodes, len(self.trainer.device_ids)
        self.lr = 0.01 * self.trainer.world_size * self.trainer.num_devices * self.trainer.strategy.world_size  # type: ignore

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] + self.global_rank + self.trainer.world_size
        if self.trainer.is_global_zero:
            x = x + torch.rand_like(x)  # of which the other ranks must draw as much
        loss = nn.functional.cross_entropy(self.all_gather(self(x)), batch[1])
        if self.global_rank == 0:
            self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss


class Guards(Net):
    """What it does in hooks it does on rank 0."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.log("drawn", torch.rand(()))
            self.log_dict({"steps": float(batch_idx), "twice": torch.tensor(2.0 * batch_idx)}, on_epoch=True)
        self.log("all", float(batch_idx))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0] + torch.rand_like(batch[0])  # another number where a rank has drawn more than another
        self.log("val_loss", nn.functional.cross_entropy(self(x), batch[1]))


class OwnLog(Net):
    """Logs under other names and arguments."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        name, *rest = args
        super().log(f"mine/{name}", *rest, **kwargs)

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))


class Collective(Net):
    """A step as for data parallel training, with everything gathered; in a plain run the same without."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        count = 1
        if getattr(self.trainer.strategy, "strategy_name", "") == "fxpipe":
            logits = torch.cat(Gather.apply(logits))  # type: ignore[no-untyped-call]
            logits = all_reduce_with_gradients(logits)
            count = dist.get_world_size()
            dist.barrier()
        if dist.is_initialized():
            raise AssertionError("one device has no process group")
        loss = nn.functional.cross_entropy(logits, batch[1]) / count
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        value = torch.tensor(float(self.current_epoch if self.trainer.is_global_zero else -1))
        names = [f"epoch {self.current_epoch}" if self.trainer.is_global_zero else None]
        if dist.is_initialized():
            dist.broadcast(value, src=0)
            dist.broadcast_object_list(names, src=0)
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, names)
            names = gathered[0]
            if dist.get_rank() == 0:
                dist.barrier()  # nobody else comes here
                sum(p.sum() for p in self.parameters())
        self.log("told", value)
        self.names = names


class Samples(Net):
    """With a sampler made by hand, from what the Trainer or torch says."""

    from_trainer = True

    def train_dataloader(self) -> DataLoader[Any]:
        data = self._loader(44).dataset
        count, rank = self.trainer.world_size, self.trainer.global_rank
        by_hand = not self.from_trainer and getattr(self.trainer.strategy, "strategy_name", "") == "fxpipe"
        sampler = DistributedSampler(data) if by_hand else DistributedSampler(data, num_replicas=count, rank=rank)
        return DataLoader(data, batch_size=8, sampler=sampler)


class SamplesFromTorch(Samples):
    from_trainer = False


class Stream(IterableDataset[Any]):
    """Gives each replica its share."""

    def __iter__(self) -> Any:
        rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for index in range(rank, 24, count):
            yield torch.full((12,), index / 24), index % 5


class Streams(Net):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Stream(), batch_size=8)


RUNS = {
    "asks for replicas": Run(
        module=AsksForReplicas, look=lambda trainer, module, folder: (module.replicas, trainer.world_size, trainer.num_devices)
    ),
    "hooks of rank 0": Run(
        module=Guards,
        callbacks=lambda folder: [L.pytorch.callbacks.ModelCheckpoint(folder, monitor="steps", save_top_k=1)],
        options={"enable_checkpointing": True},
    ),
    "own log": Run(module=OwnLog),
    "collectives": Run(module=Collective, look=lambda trainer, module, folder: module.names),
    "sampler of the Trainer": Run(module=Samples, options={"use_distributed_sampler": False}),
    "sampler of torch": Run(module=SamplesFromTorch, options={"use_distributed_sampler": False}),
    "stream": Run(module=Streams, options={"limit_train_batches": 3}),
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    """A run, on one device (``stages=0``) or in a pipeline."""
    path = Path(folder) / f"{name} {stages}"
    path.mkdir(exist_ok=True)
    return go(RUNS[name], path, stages)


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_user_code_sees_one_replica(ranks: Ranks, tmp_path: Path, stages: int) -> None:
    compare(ranks, do, list(RUNS), tmp_path, stages)


class Shares(Net):
    """With a sampler that cuts the data up."""

    def train_dataloader(self) -> DataLoader[Any]:
        data = self._loader(44).dataset
        return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, num_replicas=2, rank=0))


def refused(stages: int) -> str:
    """The text of the error."""
    trainer = make_trainer(max_epochs=1, strategy=FxPipeStrategy(num_microbatches=2), devices=stages, limit_val_batches=0)
    with pytest.raises(UnsupportedError) as error:
        trainer.fit(Shares())
    return str(error.value)


def test_a_sampler_that_cuts_the_data_up_is_refused(ranks: Ranks) -> None:
    for text in ranks(2).run(refused, 2):
        assert "A dataloader yields different samples on each process" in text
        assert "num_replicas=2" in text
        assert "one replica" in text
