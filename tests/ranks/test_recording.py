"""A recorded run trains as any other, and what is recorded is what its schedule says."""

from __future__ import annotations

import csv
import json
import re
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

import lightning_fxpipe.strategy.plan_report
from lightning_fxpipe import FxPipeStrategy, Recording, UnsupportedError, read_recording
from lightning_fxpipe.distributed.topology import make_topology
from lightning_fxpipe.recording import alignment
from lightning_fxpipe.recording.expected import table_of
from lightning_fxpipe.reporting.table import human_bytes
from lightning_fxpipe.simulation import by_name
from lightning_fxpipe.simulation.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action, ActionTable
from lightning_fxpipe.simulation.costs import StageCosts
from lightning_fxpipe.simulation.timeline import Span, Timeline
from tests.lit import LitModel, fit_and_record, make_loader, make_trainer, snapshot
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]
COST = StageCosts(forward_seconds=1.0, input_backward_seconds=1.0, weight_backward_seconds=1.0)
NUM_MICROBATCHES = 4
# Stages on each of two ranks.
SCHEDULES = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "interleaved_1f1b": 2}


def fit_twice(schedule: Any, folder: str) -> list[dict[str, Any]]:
    """Runs on every rank: two epochs of five steps, the last of a smaller batch, and validation between them."""
    return [
        fit_and_record(
            "gpt",
            strategy=FxPipeStrategy(
                num_microbatches=NUM_MICROBATCHES, schedule=schedule, stages_per_rank=SCHEDULES[schedule], record=record
            ),
            devices=2,
        )
        for record in (None, folder)
    ]


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Any], list[Timeline]]]:
    """By schedule what ranks have trained, without and with a recording, and its timelines."""
    found = {}
    for schedule in SCHEDULES:
        folder = tmp_path_factory.mktemp(schedule)
        found[schedule] = ranks(2).run(fit_twice, schedule, str(folder)), read_recording(folder)
    return found


def actions_of(spans: tuple[Span, ...]) -> list[Span]:
    return [span for span in spans if isinstance(span.work, Action)]


def record_replicas(folder: str) -> dict[str, Any]:
    """Runs on every rank: two replicas of two stages; what is said of them, and what they are."""
    told: list[str] = []
    original = lightning_fxpipe.strategy.plan_report.inform
    lightning_fxpipe.strategy.plan_report.inform = told.append
    strategy = FxPipeStrategy(num_stages=2, num_microbatches=2, schedule="1f1b", record=Recording(folder, 1, 2))
    look = Gradients()
    trainer = make_trainer(max_epochs=1, strategy=strategy, devices=4, callbacks=[look])
    try:
        trainer.fit(LitModel("gpt"), make_loader("gpt"))
    finally:
        lightning_fxpipe.strategy.plan_report.inform = original
    topology = strategy.topology
    return {
        "told": told,
        "rank": dist.get_rank(),
        "replica": topology.replicas.index,
        "stages": topology.stages,
        "gradients": look.num_bytes,
    }


class Gradients(L.Callback):
    """Counts the bytes of this rank's gradients."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.num_bytes = sum(p.grad.nbytes for p in pl_module.parameters() if p.grad is not None and not p.is_meta)


def test_replicas_are_in_the_report_and_on_the_page(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(4).run(record_replicas, str(tmp_path))
    (text,) = [told for told in results[0]["told"] if "replicas of this pipeline" in told]
    for stage in range(2):
        mine = [result for result in results if result["stages"] == (stage,)]
        assert [result["replica"] for result in mine] == [0, 1]
        (row,) = [line for line in text.splitlines() if line.split()[:1] == [str(stage)]]
        names = ", ".join(str(result["rank"]) for result in mine)
        assert row.split() == [str(stage), *names.split(), *human_bytes(mine[0]["gradients"]).split()]
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', (tmp_path / "index.html").read_text())
    data = json.loads(found)
    assert data["replicas"]["stages"] == [[0], [1]]
    for replica, of_replica in enumerate(data["replicas"]["ranks"]):
        of_stages = {result["stages"]: result["rank"] for result in results if result["replica"] == replica}
        assert of_replica == [of_stages[0,], of_stages[1,]]
    assert data["replicas"]["machines"] == []
    *steps, simulated = read_recording(tmp_path)
    for step in steps:
        for spans in step.ranks:
            (average,) = [span for span in spans if span.work == "gradient average"]
            assert average.start_seconds >= max(span.end_seconds for span in actions_of(spans))
            optimizer = [span for span in spans if span.work == "optimizer step"][-1]
            assert average.end_seconds <= optimizer.start_seconds
    assert all(isinstance(span.work, Action) for spans in simulated.ranks for span in spans)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_recorded_run_has_the_same_parameters_bit_by_bit(runs: Any, schedule: str) -> None:
    for without, with_record in runs[schedule][0]:
        assert without["losses"] == with_record["losses"]
        torch.testing.assert_close(with_record["state"], without["state"], rtol=0, atol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_chosen_steps_are_there_and_one_simulated(runs: Any, schedule: str) -> None:
    timelines = runs[schedule][1]
    assert [t.label for t in timelines] == [*(f"step {n}, measured" for n in range(3, 8)), "simulated"]
    assert all(len(t.ranks) == 2 and t.seconds > 0 for t in timelines)
    assert table_of(timelines[-1]) == table_of(timelines[-2])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_rank_does_each_action_of_the_table_once_in_its_order(runs: Any, schedule: Any) -> None:
    costs = [COST] * 2 * SCHEDULES[schedule]
    expected = by_name.table_of(schedule, costs, NUM_MICROBATCHES, SCHEDULES[schedule])
    steps = runs[schedule][1][:-1]
    assert [table_of(step) == expected for step in steps] == [True, False, True, True, True]
    # Step 4 has 7 samples, which are cut into microbatches of 3, 3 and 1; the last one goes by itself, and has the last number.
    odd = by_name.table_of(schedule, costs, 3, SCHEDULES[schedule])
    assert [{*map(str, done)} for done in (table_of(steps[1]) or odd).ranks] == [{*map(str, done)} for done in odd.ranks]
    for spans in steps[1].ranks:
        assert len(actions_of(spans)) == len({span.work for span in actions_of(spans)})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_does_one_thing_at_a_time(runs: Any, schedule: str) -> None:
    for spans in (spans for timeline in runs[schedule][1] for spans in timeline.ranks):
        assert all(span.start_seconds <= span.end_seconds for span in spans)
        assert all(before.end_seconds <= span.start_seconds for before, span in pairwise(spans))


def needed_by(action: Action, table: ActionTable) -> Action | None:
    """What an action waits for, that another stage does."""
    if action.kind is FORWARD:
        return Action(action.stage - 1, FORWARD, action.microbatch) if action.stage else None
    if action.kind is WEIGHT_BACKWARD or action.stage == table.num_stages - 1:
        return None
    whole = Action(action.stage + 1, BACKWARD, action.microbatch)
    return whole if whole in table.actions else Action(action.stage + 1, INPUT_BACKWARD, action.microbatch)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_action_begins_when_what_it_needs_is_there(runs: Any, schedule: str) -> None:
    for timeline in runs[schedule][1]:
        table = table_of(timeline)
        assert table is not None
        by_action = {span.work: span for spans in timeline.ranks for span in actions_of(spans)}
        for action, span in by_action.items():
            needed = needed_by(action, table)
            assert needed is None or by_action[needed].end_seconds <= span.start_seconds


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rest_of_the_step_is_there_on_every_rank(runs: Any, schedule: str) -> None:
    for timeline in runs[schedule][1][:-1]:
        for spans in timeline.ranks:
            words = {span.work for span in spans if isinstance(span.work, str)}
            assert words == {"training_step", "backward", "optimizer step"}


def fit_accumulated(folder: str) -> None:
    """Runs on every rank."""
    L.seed_everything(3, verbose=False)
    strategy = FxPipeStrategy(num_microbatches=2, schedule="1f1b", record=Recording(folder, first_step=2, num_steps=2))
    trainer = make_trainer(
        max_epochs=2, accumulate_grad_batches=2, log_every_n_steps=4, logger=CSVLogger(folder), strategy=strategy, devices=2
    )
    trainer.fit(LitModel("mlp"), make_loader("mlp"))


def test_the_bubble_and_the_peak_are_logged_by_rank_0_where_the_optimizer_steps(ranks: Ranks, tmp_path: Path) -> None:
    """Of five batches with an optimizer step after the second, fourth and last one, number 3 is recorded; of the six steps of
    two epochs every fourth is logged."""
    ranks(2).run(fit_accumulated, str(tmp_path))
    (path,) = tmp_path.rglob("metrics.csv")
    found = [row for row in csv.DictReader(path.read_text().splitlines()) if row["fxpipe/peak_bytes"]]
    assert [row["step"] for row in found] == ["1", "3"]
    for row in found:
        assert 2**26 < float(row["fxpipe/peak_bytes"]) < 2**40
        assert 0 < float(row["fxpipe/bubble_fraction"]) < 1
    first, second, simulated = read_recording(tmp_path)
    assert not any(span.work == "optimizer step" for span in first.ranks[0])
    assert all(any(span.work == "optimizer step" for span in spans) for spans in second.ranks)
    assert table_of(first) == table_of(second) == table_of(simulated) is not None


class Failing(LitModel):
    """Fails in the middle of an epoch, on every rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 4:
            raise ValueError("enough")
        return super().training_step(batch, batch_idx)


def fit_until_failure(folder: str) -> str:
    """Runs on every rank."""
    strategy = FxPipeStrategy(num_microbatches=2, schedule="gpipe", record=Recording(folder, first_step=2))
    try:
        make_trainer(max_epochs=1, strategy=strategy, devices=2).fit(Failing("mlp"), make_loader("mlp"))
    except ValueError as error:
        return str(error)
    return ""


def test_a_run_that_fails_leaves_the_steps_before(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(fit_until_failure, str(tmp_path)) == ["enough", "enough"]
    assert [t.label for t in read_recording(tmp_path)] == ["step 2, measured", "step 3, measured", "simulated"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "timelines.json", "trace.json"]


def fit_into_a_file(folder: str) -> tuple[str, int]:
    """Runs on every rank."""
    trainer = make_trainer(max_epochs=1, strategy=FxPipeStrategy(record=folder), devices=2)
    try:
        trainer.fit(LitModel("mlp"), make_loader("mlp"))
    except UnsupportedError as error:
        return str(error), trainer.global_step
    return "", trainer.global_step


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for text, steps in ranks(2).run(fit_into_a_file, str(tmp_path / "file" / "folder")):
        assert "Cannot write the recording of the run." in text
        assert str(tmp_path / "file") in text
        assert steps == 0


class ByHand(LitModel):
    """Calls the model twice in a step, the second time with what it gave."""

    def __init__(self) -> None:
        super().__init__("mlp")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self._loss(batch))
            optimizer.step()


def fit_by_hand(folder: str | None) -> dict[str, Tensor]:
    """Runs on every rank."""
    L.seed_everything(3, verbose=False)
    module = ByHand()
    record = None if folder is None else Recording(folder, first_step=1, num_steps=2)
    strategy = FxPipeStrategy(num_microbatches=2, record=record)
    make_trainer(max_epochs=1, strategy=strategy, devices=2).fit(module, make_loader("mlp"))
    return snapshot(module)


def test_of_a_step_with_several_calls_each_shows_its_actions_and_none_is_simulated(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2).run(fit_by_hand, str(tmp_path))
    torch.testing.assert_close(found, ranks(2).run(fit_by_hand, None), rtol=0, atol=0)
    timelines = read_recording(tmp_path)
    assert [t.label for t in timelines] == ["step 1, measured", "step 2, measured"]
    for rank, spans in enumerate(timelines[0].ranks):
        done = [str(span.work) for span in actions_of(spans)]
        assert done == [f"{rank}{kind}{index}" for _ in range(2) for kind in "FB" for index in range(2)]
        assert {"training_step", "backward", "optimizer step"} <= {span.work for span in spans if isinstance(span.work, str)}


def offsets_with(ahead_seconds: float) -> list[Any]:
    """Runs on every rank: the clock of rank 1 is ahead."""
    topology = make_topology(torch.device("cpu"))
    original = alignment.time.perf_counter
    ahead = 0.0 if topology.is_last else ahead_seconds
    alignment.time.perf_counter = lambda: original() + ahead
    try:
        return [alignment.clock_offsets(topology) for _ in range(2)][-1]
    finally:
        alignment.time.perf_counter = original


@pytest.mark.parametrize("ahead_seconds", [0.0, 50.0, -7.0])
def test_a_clock_that_is_ahead_is_found_within_the_error(ranks: Ranks, ahead_seconds: float) -> None:
    """Pipeline rank 0 is the one that has not the last stage."""
    (first, last), others = ranks(2).run(offsets_with, ahead_seconds)
    assert others == []
    assert (last.seconds, last.error_seconds) == (0.0, 0.0)
    assert 0 < first.error_seconds < 1
    assert abs(first.seconds - ahead_seconds) <= first.error_seconds
    assert ahead_seconds or first.seconds == 0.0


def test_one_device_is_recorded_too(tmp_path: Path) -> None:
    strategy = FxPipeStrategy(num_stages=2, num_microbatches=2, schedule="1f1b", record=Recording(tmp_path, first_step=3))
    found = fit_and_record("mlp", strategy=strategy, devices=1)
    again = fit_and_record("mlp", strategy=FxPipeStrategy(num_stages=2, num_microbatches=2, schedule="1f1b"), devices=1)
    torch.testing.assert_close(found["state"], again["state"], rtol=0, atol=0)
    timelines = read_recording(tmp_path)
    assert [len(timeline.ranks) for timeline in timelines] == [1] * 6
    table = table_of(timelines[0])
    assert table is not None
    assert (table.num_stages, table.num_microbatches) == (2, 2)
    assert json.loads((tmp_path / "timelines.json").read_text())["clock_error_seconds"] == 0.0


def test_a_look_at_a_batch_is_no_part_of_the_schedule(tmp_path: Path) -> None:
    """The first batch goes forward once more before it trains."""
    record = Recording(tmp_path, first_step=0, num_steps=1)
    strategy = FxPipeStrategy(num_stages=2, num_microbatches=2, schedule="1f1b", record=record)
    fit_and_record("mlp", strategy=strategy, devices=1)
    first, simulated = read_recording(tmp_path)
    assert [span.work for span in first.ranks[0]].count("check a batch") == 1
    assert table_of(first) == table_of(simulated) is not None


def test_a_run_without_the_chosen_steps_says_so(tmp_path: Path) -> None:
    strategy = FxPipeStrategy(num_microbatches=2, record=Recording(tmp_path, first_step=100))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fit_and_record("mlp", strategy=strategy, devices=1)
    assert ["the run had 10 steps" in str(w.message) for w in warned if "Nothing was recorded" in str(w.message)] == [True]
    assert list(tmp_path.iterdir()) == []
