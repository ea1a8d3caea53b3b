"""Hooks see, log and decide in a pipeline what they do on one device: traces of every hook of a run are the same."""

from __future__ import annotations

import copy
import pickle
import signal
import sqlite3
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_fxpipe import FxPipeStrategy, PeerError, UnsupportedError
from tests.hook_traces import CALLBACK_HOOKS, MODULE_HOOKS, TraceCallback, traced
from tests.lit import LitModel, make_loader, make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go

Ranks = Callable[[int], RankPool]


def traces(trainer: L.Trainer, module: Any, folder: Path) -> Any:
    (callback,) = (c for c in trainer.callbacks if isinstance(c, TraceCallback))
    # Dataloaders are made before a run's first hook, for the batch that is planned with (docs/reference/lightning.md).
    traces = (*callback.trace, *type(module).trace)
    events = [vars(event) for event in traces if not event.name.endswith("_dataloader")]
    # As with every strategy, one process for each machine prepares data. The plan is made from the first batch, which is asked
    # for once more than on one device, before the optimizers are.
    configured = [event["name"] for event in events].index("module.configure_optimizers")
    asked = [
        e for e in events[:configured] if e["name"].removeprefix("module.") in vars(DataHooks) and e["name"] != "module.setup"
    ]
    return [e for e in events if e not in asked and e["name"] != "module.prepare_data"]


TRACED: dict[str, Run] = {
    name: Run(
        callbacks=lambda folder: [TraceCallback()],
        module=lambda: traced()(),
        options={"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 1, **options},
        calls=calls,
        look=traces,
    )
    for name, options, calls in [
        (
            "plain",
            {"enable_checkpointing": True, "max_epochs": 2, "limit_train_batches": 2},
            ("fit", "validate", "test", "predict"),
        ),
        ("accumulation", {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}, ("fit",)),
        ("by value", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, ("fit",)),
    ]
}


class LogsNorms(Net):
    """Logs gradients in all the ways that people do, before and after clipping."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("total", torch.stack(norms).norm())
        self.log("largest", max(float(norm) for norm in norms))

    def on_after_backward(self) -> None:
        for name, parameter in self.named_parameters():
            self.log(f"mean/{name}", parameter.grad.abs().mean())

    def on_train_epoch_end(self) -> None:
        self.log("weights", sum(p.square().sum() for p in self.parameters()).sqrt())

    def on_validation_epoch_end(self) -> None:
        self.log("val_weight", self.backbone[0][0].weight.mean())


class ClipsItself(Net):
    """Clips, adds noise and drops gradients by hand."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        held = [parameter.grad for parameter in self.parameters()]
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        self.log("held", torch.stack([gradient.norm() for gradient in held]).norm())  # which are clipped in place
        self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.2))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)
        if any(not p.grad.isfinite().all() for p in self.parameters()):
            optimizer.zero_grad()


class WarmsUp(Net):
    """Steps every second batch, warms the rate up by hand, skips an epoch's rest, and steps its scheduler itself."""

    rates: list[float]

    def on_fit_start(self) -> None:
        self.rates = []

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (self.global_step + 1) / 4)
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
            self.log("after", sum(p.grad.norm() for p in self.parameters() if p.grad is not None))
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        self.rates.append(scheduler.get_last_lr()[0])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 and batch_idx == 3 else None


class MovesData(Net):
    """Augments on the device, scales on the way, and has a batch of its own form."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0] * 2, "y": batch[1]}

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return {key: value.to(device) for key, value in batch.items()}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x = batch["x"] + 0.1 * torch.randn_like(batch["x"]) if self.trainer.training else batch["x"]
        return x, batch["y"]


class Momentum(Net):
    """A slow copy of the model that a hook moves, and that hooks swap in for validation."""

    def on_train_start(self) -> None:
        self.slow = {name: value.detach().clone() for name, value in self.state_dict().items()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                self.slow[name].lerp_(parameter, 0.3)

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.fast = {name: value.detach().clone() for name, value in self.state_dict().items()}
            self.load_state_dict(self.slow)

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.load_state_dict(self.fast)


class ReturnsMore(Net):
    """Steps return predictions, and hooks gather them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"loss": nn.functional.cross_entropy(logits, batch[1]), "hits": (logits.argmax(1) == batch[1]).float()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("hits", outputs["hits"].mean())

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_validation_epoch_start(self) -> None:
        self.kept: list[Tensor] = []

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.kept.append(outputs.argmax(1))

    def on_validation_epoch_end(self) -> None:
        self.log("classes", float(torch.cat(self.kept).unique().numel()))


class RunsItself(Net):
    """Calls the model in a hook, as to show samples, saves from a hook, and keeps predictions."""

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.log("sample", self(torch.ones(2, 12)).mean())
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "mine.ckpt")

    def on_predict_start(self) -> None:
        self.kept: list[Tensor] = []

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.kept.append(outputs.argmax(1))


class StopsInStep(Net):
    """Ends the run where only the last stage comes by, after the model's call."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 3:
            self.trainer.should_stop = True
        return loss


class StopsOnOneRank(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero and self.global_step == 3:
            self.trainer.should_stop = True


class LogsRank(Net):
    """Logs what only this rank can know, looks at weights on rank 0 alone, and lets that decide."""

    def on_train_epoch_end(self) -> None:
        self.log("mine", float(self.global_rank + self.current_epoch))
        if self.trainer.is_global_zero:
            self.extent = float(sum(p.norm() for p in self.parameters()))


class ChangesFirst(Net):
    """Changes gradients and weights in place, and then looks at all of them, also while a checkpoint is made."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.9
        self.log("weight", torch.stack([p.norm() for p in self.parameters()]).norm())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(2)
            checkpoint["doubled"] = [p.detach().clone() for p in self.parameters()]
            for parameter in self.parameters():
                parameter.div_(2)
        self.saved = checkpoint["doubled"], float(sum(value.norm() for value in checkpoint["state_dict"].values()))


class ChangesAlone(Net):
    """Changes on rank 0 alone what every rank has a part of, in memory that torch's functions see and in other."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.count += 1
            self.head[0].requires_grad_(batch_idx % 2 == 0)

    def on_after_backward(self) -> None:
        if self.global_rank == 0:
            for index, parameter in enumerate(p for p in self.parameters() if p.grad is not None):
                parameter.grad = (None, torch.ones_like(parameter), parameter.grad.zero_(), parameter.grad)[index % 4]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            for parameter in self.parameters():
                parameter.data.mul_(0.9)
                parameter.detach().numpy()[:1] *= 0.5
            optimizer = self.trainer.optimizers[0]
            optimizer.param_groups[0]["weight_decay"] = 0.01 * batch_idx
            for state in optimizer.state.values():
                state["momentum_buffer"].mul_(0.5)
            if batch_idx == 3:
                optimizer.state.clear()

    def on_train_epoch_end(self) -> None:
        self.found = self.count.clone(), [p.requires_grad for p in self.parameters()]


class ReadsStates(Net):
    """Reads, resets and reloads what the optimizer keeps of all parameters."""

    def on_fit_start(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter]["momentum_buffer"].mul_(0.5)
        self.log("momentum", sum(state["momentum_buffer"].norm() for state in optimizer.state.values()))
        saved = copy.deepcopy(optimizer.optimizer.state_dict())
        self.found.append([float(state["momentum_buffer"].sum()) for _, state in sorted(saved["state"].items())])
        for state in saved["state"].values():
            state["momentum_buffer"].mul_(0.5)
        optimizer.optimizer.load_state_dict(saved)
        self.found.append(float(sum(state["momentum_buffer"].norm() for state in optimizer.state.values())))


class AsksAlone(Net):
    """Asks on rank 0 alone for what needs all ranks, before the module is split and after."""

    def setup(self, stage: str) -> None:
        self.asked = [Path(self.trainer.log_dir).name] if self.trainer.is_global_zero else []

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.asked.append(Path(self.trainer.log_dir).name)
            self.trainer.strategy.barrier()
        self.epoch = self.trainer.strategy.broadcast(self.current_epoch)


class Exports(Net):
    """Records, copies and pickles itself in a hook."""

    def on_train_epoch_end(self) -> None:
        x, copied = torch.ones(2, 12), copy.deepcopy(self)
        copied.on_train_epoch_end = lambda: None
        programs = (torch.jit.trace(self, x), torch.export.export(self.backbone, (x,)).module())  # type: ignore[no-untyped-call]
        models = (*programs, copied, pickle.loads(pickle.dumps(self)))
        self.results = [model(x).detach() for model in models]


class Appends(Net):
    """Writes rows in steps and hooks, and reads them."""

    def _append(self, row: Any) -> None:
        with (Path(self.trainer.default_root_dir) / "rows.txt").open("a") as file:
            file.write(f"{row}\n")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._append("before")
        loss = super().training_step(batch, batch_idx)
        self._append("after")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._append(self.global_step)
        root = Path(self.trainer.default_root_dir)
        with tempfile.NamedTemporaryFile("w", dir=root) as file:
            Path(file.name).write_text("own")
            self._append(Path(file.name).read_text())
        (root / "rows.new").write_text((root / "rows.txt").read_text())
        (root / "rows.new").replace(root / "rows.txt")
        with closing(sqlite3.connect(root / "rows.db")) as database:
            database.execute("create table if not exists rows (row)")
            database.execute("insert into rows values (?)", (batch_idx,))
            database.commit()
            self.rows = database.execute("select * from rows").fetchall()

    def on_train_end(self) -> None:
        path = Path(self.trainer.default_root_dir) / "rows.txt"
        self.rows += path.read_text().split()
        path.unlink()
        (path.parent / "rows.db").unlink()


class ConfiguresCallbacks(Net):
    def configure_callbacks(self) -> Any:
        return [L.pytorch.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.02)]


class Fails(L.Callback):
    """Raises in a hook, on every rank or on one."""

    def __init__(self, error: type[BaseException], rank: int | None = None) -> None:
        self.error, self.rank = error, rank
        self.noticed: list[str] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 3 and self.rank in (None, trainer.global_rank):
            raise self.error("on purpose")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.noticed.append(f"{type(exception).__name__} {exception}")


def noticed(trainer: L.Trainer, module: Any, folder: Path) -> Any:
    return [c.noticed for c in trainer.callbacks if isinstance(c, Fails)], str(trainer.state.status)


class StepsItself(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


def fails_on_one_rank(rank: int, make: type[Net]) -> str:
    """What the other ranks are told."""
    callback = Fails(ArithmeticError, rank)
    trainer = make_trainer(max_epochs=2, callbacks=[callback], strategy="fxpipe", devices=2)
    with pytest.raises((ArithmeticError, PeerError)):
        trainer.fit(make())
    return callback.noticed[0]


HOOKS: dict[str, Run] = {
    "logs norms": Run(module=LogsNorms, options={"gradient_clip_val": 0.4}),
    "clips itself": Run(module=ClipsItself),
    "warms up": Run(module=WarmsUp, look=lambda trainer, module, folder: module.rates),
    "moves data": Run(module=MovesData, calls=("fit", "test", "predict")),
    "momentum": Run(module=Momentum, look=lambda trainer, module, folder: module.slow),
    "runs itself": Run(module=RunsItself, calls=("fit", "predict"), look=lambda trainer, module, folder: module.kept),
    "returns more": Run(module=ReturnsMore),
    "stops in a step": Run(module=StopsInStep, options={"min_epochs": 0}),
    "stops on one rank": Run(module=StopsOnOneRank, options={"min_epochs": 0}),
    "logs its rank": Run(module=LogsRank, look_at_zero=lambda trainer, module, folder: module.extent),
    "logs its rank, stages in a V": Run(
        module=LogsRank,
        look_at_zero=lambda trainer, module, folder: module.extent,
        strategy={"num_microbatches": 4, "schedule": "zbv_zero_bubble"},
    ),
    "changes first": Run(
        module=ChangesFirst,
        options={"enable_checkpointing": True, "max_epochs": 1},
        look=lambda trainer, module, folder: module.saved,
    ),
    "changes alone": Run(
        module=ChangesAlone,
        strategy={"num_microbatches": 2, "schedule": "gpipe"},
        look=lambda trainer, module, folder: module.found,
    ),
    "reads states": Run(module=ReadsStates, look=lambda trainer, module, folder: module.found),
    "asks alone": Run(module=AsksAlone, look_at_zero=lambda trainer, module, folder: (len(module.asked), module.epoch)),
    "exports": Run(module=Exports, look=lambda trainer, module, folder: module.results),
    "appends": Run(module=Appends, look=lambda trainer, module, folder: module.rows),
    "configures callbacks": Run(module=ConfiguresCallbacks, options={"max_epochs": 8}),
}

FAILING = {
    "exception": Run(callbacks=lambda folder: [Fails(ArithmeticError)], raises="ArithmeticError", look=noticed),
    "interrupt": Run(callbacks=lambda folder: [Fails(KeyboardInterrupt)], raises="SystemExit", look=noticed),
}

RUNS = {**{f"trace {name}": run for name, run in TRACED.items()}, **HOOKS, **FAILING}


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Lightning switches Ctrl-C off for good once it has caught one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_traces_of_every_hook_are_the_same_on_every_rank(ranks: Ranks, tmp_path: Path, stages: int) -> None:
    compare(ranks, do, [f"trace {name}" for name in TRACED], tmp_path, stages)


def test_a_trace_has_every_hook(tmp_path: Path) -> None:
    """Only hooks that nothing in the run calls may be missing, and those that ``traces`` leaves out."""
    (tmp_path / "0").mkdir()
    seen = {event["name"] for name in TRACED for event in do(f"trace {name}", str(tmp_path), 0)["looked"]}
    everything = {f"module.{name}" for name in MODULE_HOOKS} | {f"callback.{name}" for name in CALLBACK_HOOKS}
    assert {name.rpartition(".")[2] for name in everything - seen} == {
        *("prepare_data", "on_exception", "on_load_checkpoint", "load_state_dict", "state_dict"),
        *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
    }


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_hooks_see_log_and_decide_what_they_do_on_one_device(ranks: Ranks, tmp_path: Path, stages: int) -> None:
    compare(ranks, do, list(HOOKS), tmp_path, stages)


@pytest.mark.usefixtures("interruptible")
def test_exceptions_in_hooks_end_the_run_as_on_one_device(ranks: Ranks, tmp_path: Path) -> None:
    compare(ranks, do, list(FAILING), tmp_path, 2)


def test_an_exception_in_one_ranks_hook_is_told_to_the_other(ranks: Ranks) -> None:
    """Also where the hook runs within another hook."""
    pool = ranks(2)
    told = pool.run(fails_on_one_rank, 1, StepsItself)
    pool.kill()  # such ranks have lost each other for good
    assert told[1] == "ArithmeticError on purpose"
    assert "ArithmeticError: on purpose" in told[0]
    assert "rank 1" in told[0]


class SavesAlone(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.trainer.save_checkpoint("never.ckpt")


def saves_alone() -> tuple[str, float]:
    """Runs on every rank; what it ends with, and after how many seconds."""
    begin = time.monotonic()
    with pytest.raises((UnsupportedError, PeerError)) as raised:
        make_trainer(max_epochs=1, strategy="fxpipe", devices=2).fit(SavesAlone())
    return str(raised.value), time.monotonic() - begin


def test_what_every_rank_must_do_is_refused_where_one_does_it(ranks: Ranks) -> None:
    """It would wait for the other ranks until the timeout."""
    pool = ranks(2)
    (message, seconds), _ = pool.run(saves_alone)
    pool.kill()
    assert "Only some ranks of the pipeline call save_checkpoint" in message
    assert "test_hooks.py" in message
    assert seconds < 30


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    path = Path(folder) / str(stages)
    path.mkdir(exist_ok=True)
    return go(RUNS[name], path, stages)


class LogsEachNorm(LitModel):
    """Logs the norm of each parameter and gradient by itself: a rank looks at those of others where one has its own."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for fqn, parameter in self.named_parameters():
            self.log(f"gradient/{fqn}", parameter.grad.norm())

    def on_train_batch_end(self, *_: Any) -> None:
        for fqn, parameter in self.named_parameters():
            self.log(f"norm/{fqn}", parameter.norm())


def fit_logging_norms(**options: Any) -> tuple[dict[str, float], list[str]]:
    """Runs on one device, or on every rank."""
    torch.manual_seed(4)
    module = LogsEachNorm("mlp")
    trainer = make_trainer(max_epochs=1, limit_val_batches=0, **options)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(module, make_loader("mlp"))
    said = [str(one.message) for one in warned if "differ" in str(one.message)]
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, said


def fit_logging_norms_in_stages() -> tuple[dict[str, float], list[str]]:
    """Runs on every rank."""
    return fit_logging_norms(strategy=FxPipeStrategy(num_microbatches=4), devices=2)


def test_norms_that_are_logged_one_by_one_are_those_of_one_device(ranks: Callable[[int], RankPool]) -> None:
    """While one rank asks for what others have, another is already at the next call: their votes must not meet."""
    expected, _ = fit_logging_norms()
    for metrics, said in ranks(2).run(fit_logging_norms_in_stages):
        assert said == []
        assert metrics == pytest.approx(expected, abs=1e-5)
