"""What a step logs per microbatch becomes one value per name for the batch: collected, combined, and logged again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.metrics import LogEntry, ResultChannel, StepLog, replay

Step = Callable[[L.LightningModule, int], None]


def collect(sizes: list[int], step: Step) -> list[LogEntry]:
    """Entries of a batch whose microbatches have these sizes; ``step(module, index)`` logs."""
    log, module = StepLog(), L.LightningModule()
    with log.capture(module):
        for index, size in enumerate(sizes):
            log.begin_microbatch(size)
            step(module, index)
    return log.entries()


def only(sizes: list[int], step: Step) -> LogEntry:
    (entry,) = collect(sizes, step)
    return entry


def of_each(*values: Any, name: str = "a", **options: Any) -> Step:
    """A step that logs the next of ``values`` for each microbatch."""
    return lambda module, index: module.log(name, values[index], **options)


# ------------------------------------------------------------------ combining over microbatches


def test_a_mean_is_weighted_by_the_sizes_of_the_microbatches() -> None:
    entry = only([4, 4, 1], of_each(1.0, 2.0, 6.0))
    assert entry == LogEntry(name="a", value=(4 * 1 + 4 * 2 + 1 * 6) / 9, options=(), num_samples=None)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("mean", 1.75),
        ("avg", 1.75),
        (torch.mean, 1.75),
        ("sum", 5.0),
        (torch.sum, 5.0),
        (sum, 5.0),
        ("min", 1.0),
        (torch.min, 1.0),
        (min, 1.0),
        ("max", 4.0),
        (torch.max, 4.0),
        (max, 4.0),
    ],
    ids=lambda value: getattr(value, "__qualname__", repr(value)),
)
def test_reduce_fx_decides_how_microbatches_are_combined(rule: Any, expected: float) -> None:
    # Only the mean takes the sizes as weights.
    entry = only([3, 1], of_each(1.0, 4.0, reduce_fx=rule))
    assert (entry.value, entry.num_samples) == (expected, None)


@pytest.mark.parametrize("rule", ["median", lambda values: values[0], torch.prod], ids=["median", "lambda", "prod"])
def test_a_reduce_fx_without_a_rule_is_refused(rule: Any) -> None:
    with pytest.raises(UnsupportedError, match="'a'.*reduce_fx") as caught:
        collect([1, 1], of_each(1.0, 2.0, reduce_fx=rule))
    assert "mean, sum, min or max" in str(caught.value)


def test_an_explicit_batch_size_is_the_weight() -> None:
    tokens = [30, 10]
    entry = only([2, 2], lambda module, index: module.log("a", float(index), batch_size=tokens[index]))
    assert entry == LogEntry(name="a", value=10 / 40, options=(), num_samples=40)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 100)), min_size=1, max_size=8))
def test_the_mean_over_any_split_is_the_mean_over_all_samples(parts: list[tuple[float, int]]) -> None:
    values, sizes = zip(*parts, strict=True)
    samples = [value for value, size in parts for _ in range(size)]
    entry = only(list(sizes), of_each(*values))
    assert entry.value == pytest.approx(math.fsum(samples) / len(samples), rel=1e-9, abs=1e-9)
    assert entry.num_samples is None


def test_values_that_float32_cannot_hold_survive() -> None:
    count = 2**24 + 1
    assert only([1, 1], of_each(count, count)).value == count


def test_a_nan_is_logged_as_it_is() -> None:
    """A diverged loss must be seen as one, whichever microbatch it came from."""
    assert math.isnan(only([2, 2], of_each(1.0, math.nan)).value)


# ------------------------------------------------------------------ what is logged


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
    assert only([2, 2], of_each(value, value)).value == float(value)


@pytest.mark.parametrize(
    ("value", "named"),
    [("text", "str"), (None, "NoneType"), ([1.0], "list"), (torch.ones(2), "Tensor"), (MeanMetric(), "MeanMetric")],
    ids=["text", "none", "list", "vector", "torchmetrics"],
)
def test_a_value_that_is_no_number_is_refused_by_name(value: Any, named: str) -> None:
    with pytest.raises(UnsupportedError, match=r"self\.log\('accuracy', \.\.\.\)") as caught:
        collect([1], of_each(value, name="accuracy"))
    assert named in str(caught.value)


def test_a_tensor_may_change_in_place_after_it_was_logged() -> None:
    running = torch.zeros(())

    def step(module: L.LightningModule, index: int) -> None:
        running.add_(1.0)
        module.log("float32", running)
        running.mul_(10.0)

    # 1, then 10 + 1; 10 and 110 if the tensor itself were kept
    assert only([1, 1], step).value == 6.0


def test_a_float64_tensor_may_change_in_place_too() -> None:
    """Converting to float64 makes a copy of every other dtype, by chance; this one needs it said."""
    running = torch.zeros((), dtype=torch.float64)

    def step(module: L.LightningModule, index: int) -> None:
        module.log("a", running)
        running.add_(8.0)

    assert only([1, 1], step).value == 4.0


def test_the_graph_of_a_logged_tensor_is_not_kept() -> None:
    log, module = StepLog(), L.LightningModule()
    weight = nn.Parameter(torch.ones(()))
    with log.capture(module):
        log.begin_microbatch(1)
        module.log("a", weight * 3)
    assert log.entries()[0].value == 3.0
    assert all(not value.requires_grad for series in log._series.values() for value in series.values)


def test_entries_come_in_the_order_of_the_calls() -> None:
    def step(module: L.LightningModule, index: int) -> None:
        module.log("b", 1.0)
        module.log("a", 2.0)

    assert [entry.name for entry in collect([1, 1], step)] == ["b", "a"]


def test_a_name_logged_twice_in_a_step_stays_two_calls() -> None:
    def step(module: L.LightningModule, index: int) -> None:
        module.log("a", float(index))
        module.log("b", 7.0)
        module.log("a", 10.0 + index)

    entries = collect([1, 3], step)
    assert [(entry.name, entry.value) for entry in entries] == [("a", 0.75), ("b", 7.0), ("a", 10.75)]
    assert [entry.num_samples for entry in entries] == [None, None, None]


def test_a_name_logged_for_some_microbatches_only_weighs_only_those() -> None:
    def step(module: L.LightningModule, index: int) -> None:
        if index:
            module.log("sometimes", 5.0 * index)

    assert only([4, 2, 1], step) == LogEntry(name="sometimes", value=20 / 3, options=(), num_samples=None)


def test_log_dict_logs_each_of_its_entries_with_its_options() -> None:
    def step(module: L.LightningModule, index: int) -> None:
        module.log_dict({"a": float(index), "b": torch.tensor(2.0)}, prog_bar=True, on_epoch=True)

    entries = collect([1, 1], step)
    assert [(entry.name, entry.value) for entry in entries] == [("a", 0.5), ("b", 2.0)]
    for entry in entries:
        assert dict(entry.options)["prog_bar"] is True
        assert dict(entry.options)["on_epoch"] is True


def test_positional_arguments_are_options_under_their_names() -> None:
    # log(name, value, prog_bar, logger, on_step, on_epoch)
    entry = only([1], lambda module, index: module.log("a", 1.0, True, False, True))
    assert dict(entry.options) == {"prog_bar": True, "logger": False, "on_step": True}


def test_options_about_ranks_are_dropped_and_all_others_kept() -> None:
    entry = only(
        [1],
        of_each(1.0, sync_dist=True, sync_dist_group=None, enable_graph=False, on_epoch=True, add_dataloader_idx=False),
    )
    assert dict(entry.options) == {"on_epoch": True, "add_dataloader_idx": False}


def test_an_unknown_argument_fails_in_the_users_call() -> None:
    with pytest.raises(TypeError, match="progress"):
        collect([1], of_each(1.0, progress=True))


def test_a_step_that_logs_nothing_has_no_entries() -> None:
    assert collect([2, 2], lambda module, index: None) == []


# ------------------------------------------------------------------ the module's own log


def test_the_modules_log_is_its_own_again_after_the_block() -> None:
    module, original = L.LightningModule(), L.LightningModule.log
    with StepLog().capture(module):
        assert L.LightningModule.log is not original
    assert L.LightningModule.log is original
    assert "log" not in vars(module)


def test_the_modules_log_is_its_own_again_after_an_exception() -> None:
    def fail(module: L.LightningModule) -> None:
        with StepLog().capture(module):
            raise KeyError

    module = L.LightningModule()
    mine = module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        fail(module)
    assert module.log is mine


def test_a_log_overridden_with_other_parameters_runs_and_logs_what_it_gives_to_lightnings() -> None:
    class Grouped:
        def log(self, key: str, number: Any, group: str = "train", **kwargs: Any) -> None:
            super().log(f"{group}/{key}", number, **kwargs)  # type: ignore[misc]

    class Prefixed(Grouped, L.LightningModule):  # type: ignore[misc]
        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, on_epoch=True, **kwargs)

    log, module = StepLog(), Prefixed()
    with log.capture(module):
        log.begin_microbatch(2)
        module.log("loss", 1.5, "eval")
        module.log_dict({"acc": 0.5})
    found = [(entry.name, entry.value, dict(entry.options)) for entry in log.entries()]
    assert found == [("eval/loss", 1.5, {"on_epoch": True}), ("train/acc", 0.5, found[1][2])]


def test_another_modules_log_is_left_alone() -> None:
    class Counts(L.LightningModule):
        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, **kwargs)

    log = StepLog()
    with log.capture(Counts()):
        log.begin_microbatch(1)
        with pytest.warns(UserWarning, match="not registered"):
            Counts().log("a", 1.0)
    assert log.entries() == []


def test_options_passed_through_kwargs_of_an_overridden_log_are_options() -> None:
    class Passing(L.LightningModule):
        def log(self, name: str, value: Any, **kwargs: Any) -> None:  # type: ignore[override]
            super().log(f"train/{name}", value, **kwargs)

    log, module = StepLog(), Passing()
    with log.capture(module):
        for size, value in ((1, 1.0), (3, 5.0)):
            log.begin_microbatch(size)
            module.log("loss", value, prog_bar=True, reduce_fx="max", batch_size=10)
    (entry,) = log.entries()
    assert (entry.name, entry.value, entry.num_samples) == ("train/loss", 5.0, 20)
    assert dict(entry.options) == {"prog_bar": True, "reduce_fx": "max"}


def test_a_module_that_cannot_log_is_left_alone() -> None:
    module = nn.Linear(1, 1)
    log = StepLog()
    with log.capture(module):
        assert "log" not in vars(module)
    assert log.entries() == []


# ------------------------------------------------------------------ on every rank


class Listening(nn.Module):
    """Records the calls of its ``log``."""

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


def test_replayed_entries_reach_lightnings_own_metrics() -> None:
    """Two batches of different sizes: Lightning's epoch mean must weigh them as it does on one device."""

    class Epoch(L.LightningModule):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            log = StepLog()
            with log.capture(self):
                for part in batch.split(2):
                    log.begin_microbatch(len(part))
                    self.log("mean", part.mean(), on_step=True, on_epoch=True)
            replay(self, log.entries(), {}, torch.device("cpu"))

        def configure_optimizers(self) -> None:
            return None

    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Epoch(), torch.utils.data.DataLoader(torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0]), batch_size=3))
    assert float(trainer.callback_metrics["mean_epoch"]) == pytest.approx(4.0)
    assert float(trainer.callback_metrics["mean_step"]) == pytest.approx(7.0)


def test_without_a_process_group_the_channel_returns_what_it_got() -> None:
    entries = [LogEntry(name="a", value=1.0, options=(), num_samples=2)]
    shared_loss, shared_entries, *_ = ResultChannel(None, source=0).share(0.5, entries)
    assert (shared_loss, shared_entries) == (0.5, entries)
