"""P stages x D replicas against Lightning's DDP with D devices: losses, gradients, parameters, buffers and logged values."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather as all_gather_with_gradients
from torch.distributed.nn.functional import gather as gather_with_gradients
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset
from torchmetrics.classification import MulticlassAccuracy

from lightning_fxpipe import BatchError, FxPipeStrategy, PeerError, UnsupportedError
from tests.lit import Recorder, fit_and_record, make_trainer, snapshot
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, assert_same, some

Ranks = Callable[[int], RankPool]


class Logs(Net):
    """Logs in all ways that have to do with replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(5, average="micro")
        self.val_accuracy = MulticlassAccuracy(5, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("own", loss, on_step=True, on_epoch=True)
        self.log("mean", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("most", loss, reduce_fx="max", sync_dist=True)
        self.log("all", float(batch_idx + self.global_rank), reduce_fx="sum", sync_dist=True)
        self.log("of step", self.all_gather(loss.detach()).sum() + self.trainer.strategy.reduce(loss.detach().clone()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.val_accuracy.update(logits, batch[1])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        copied = pickle.loads(pickle.dumps(self.val_accuracy.clone()))  # as loggers and averaged models do
        self.log("val_accuracy", self.val_accuracy.compute())
        self.log("copied", copied.compute())
        self.val_accuracy.reset()
        gathered = self.all_gather({"rank": torch.tensor(float(self.global_rank < 2))})
        self.log("gathered", gathered["rank"].sum() / gathered["rank"].numel())
        self.told = self.trainer.world_size, self.trainer.num_devices, tuple(gathered["rank"].shape)


class LogsByTurns(Logs):
    """Calls a metric, which talks to the other replicas when the epoch ends only."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return nn.functional.cross_entropy(logits, batch[1])


class Talks(Net):
    """Talks to the other replicas by torch itself, in the step and in a hook."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        every = torch.cat([*all_gather_with_gradients(logits)])
        targets = [torch.empty_like(batch[1]) for _ in range(dist.get_world_size())]
        dist.all_gather(targets, batch[1])
        assert dist.is_initialized()
        share = every.softmax(-1).mean(0)  # of all replicas, with gradients to all
        loss = (
            nn.functional.cross_entropy(every, torch.cat(targets))
            + share.square().sum()
            + 0.1 * dist.get_rank() * logits.mean()
        )
        total = loss.detach().clone()
        dist.all_reduce(total)
        self.log("total", total)
        return loss

    def on_train_epoch_end(self) -> None:
        value, names = torch.tensor(float(self.current_epoch + 1) * (self.global_rank < 2)), [f"epoch {self.current_epoch}"]
        dist.broadcast(value, src=1)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, names)
        dist.barrier()
        self.told = float(value), everyone, self.trainer.strategy.broadcast(self.global_rank % 2, src=1)


class Collectives(Net):
    """What torch has for tensors and objects, in a hook and in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("scattered", collectives()[0].sum())
        return loss

    def on_train_epoch_start(self) -> None:
        self.told = [one.tolist() if isinstance(one, Tensor) else one for one in collectives()]


def collectives() -> list[Any]:
    rank, count = dist.get_rank() % 2, dist.get_world_size()  # the other ranks of a pipeline have numbers above
    mine = torch.tensor([1.0 + rank, 5.0 - rank])
    found: list[Any] = [torch.zeros(2)]
    dist.scatter(found[0], [torch.full((2,), float(index)) for index in range(count)] if rank == 0 else None)
    for function, options in (
        (dist.broadcast, {"src": 1}),
        (dist.reduce, {"dst": 0}),
        (dist.all_reduce, {"op": dist.ReduceOp.MAX}),
    ):
        tensor = mine.clone()
        work = function(tensor, async_op=True, **options)
        work.wait()
        if function is not dist.reduce or rank == 0:  # elsewhere it is anything
            found.append(tensor)
    lists = [torch.zeros(2) for _ in range(count)] if rank == 0 else None
    dist.gather(mine, lists)
    flat, split = torch.zeros(2 * count), torch.zeros(2)
    dist.all_gather_into_tensor(flat, mine)
    dist.all_to_all_single(split, mine)
    received = torch.zeros(2)
    for source in range(count):
        dist.send(mine, 1 - rank) if rank == source else dist.recv(received, 1 - rank)
    found += [flat, split, received, *(lists or [])]
    objects: list[Any] = [("object", rank)]
    dist.broadcast_object_list(objects, src=1)
    gathered: list[Any] | None = [None] * count if rank == 0 else None
    dist.gather_object({"of": rank}, gathered)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, ["a", "b"] if rank == 0 else None)
    dist.monitored_barrier()
    return [*found, objects, gathered, scattered]


class Norms(Net):
    """Buffers that each replica changes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 5))
        self.backbone[1] = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12))


class Parts(Net):
    """A part that replicas use at different batches, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.never = nn.Linear(12, 12), nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        y = self.head(self.backbone(x))
        if (batch_idx + self.global_rank) % 2:
            y = y + self.extra(x)[:, :5]
        return nn.functional.cross_entropy(y, batch[1])


class Manual(Net):
    """Steps two optimizers."""

    def back(self, loss: Tensor) -> None:
        self.manual_backward(loss)

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = self.optimizers()  # type: ignore[misc,attr-defined]
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        first.zero_grad()
        self.back(loss)
        first.step()
        again = nn.functional.cross_entropy(self(batch[0]), batch[1])
        second.zero_grad()
        self.back(again)
        second.step()
        self.log("again", again, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.backbone.parameters(), lr=0.05), torch.optim.Adam(self.head.parameters(), lr=0.01)


class ManualNorms(Manual, Norms):
    """Under Lightning's DDP each replica's running values are its own then."""


class RawBackward(Manual):
    """Calls backward by itself, of which DDP averages nothing."""

    def back(self, loss: Tensor) -> None:
        loss.backward()


class Shares(IterableDataset[Any]):
    """Gives each replica its share, as the Trainer names it."""

    def __init__(self, module: L.LightningModule) -> None:
        self.module = module

    def __iter__(self) -> Any:
        for index in range(self.module.global_rank, 40, self.module.trainer.world_size):
            yield torch.full((12,), index / 40), index % 5


class SharesInSetup(Net):
    """Shares its samples out before there are loaders, as many DataModules do."""

    def setup(self, stage: str) -> None:
        data = self._loader(44).dataset
        rank, count = self.trainer.global_rank, self.trainer.world_size
        assert (rank, count) == (dist.get_rank(), dist.get_world_size()) or not dist.is_initialized()
        self.mine = Subset(data, range(rank, 40, count))
        self.sampler = DistributedSampler(data, shuffle=False)
        self.writes = self.trainer.is_global_zero

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.mine, batch_size=8)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._loader(44).dataset, batch_size=8, sampler=self.sampler)


class Streams(Net):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Shares(self), batch_size=8)


class Unseeded(Net):
    """Each replica draws other weights, of which the first replica's hold."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    @classmethod
    def made(cls) -> Unseeded:
        rank = dist.get_rank() // (dist.get_world_size() // 2) if dist.is_initialized() else 0
        torch.manual_seed(100 + rank)
        module = cls()
        torch.manual_seed(7)
        return module


class Between(Net):
    """Talks to the other replicas before the model's call, and between it and a parameter that the step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        center = batch[0].mean(0)
        dist.all_reduce(center)
        spread = self.trainer.strategy.reduce(batch[0].std())
        embeddings = self(batch[0] - center / 2 + spread)
        every = self.all_gather(embeddings, sync_grads=True).flatten(0, 1)
        targets = self.all_gather(nn.functional.one_hot(batch[1], 5).float()).flatten(0, 1)
        told = embeddings.detach().mean(0)
        dist.broadcast(told, 1)
        logits = every * self.scale.exp()
        return nn.functional.cross_entropy(logits, targets) + (logits.mean(0) * told).sum() * (1 + self.global_rank)


class Decides(Net):
    """Asks the strategy what all replicas do, in the step and where it makes its data."""

    def train_dataloader(self) -> DataLoader[Any]:
        self.told = self.trainer.strategy.broadcast(f"of {self.global_rank}", src=1)
        return super().train_dataloader()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        share = self.trainer.strategy.broadcast(1.0 + self.global_rank + batch_idx)
        is_last = self.trainer.strategy.reduce_boolean_decision(self.global_rank == 1 and batch_idx == 2, all=False)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.global_rank)
        dist.barrier()
        return nn.functional.cross_entropy(self(batch[0]), batch[1]) * (share + is_last + sum(everyone))


class Noisy(Net):
    """Draws numbers, as the Trainer has seeded them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0] + torch.randn_like(batch[0])), batch[1])


class SetsBuffer(Net):
    """A hook gives each replica another value, of which the first replica's holds."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def on_train_start(self) -> None:
        if self.global_rank == 1:
            self.factor.fill_(3.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1]) * self.factor


class Uneven(Logs):
    """Replicas have different numbers of batches to validate with."""

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Subset(self._loader(44).dataset, range(9 if self.global_rank else 18)), batch_size=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A run that is the same by DDP and by replicas of a pipeline."""

    module: Callable[[], Any] = Net
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    strategy: dict[str, Any] = dataclasses.field(default_factory=dict)
    ddp: dict[str, Any] = dataclasses.field(default_factory=dict)
    callbacks: Callable[[], Sequence[L.Callback]] = list


CASES = {
    "plain": Case(),
    "logs": Case(module=Logs),
    "collectives": Case(module=Collectives),
    "talks": Case(module=Talks, strategy={"schedule": "gpipe"}),
    "metrics by turns": Case(module=LogsByTurns, strategy={"schedule": "1f1b"}),
    "norms": Case(module=Norms, strategy={"num_microbatches": 1}),
    "norms accumulated": Case(module=Norms, strategy={"num_microbatches": 1}, options={"accumulate_grad_batches": 2}),
    "accumulated and clipped": Case(options={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, module=Logs),
    "parts": Case(module=Parts, ddp={"find_unused_parameters": True}, strategy={"schedule": "gpipe"}),
    "manual": Case(module=Manual, ddp={"find_unused_parameters": True}),
    "manual norms": Case(module=ManualNorms, ddp={"find_unused_parameters": True}, strategy={"num_microbatches": 1}),
    "between": Case(module=Between),
    "decides": Case(module=Decides),
    "noisy": Case(module=Noisy),
    "sets buffer": Case(module=SetsBuffer),
    "uneven": Case(module=Uneven, options={"use_distributed_sampler": False}),
    "streams": Case(module=Streams),
    "setup": Case(module=SharesInSetup, options={"use_distributed_sampler": False}),
    "unseeded": Case(module=Unseeded.made),
    # One microbatch: sums of rounded gradients are others with more.
    "bf16": Case(options={"precision": "bf16-mixed"}, module=Logs, strategy={"num_microbatches": 1}),
    "fp16": Case(options={"precision": "16-mixed"}, strategy={"num_microbatches": 1}),
    "stops": Case(
        module=Logs,
        options={"max_epochs": 6},
        callbacks=lambda: [EarlyStopping("own_epoch", patience=0, min_delta=0.05)],
    ),
}


def run(case: Case, devices: int, num_stages: int | None) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    module, recorder = case.module(), Recorder()
    if num_stages is None:
        from lightning.pytorch.strategies import DDPStrategy

        strategy: Any = DDPStrategy(**case.ddp)
    else:
        strategy = FxPipeStrategy(num_stages=num_stages, **{"num_microbatches": 2, **case.strategy})
    options = {"max_epochs": 2, **case.options}
    trainer = make_trainer(strategy=strategy, devices=devices, callbacks=[recorder, *case.callbacks()], **options)
    trainer.fit(module)
    return {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "state": snapshot(module),
        "metrics": {key: float(value) for key, value in sorted(trainer.callback_metrics.items())},
        "counters": (trainer.global_step, trainer.current_epoch, trainer.should_stop),
        "told": getattr(module, "told", None),
        "writes": getattr(module, "writes", None),
        "predictions": trainer.predict(module),
    }


def run_raw(devices: int, num_stages: int) -> list[Any]:
    """Runs on every rank."""
    return [run(Case(module=module), devices, num_stages) for module in (Manual, RawBackward)]


def test_backward_that_a_step_calls_by_itself_is_averaged_as_well(ranks: Ranks) -> None:
    for manual, raw in ranks(2).run(run_raw, 2, 1):
        assert_same(raw, manual, "raw")


def run_by_default(num_stages: int | None) -> dict[str, Any]:
    """Runs on every rank: with BatchNorm, and as many microbatches as nobody asked for."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(Case(module=Norms, strategy={"num_microbatches": "auto"}), 2, num_stages)
    return found | {"told": [str(one.message) for one in caught if "over one microbatch" in str(one.message)]}


def test_replicas_of_one_device_normalise_over_the_whole_batch_as_ddp_does(ranks: Ranks) -> None:
    expected, found = ranks(2).run(run_by_default, None), ranks(2).run(run_by_default, 1)
    for replica in range(2):
        assert found[replica]["told"] == []
        check("norms by default", expected[replica], [found[replica]])


def run_all(names: Sequence[str], devices: int, num_stages: int | None) -> list[Any]:
    """Runs on every rank."""
    return [run(CASES[name], devices, num_stages) for name in names]


def check(name: str, reference: dict[str, Any], mine: Sequence[dict[str, Any]]) -> None:
    """The ranks of a replica have together what one device of DDP has."""
    gradients: list[dict[str, Tensor]] = [{} for _ in reference["gradients"]]
    state: dict[str, Tensor] = {}
    for result in mine:
        for key in reference.keys() - {"gradients", "state", "predictions", "writes"}:
            found, expected = result[key], reference[key]
            if key == "metrics":
                found, expected = dict(sorted(found.items())), dict(sorted(expected.items()))
            assert_same(found, expected, f"{name}: {key}")
        assert len(result["gradients"]) == len(gradients), name
        for found, all_found in zip(result["gradients"], gradients, strict=True):
            all_found |= found
        state |= result["state"]
    assert_same(
        [dict(sorted(one.items())) for one in gradients], [dict(sorted(g.items())) for g in reference["gradients"]], name
    )
    assert_same(dict(sorted(state.items())), dict(sorted(reference["state"].items())), name)
    for result in mine if "predictions" in reference else ():
        assert_same(result["predictions"], reference["predictions"], f"{name}: predictions")


def check_all(names: Sequence[str], expected: Sequence[list[Any]], results: Sequence[list[Any]]) -> None:
    """As :func:`check`, of runs by their names, for two replicas."""
    stages = len(results) // 2
    for index, name in enumerate(names):
        for replica in range(2):
            mine = [result[index] for result in results[replica * stages : (replica + 1) * stages]]
            check(f"{name}, replica {replica}", expected[replica][index], mine)


# Schedules besides 1F1B, each with its stages on each device.
SCHEDULES = {
    **dict.fromkeys(("gpipe", "1f1b", "zb_h1", "zb_h2", "zero_bubble"), 1),
    **dict.fromkeys(("looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"), 2),
    **dict.fromkeys(("zero_bubble_v", "v_half", "v_min"), 2),
}


def run_schedules(model: str, devices: int, schedules: Sequence[str]) -> list[Any]:
    """Runs on every rank; without schedules by DDP."""
    if not schedules:
        return [fit_and_record(model, strategy="ddp", devices=devices)]
    found = []
    for schedule in schedules:
        each = SCHEDULES[schedule]
        strategy = FxPipeStrategy(
            num_stages=2 * each,
            stages_per_rank=each,
            num_microbatches=4,
            schedule=schedule,  # type: ignore[arg-type]
        )
        found.append(fit_and_record(model, strategy=strategy, devices=devices))
        assert strategy.replicas.count == 2
    return found


@pytest.mark.parametrize(
    ("model", "schedules"),
    [
        ("gpt", ["zbv_zero_bubble"]),
        *(pytest.param(model, [*SCHEDULES], marks=pytest.mark.slow) for model in ("gpt", "unet", "mlp")),
    ],
)
def test_every_schedule_equals_ddp(ranks: Ranks, model: str, schedules: list[str]) -> None:
    """The last batch of an epoch is smaller, and no multiple of the microbatches."""
    expected = [result[0] for result in ranks(2).run(run_schedules, model, 2, [])]
    results = ranks(4).run(run_schedules, model, 4, schedules, timeout_seconds=60 + 40 * len(schedules))
    for index, schedule in enumerate(schedules):
        for replica in range(2):
            mine = [result[index] for result in results[2 * replica : 2 * replica + 2]]
            check(f"{model} {schedule}, replica {replica}", expected[replica], mine)


@pytest.mark.parametrize("stages", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_equals_ddp(ranks: Ranks, stages: int) -> None:
    names = some([*CASES])
    expected = ranks(2).run(run_all, names, 2, None, timeout_seconds=300)
    results = ranks(2 * stages).run(run_all, names, 2 * stages, stages, timeout_seconds=600)
    check_all(names, expected, results)
    for index in range(len(names)):
        for replica in range(2):
            mine = [result[index] for result in results[replica * stages : (replica + 1) * stages]]
            assert mine[0]["writes"] == expected[replica][index]["writes"]
            assert not any(result["writes"] for result in mine[1:])  # once for each pipeline


# ------------------------------------------------------------------ what is refused


class Uneven(Net):
    """Replicas have other numbers of batches."""

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(16 + 8 * self.trainer.strategy.replicas.index)  # type: ignore[attr-defined]


class UnevenStream(Net):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(UnequalShares(self), batch_size=8)


class UnequalShares(Shares):
    def __iter__(self) -> Any:
        yield from [(torch.ones(12), 1)] * (16 + 8 * self.module.global_rank)


class WrongShare(Net):
    def train_dataloader(self) -> DataLoader[Any]:
        data = self._loader(44).dataset
        return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, num_replicas=4, rank=0))


class OwnGroup(Net):
    def on_train_start(self) -> None:
        dist.new_group([1])


class GathersWithGradients(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (logits, *_) = gather_with_gradients(self(batch[0]))
        return nn.functional.cross_entropy(logits, batch[1])


class ReducesOddly(Net):
    def on_train_start(self) -> None:
        self.trainer.strategy.reduce(torch.ones(()), reduce_op="median")


class OwnGroupForValues(Net):
    def on_train_start(self) -> None:
        self.trainer.strategy.all_gather(torch.ones(()), group=self.trainer.strategy.topology.group)  # type: ignore[attr-defined]


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "batches": (Uneven, {"use_distributed_sampler": False}, BatchError, "has a different number of batches on different ranks"),
    "streams": (UnevenStream, {}, BatchError, "has a different number of batches on different ranks"),
    "sampler": (WrongShare, {}, UnsupportedError, "yields different samples on each process"),
    "group": (OwnGroup, {}, UnsupportedError, "User code communicates with other replicas"),
    "gradients": (GathersWithGradients, {}, UnsupportedError, "a collective that replicas of a pipeline do not support"),
    "reduce": (ReducesOddly, {}, UnsupportedError, "The reduction over replicas is not supported"),
    "values": (OwnGroupForValues, {}, UnsupportedError, "Values can be reduced or gathered over all replicas only"),
    "by turns": (Talks, {"schedule": "1f1b"}, UnsupportedError, "the step communicates with other replicas in"),
    "batch norm": (
        Norms,
        {"sync_batchnorm": True},
        UnsupportedError,
        "sync_batchnorm, which would synchronise each microbatch",
    ),
}


def try_refused(name: str) -> str:
    """Runs on every rank; returns the error."""
    module, options, kind, _ = REFUSED[name]
    schedule = options.get("schedule", "auto")
    strategy = FxPipeStrategy(num_stages=2, num_microbatches=2, schedule=schedule)
    options = {key: value for key, value in options.items() if key != "schedule"}
    trainer = make_trainer(max_epochs=1, devices=4, strategy=strategy, **options)
    try:
        trainer.fit(module())
    except (kind, PeerError) as error:
        return f"{error} {getattr(error, '__notes__', '')}"
    return "none"


_OFTEN = ("batches", "sampler", "gradients")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in _OFTEN else pytest.mark.slow) for name in REFUSED])
def test_refused_with_the_reason(ranks: Ranks, name: str) -> None:
    pool = ranks(4)
    for told in pool.run(try_refused, name):
        assert REFUSED[name][3] in " ".join(told.split()), told
    if name in ("gradients", "by turns"):  # while other ranks wait, whose connections are broken then
        pool.kill()
