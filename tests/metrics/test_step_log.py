"""What a step logs is collected on the last stage, and logged again on every rank by Lightning's own ``log``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_fxpipe.distributed.commands import Commands
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.metrics.step_log import LogEntry, ResultChannel, StepLog, replay

Step = Callable[[L.LightningModule], None]


def collect(step: Step) -> list[LogEntry]:
    """Entries of a batch; ``step(module)`` logs."""
    log, module = StepLog({}), L.LightningModule()
    with log.capture(module):
        step(module)
    return log.entries


def only(*args: Any, **options: Any) -> LogEntry:
    """The entry of one call of ``log``."""
    (entry,) = collect(lambda module: module.log(*args, **options))
    return entry


# ------------------------------------------------------------------ what is logged


def test_a_call_is_an_entry_with_the_value_that_was_logged() -> None:
    assert only("a", 1.5) == LogEntry(name="a", value=1.5, options=(), num_samples=None)


def test_an_explicit_batch_size_is_the_weight() -> None:
    assert only("a", 0.25, batch_size=40) == LogEntry(name="a", value=0.25, options=(), num_samples=40)


def test_the_value_is_that_of_the_call_also_where_the_step_goes_on_with_the_tensor_in_place() -> None:
    """It is read when the step is over, with all others."""

    def step(module: L.LightningModule) -> None:
        loss = torch.tensor(6.0)
        module.log("a", loss)
        loss /= 2
        module.log("b", loss)
        loss.zero_()

    assert [entry.value for entry in collect(step)] == [6.0, 3.0]


@pytest.mark.parametrize("rule", ["mean", "AVG", torch.sum, min, "median", torch.prod])
def test_reduce_fx_is_an_option_that_lightning_judges(rule: Any) -> None:
    """There is one value for a batch; what becomes of several batches' is Lightning's affair."""
    assert only("a", 1.0, reduce_fx=rule).options == (("reduce_fx", rule),)


def test_an_option_that_cannot_be_sent_to_the_other_ranks_is_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"(?s)self\.log\('a', \.\.\.\) received an option that cannot be sent.*test_step_log.*reduce_fx.*module",
    ):
        only("a", 1.0, reduce_fx=lambda values: values[0])


def test_values_that_float32_cannot_hold_survive() -> None:
    count = 2**24 + 1
    assert only("a", count).value == count
    entry = only("a", torch.tensor(count, dtype=torch.float64))
    assert (entry.value, entry.is_double) == (count, True)


def test_a_nan_is_logged_as_it_is() -> None:
    """A diverged loss must be seen as one."""
    assert math.isnan(only("a", math.nan).value)


@pytest.mark.parametrize(
    "value",
    [
        3,
        3.0,
        True,
        numpy.float64(3.0),
        numpy.float32(3.0),
        torch.tensor(3),
        torch.tensor([[3.0]]),
        torch.tensor(3.0, dtype=torch.bfloat16),
    ],
    ids=["int", "float", "bool", "float64", "float32", "int tensor", "shaped tensor", "bfloat16"],
)
def test_whatever_is_a_number_to_lightning_can_be_logged(value: Any) -> None:
    assert only("a", value).value == float(value)


@pytest.mark.parametrize(
    ("value", "named", "what"),
    [
        ("text", "str", "received a value that is not a number"),
        (None, "NoneType", "received a value that is not a number"),
        ([1.0], "list", "received a value that is not a number"),
        (torch.ones(2), "Tensor", "received a value that is not a number"),
        (MeanMetric(), "MeanMetric", "received a metric that the other ranks cannot identify"),
    ],
    ids=["text", "none", "list", "vector", "a metric that nobody holds"],
)
def test_a_value_that_is_no_number_is_refused_by_name(value: Any, named: str, what: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"self\.log\('accuracy', \.\.\.\) {what}") as caught:
        only("accuracy", value)
    assert named in str(caught.value)


def test_a_value_of_another_stages_parameters_is_refused() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"(?s)self\.log\('norm', \.\.\.\) received a value that the last stage cannot compute"
        r".*meta.*on_before_optimizer_step",
    ):
        only("norm", torch.ones((), device="meta"))


def test_a_metric_is_an_entry_with_its_name_and_no_value() -> None:
    module = L.LightningModule()
    module.accuracy = MeanMetric()
    log = StepLog({"accuracy": module.accuracy})
    with log.capture(module):
        module.accuracy(torch.tensor(3.0))
        module.log("acc", module.accuracy, on_epoch=True)
    assert log.entries == [
        LogEntry(name="acc", value=0.0, options=(("on_epoch", True),), num_samples=None, metric="accuracy"),
    ]
    assert module.accuracy.compute() == 3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_may_change_in_place_after_it_was_logged(dtype: torch.dtype) -> None:
    running = torch.ones((), dtype=dtype)

    def step(module: L.LightningModule) -> None:
        module.log("a", running)
        running.mul_(10.0)
        module.log("b", running)

    assert [entry.value for entry in collect(step)] == [1.0, 10.0]


def test_the_graph_of_a_logged_tensor_is_not_kept() -> None:
    weight = nn.Parameter(torch.ones(()))
    entry = only("a", weight * 3)
    assert type(entry.value) is float
    assert entry.value == 3.0


def test_entries_come_in_the_order_of_the_calls_and_a_name_logged_twice_stays_two() -> None:
    def step(module: L.LightningModule) -> None:
        module.log("b", 1.0)
        module.log("a", 2.0)
        module.log("b", 3.0)

    assert [(entry.name, entry.value) for entry in collect(step)] == [("b", 1.0), ("a", 2.0), ("b", 3.0)]


def test_log_dict_logs_each_of_its_entries_with_its_options() -> None:
    entries = collect(lambda module: module.log_dict({"a": 0.5, "b": torch.tensor(2.0)}, prog_bar=True, on_epoch=True))
    assert [(entry.name, entry.value) for entry in entries] == [("a", 0.5), ("b", 2.0)]
    for entry in entries:
        assert dict(entry.options)["prog_bar"] is True
        assert dict(entry.options)["on_epoch"] is True


def test_positional_arguments_are_options_under_their_names() -> None:
    # log(name, value, prog_bar, logger, on_step, on_epoch)
    assert dict(only("a", 1.0, True, False, True).options) == {"prog_bar": True, "logger": False, "on_step": True}


def test_options_about_ranks_are_dropped_but_for_other_replicas_and_all_others_kept() -> None:
    about_ranks = {"sync_dist": True, "sync_dist_group": None, "enable_graph": False}
    entry = only("a", 1.0, on_epoch=True, add_dataloader_idx=False, **about_ranks)
    assert dict(entry.options) == {"on_epoch": True, "add_dataloader_idx": False, "sync_dist": True}


def test_an_unknown_argument_fails_in_the_users_call() -> None:
    with pytest.raises(TypeError, match="progress"):
        only("a", 1.0, progress=True)


def test_a_step_that_logs_nothing_has_no_entries() -> None:
    assert collect(lambda module: None) == []


# ------------------------------------------------------------------ the module's own log


def test_the_modules_log_is_its_own_again_after_the_block() -> None:
    module, original = L.LightningModule(), L.LightningModule.log
    with StepLog({}).capture(module):
        assert L.LightningModule.log is not original
    assert L.LightningModule.log is original
    assert "log" not in vars(module)


def test_the_modules_log_is_its_own_again_after_an_exception() -> None:
    def fail(module: L.LightningModule) -> None:
        with StepLog({}).capture(module):
            raise KeyError

    module, original = L.LightningModule(), L.LightningModule.log
    mine = module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        fail(module)
    assert module.log is mine
    assert L.LightningModule.log is original


def test_a_log_overridden_with_other_parameters_runs_and_logs_what_it_gives_to_lightnings() -> None:
    class Grouped:
        def log(self, key: str, number: Any, group: str = "train", **kwargs: Any) -> None:
            super().log(f"{group}/{key}", number, **kwargs)  # type: ignore[misc]

    class Prefixed(Grouped, L.LightningModule):  # type: ignore[misc]
        def log(self, *args: Any, **kwargs: Any) -> None:
            kwargs["on_epoch"] = True
            super().log(*args, **kwargs)

    log, module = StepLog({}), Prefixed()
    with log.capture(module):
        module.log("loss", 1.5, "eval")
        module.log("acc", 0.5)
    found = [(entry.name, entry.value, dict(entry.options)) for entry in log.entries]
    assert found == [("eval/loss", 1.5, {"on_epoch": True}), ("train/acc", 0.5, {"on_epoch": True})]


def test_another_modules_log_is_left_alone() -> None:
    class Counts(L.LightningModule):
        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, **kwargs)

    log = StepLog({})
    with log.capture(Counts()), pytest.warns(UserWarning, match="not registered"):
        Counts().log("a", 1.0)
    assert log.entries == []


def test_options_passed_through_kwargs_of_an_overridden_log_are_options() -> None:
    class Passing(L.LightningModule):
        def log(self, name: str, value: Any, **kwargs: Any) -> None:  # type: ignore[override]
            super().log(f"train/{name}", value, **kwargs)

    log, module = StepLog({}), Passing()
    with log.capture(module):
        module.log("loss", 5.0, prog_bar=True, reduce_fx="max", batch_size=10)
    (entry,) = log.entries
    assert (entry.name, entry.value, entry.num_samples) == ("train/loss", 5.0, 10)
    assert dict(entry.options) == {"prog_bar": True, "reduce_fx": "max"}


def test_a_module_that_cannot_log_is_left_alone() -> None:
    module = nn.Linear(1, 1)
    log = StepLog({})
    with log.capture(module):
        assert "log" not in vars(module)
    assert log.entries == []


# ------------------------------------------------------------------ on every rank


class Listening(L.LightningModule):
    """Records what reaches Lightning's ``log``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Tensor, dict[str, Any]]] = []

    def log(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("it has run in the step")


def test_replay_makes_lightnings_calls_again_with_the_batchs_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the module overrides ``log`` with has run in the step, and renames nothing once more."""
    module = Listening()
    monkeypatch.setattr(L.LightningModule, "log", lambda self, *args, **kwargs: self.calls.append((*args, kwargs)))
    entries = [
        LogEntry(name="a", value=1.5, options=(("prog_bar", True), ("on_epoch", True)), num_samples=9),
        LogEntry(name="b", value=2.0, options=(), num_samples=4),
    ]
    replay(module, entries, {}, torch.device("cpu"))
    assert [(name, options) for name, _, options in module.calls] == [
        ("a", {"prog_bar": True, "on_epoch": True, "batch_size": 9}),
        ("b", {"batch_size": 4}),
    ]
    for (_, value, _), expected in zip(module.calls, (1.5, 2.0), strict=True):
        torch.testing.assert_close(value, torch.tensor(expected), rtol=0, atol=0)


def test_a_float64_value_is_logged_again_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module, value = Listening(), 1 / 3
    monkeypatch.setattr(L.LightningModule, "log", lambda self, *args, **kwargs: self.calls.append((*args, kwargs)))
    for is_double in (True, False):
        replay(
            module, [LogEntry(name="a", value=value, options=(), num_samples=1, is_double=is_double)], {}, torch.device("cpu")
        )
    assert [logged.dtype for _, logged, _ in module.calls] == [torch.float64, torch.float32]
    assert float(module.calls[0][1]) == value


class Epoch(L.LightningModule):
    """Logs the mean of each batch, through entries or as it stands."""

    def __init__(self, options: dict[str, Any], *, as_double: bool, through_entries: bool) -> None:
        super().__init__()
        self.options, self.as_double, self.through_entries = options, as_double, through_entries

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        value = batch.double().mean() / 3 if self.as_double else batch.mean() / 3
        if not self.through_entries:
            self.log("mean", value, **self.options)
            return
        log = StepLog({})
        with log.capture(self):
            self.log("mean", value, **self.options)
        replay(self, log.entries, {}, torch.device("cpu"))

    def configure_optimizers(self) -> None:
        return None


def metrics_of_lightning(module: L.LightningModule) -> dict[str, Tensor]:
    """What a run over batches of three and two samples gives to callbacks."""
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0]), batch_size=3))
    return dict(trainer.callback_metrics)


@pytest.mark.parametrize("as_double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"on_step": True, "on_epoch": True},
        {"on_epoch": True, "on_step": False, "reduce_fx": "sum"},
        {"on_epoch": True, "reduce_fx": min},
        {"on_epoch": True, "reduce_fx": torch.max},
        {"on_epoch": True, "batch_size": 7},
        {"on_epoch": True, "sync_dist": True},
    ],
    ids=["plain", "step and epoch", "sum", "min", "max of torch", "batch size", "sync_dist"],
)
def test_replayed_entries_reach_lightnings_own_metrics(options: dict[str, Any], as_double: bool) -> None:
    """Two batches of different sizes: Lightning must weigh and reduce them as it does on one device."""
    found = metrics_of_lightning(Epoch(options, as_double=as_double, through_entries=True))
    expected = metrics_of_lightning(Epoch(options, as_double=as_double, through_entries=False))
    assert found.keys() == expected.keys() != set()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_a_reduce_fx_of_the_users_is_refused_as_on_one_device() -> None:
    errors = []
    for through_entries in (False, True):
        module = Epoch({"reduce_fx": torch.prod}, as_double=False, through_entries=through_entries)
        with pytest.raises(MisconfigurationException, match="min,max,mean,sum") as caught:
            metrics_of_lightning(module)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_without_a_process_group_the_channel_returns_what_it_got() -> None:
    entries = [LogEntry(name="a", value=1.0, options=(), num_samples=2)]
    shared_loss, shared_entries, *_ = ResultChannel(Commands(None, source=0)).share(0.5, entries)
    assert (shared_loss, shared_entries) == (0.5, entries)
