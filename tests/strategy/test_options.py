"""The strategy's options on LightningCLI's command line: what is accepted, explained, and refused before anything runs."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_fxpipe import FxPipeStrategy, make_plan
from lightning_fxpipe.schedules.own_table import schedule_of_table
from lightning_fxpipe.simulation import ActionTable
from tests.models import make_model, make_samples
from tests.owntables import ODD

TRAINER = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]
CLASS = "--trainer.strategy=FxPipeStrategy"


def count(batch: Any) -> int:
    """What a user's config names as loss_weight."""
    return len(batch)


def run(*arguments: str) -> tuple[Any, str]:
    """The strategy that the arguments give, or None; and what is printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            cli = LightningCLI(BoringModel, run=False, save_config_callback=None, args=[*TRAINER, *arguments])
        except SystemExit:
            return None, printed.getvalue()
    return cli.trainer.strategy, printed.getvalue()


def test_the_strategy_has_a_name_and_a_short_class_name() -> None:
    for name in ("fxpipe", "FxPipeStrategy", "lightning_fxpipe.FxPipeStrategy"):
        strategy, printed = run(f"--trainer.strategy={name}")
        assert isinstance(strategy, FxPipeStrategy), printed


def test_options_of_a_config_are_overridden(tmp_path: Path) -> None:
    plan = make_plan(make_model("mlp"), make_samples("mlp", 4)[0], num_stages=2)
    plan.save(tmp_path / "plan.json")
    options = {"num_microbatches": 8, "plan": str(tmp_path / "plan.json"), "loss_weight": f"{__name__}.count"}
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"trainer": {"strategy": {"class_path": "FxPipeStrategy", "init_args": options}}}))
    for written in ("--trainer.strategy.num_microbatches=2", "--trainer.strategy.init_args.num_microbatches=2"):
        strategy, printed = run("--config", str(config), written, "--trainer.strategy.timeout=5")
        assert isinstance(strategy, FxPipeStrategy), printed
        assert (strategy._num_microbatches, strategy._plans.options.given, strategy._loss.weight) == (2, plan, count)
        assert strategy._timeout.total_seconds() == 5
    _, printed = run("--config", str(config), "--print_config")
    assert "num_microbatches: 8" in printed
    assert f"loss_weight: {__name__}.count" in printed


@pytest.mark.parametrize("name", [*inspect.signature(FxPipeStrategy).parameters])
def test_null_in_a_config_is_the_default(name: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"trainer": {"strategy": {"class_path": "FxPipeStrategy", "init_args": {name: None}}}}))
    strategy, printed = run("--config", str(config))
    assert isinstance(strategy, FxPipeStrategy), printed
    default = vars(FxPipeStrategy(**({name: None} if name == "heartbeat_timeout" else {})))
    plain = ("_num_microbatches", "_loss", "_backend", "_timeout", "_heartbeat", "_start_method", "_gather_after_run")
    assert [vars(strategy)[attribute] for attribute in plain] == [default[attribute] for attribute in plain]
    assert strategy._plans.options == default["_plans"].options
    assert (strategy._heartbeat is None) == (name == "heartbeat_timeout")


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--trainer.strategy.record=folder"], range(3, 8)),
        (["--trainer.strategy.record.folder=folder", "--trainer.strategy.record.first_step=5"], range(5, 10)),
    ],
)
def test_a_recording_is_a_folder_or_says_more(options: list[str], steps: range) -> None:
    strategy, printed = run(CLASS, *options)
    assert isinstance(strategy, FxPipeStrategy), printed
    recording = strategy._recording._options
    assert recording is not None
    assert (str(recording.folder), recording.steps) == ("folder", steps)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        *(("true", True), ("false", False), ("auto", "auto"), ("model.layers.*", "model.layers.*")),
        *(("torch.nn.Linear", nn.Linear), ("[torch.nn.Linear,'head.*']", [nn.Linear, "head.*"])),
    ],
)
def test_activation_checkpointing_names_classes_by_their_import_paths(value: str, read: object) -> None:
    strategy, printed = run(CLASS, f"--trainer.strategy.activation_checkpointing={value}")
    assert isinstance(strategy, FxPipeStrategy), printed
    assert strategy._plans.options.activation_checkpointing == read


def test_times_are_seconds_or_hours_minutes_and_seconds() -> None:
    strategy, printed = run(CLASS, "--trainer.strategy.timeout=0:30:00", "--trainer.strategy.heartbeat_timeout=null")
    assert isinstance(strategy, FxPipeStrategy), printed
    assert (strategy._timeout.total_seconds(), strategy._heartbeat) == (1800, None)


WRONG = [
    ("device_speeds", "[1,0]", "v>0"),
    ("device_memory_gib", "[1,-1]", "v>0"),
    ("stage_of", "{'0': 'first'}", "stage_of"),
    ("num_stages", "-1", "v>0"),
    ("num_stages", "two", "two"),
    ("num_microbatches", "0", "v>0"),
    ("schedule", "foo", "'gpipe', '1f1b'"),
    ("schedule", "absent.csv", "No such file"),
    ("schedule", "tests", "or the path of a schedule table (CSV)"),
    ("schedule", "2F1B", "did you mean '1f1b'?"),
    ("plan", "absent.json", "No such file"),
    ("loss_reduction", "median", "'sum'"),
    ("loss_weight", f"{__name__}.absent", "has no absent"),
    ("timeout", "-3", "v>0"),
    ("heartbeat_timeout", "0", "v>0"),
    ("start_method", "thread", "'spawn'"),
    ("shard_optimizer_state", "fsdp", "fsdp"),
    ("gather_after_run", "perhaps", "perhaps"),
    ("number_of_stages", "2", "not accepted"),
]


def test_a_schedule_may_be_spelled_as_torch_does() -> None:
    strategy, printed = run(CLASS, "--trainer.strategy.schedule=ZBVZeroBubble")
    assert isinstance(strategy, FxPipeStrategy), printed
    assert strategy._schedule.name == "zbv_zero_bubble"


@pytest.mark.parametrize(("option", "value", "told"), WRONG)
def test_a_wrong_value_is_an_error_of_the_parser(option: str, value: str, told: str) -> None:
    strategy, printed = run(CLASS, f"--trainer.strategy.{option}={value}")
    assert strategy is None
    assert told in printed
    assert "error:" in printed
    assert "Traceback" not in printed


def test_a_file_that_is_no_plan_is_an_error_of_the_parser(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    strategy, printed = run(CLASS, f"--trainer.strategy.plan={tmp_path / 'plan.json'}")
    assert strategy is None
    assert "schema_version" in printed


def test_a_schedule_may_be_a_table_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(ODD)
    strategy, printed = run(CLASS, f"--trainer.strategy.schedule={path}")
    assert isinstance(strategy, FxPipeStrategy), printed
    assert strategy._schedule.table == schedule_of_table(ActionTable.from_csv(ODD), "").table
    assert (strategy._schedule.name, strategy._num_microbatches) == (str(path), 4)
    config = tmp_path / "config.yaml"
    section = {"class_path": "FxPipeStrategy", "init_args": {"schedule": str(path)}}
    config.write_text(json.dumps({"trainer": {"strategy": section}}))
    strategy, printed = run("--config", str(config))
    assert isinstance(strategy, FxPipeStrategy), printed
    assert f"schedule: {path}" in run("--config", str(config), "--print_config")[1]
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    strategy, printed = run("--config", str(config))
    assert strategy is None
    assert "deadlocks: its ranks wait for each other" in printed
    assert "Traceback" not in printed


def test_the_help_explains_every_option() -> None:
    _, printed = run("--trainer.strategy.help", "FxPipeStrategy")
    text = " ".join(printed.split())
    for option in FxPipeStrategy.__init__.__annotations__.keys() - {"return"}:
        assert f"--trainer.strategy.{option} " in text
    assert "help for ActionTable" not in text
    for words in (
        "How long a rank waits",
        "four for each device of a pipeline",
        "Every device holds the same number",
        "default: 1800.0",
        "A custom schedule is",
    ):
        assert words in text
