"""The public surface, frozen: names, parameters and defaults that a user's program or config may rely on."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from torch import nn

import lightning_fxpipe
from lightning_fxpipe import (
    BatchError,
    FxPipeError,
    FxPipeStrategy,
    PartitionError,
    PeerError,
    ScheduleError,
    TraceError,
    UnsupportedError,
    make_plan,
    pictures,
    simulation,
)
from lightning_fxpipe.schedules.by_name import SCHEDULES, ScheduleName

ROOT = Path(__file__).resolve().parent.parent
EMPTY = inspect.Parameter.empty


def parameters_of(function: Any) -> list[tuple[str, Any]]:
    return [(name, parameter.default) for name, parameter in inspect.signature(function).parameters.items()]


def test_the_public_names_are_these() -> None:
    assert lightning_fxpipe.__all__ == [
        "BatchError",
        "BoundaryTensor",
        "FxPipeError",
        "FxPipeStrategy",
        "Layout",
        "LayoutComparison",
        "PartitionError",
        "PartitionPlan",
        "PeerError",
        "Recording",
        "ScheduleError",
        "SimulatedPlan",
        "StageSpec",
        "TraceError",
        "UnsupportedError",
        "compare_layouts",
        "make_plan",
        "read_recording",
        "simulate_plan",
    ]
    assert [name for name in lightning_fxpipe.__all__ if not hasattr(lightning_fxpipe, name)] == []
    assert sorted(lightning_fxpipe.__all__) == lightning_fxpipe.__all__


def test_the_public_names_of_rooms_are_these() -> None:
    assert simulation.__all__ == [
        "DEVICES",
        "ActionTable",
        "Device",
        "Link",
        "Overhead",
        "Simulation",
        "Span",
        "StageCosts",
        "Timeline",
        "simulate",
    ]
    assert pictures.__all__ == [
        "Page",
        "page_of_layouts",
        "page_of_simulated_plan",
        "page_of_timelines",
        "save_figure",
        "write_page",
        "write_trace",
    ]
    for room in (simulation, pictures):
        assert [name for name in room.__all__ if not hasattr(room, name)] == []


def test_names_are_imported_at_their_first_use_from_where_type_checkers_find_them() -> None:
    tree = ast.parse(Path(lightning_fxpipe.__file__).read_text(encoding="utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    assert {node.names[0].name: str(node.module).partition(".")[2] for node in imports} == lightning_fxpipe._MODULES
    assert {*dir(lightning_fxpipe)} >= {*lightning_fxpipe.__all__}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lightning_fxpipe.nothing


@pytest.mark.parametrize(
    "imports",
    ["lightning_fxpipe, lightning.pytorch", "lightning.pytorch, lightning_fxpipe", "lightning_fxpipe, pytorch_lightning"],
)
def test_a_trainer_finds_the_strategy_in_any_order_of_imports(imports: str) -> None:
    root = "pytorch_lightning" if "pytorch_lightning" in imports else "lightning.pytorch"
    program = (
        f"import sys, {imports}\n"
        f"trainer = sys.modules[{root!r}].Trainer(strategy='fxpipe', accelerator='cpu', devices=2, logger=False)\n"
        "print(type(trainer.strategy).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "FxPipeStrategy", done.stderr


def test_the_version_is_that_of_the_installed_package() -> None:
    assert lightning_fxpipe.__version__ == version("lightning-fxpipe")


def test_every_error_is_an_fxpipe_error() -> None:
    for kind in (BatchError, PartitionError, PeerError, ScheduleError, TraceError, UnsupportedError):
        assert issubclass(kind, FxPipeError)


def test_the_strategys_parameters_are_these() -> None:
    assert parameters_of(FxPipeStrategy) == [
        ("num_stages", "auto"),
        ("stages_per_rank", "auto"),
        ("balance", "parameters"),
        ("split_points", None),
        ("stage_of", None),
        ("device_speeds", None),
        ("plan", None),
        ("schedule", "auto"),
        ("num_microbatches", "auto"),
        ("batch_dim", 0),
        ("loss_reduction", "auto"),
        ("loss_weight", None),
        ("activation_checkpointing", False),
        ("device_memory_gib", None),
        ("compile", False),
        ("shard_optimizer_state", False),
        ("process_group_backend", None),
        ("start_method", "auto"),
        ("gather_after_run", "auto"),
        ("timeout", 1800.0),
        ("heartbeat_timeout", 120.0),
        ("save_distributed_checkpoint", "auto"),
        ("async_save", False),
        ("record", None),
    ]


@pytest.mark.parametrize("module", ["lightning_fxpipe", "lightning_fxpipe.pl"])
def test_a_wrong_option_gets_the_nearest_one(module: str) -> None:
    strategy = importlib.import_module(module).FxPipeStrategy
    expected = r"^FxPipeStrategy\(\) got an unexpected keyword argument 'num_micro_batches'; did you mean 'num_microbatches'\?$"
    with pytest.raises(TypeError, match=expected):
        strategy(num_micro_batches=4)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'colour'$"):
        strategy(num_microbatches=4, colour="red")


def test_make_plans_parameters_are_these() -> None:
    assert parameters_of(make_plan) == [
        ("module", EMPTY),
        ("example_batch", EMPTY),
        ("num_stages", None),
        ("num_microbatches", 1),
        ("batch_dim", 0),
        ("balance", "parameters"),
        ("split_points", ()),
        ("stage_of", {}),
        ("activation_checkpointing", False),
        ("schedule", "gpipe"),
        ("num_devices", None),
        ("device_speeds", ()),
        ("device_memory_gib", ()),
    ]


def test_the_strategys_parameters_are_documented_and_typed() -> None:
    """LightningCLI shows both; a parameter without them is a blank line in its help."""
    hints = get_type_hints(FxPipeStrategy.__init__)
    for name, _ in parameters_of(FxPipeStrategy):
        assert f"\n        {name}: " in (FxPipeStrategy.__doc__ or "")
        assert name in hints


def test_every_schedule_that_the_type_names_is_taken() -> None:
    assert [*get_args(ScheduleName)] == [*SCHEDULES]
    for schedule in get_args(ScheduleName):
        FxPipeStrategy(schedule=schedule)


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", "all"])
@pytest.mark.parametrize("name", ["num_stages", "stages_per_rank", "num_microbatches"])
def test_a_number_that_is_none_is_a_value_error(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"FxPipeStrategy\({name}={value!r}\): expected a positive number or 'auto'"):
        FxPipeStrategy(**{name: value})


@pytest.mark.parametrize("value", ["time", 3])
def test_an_unknown_balance_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError, match=r"balance=.*: expected one of 'parameters', 'flops', 'memory', 'seconds', 'auto'"):
        FxPipeStrategy(balance=value)


@pytest.mark.parametrize("value", ["layers.1", [1]])
def test_split_points_that_are_no_paths_are_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError, match="expected a list of module paths"):
        FxPipeStrategy(split_points=value)


@pytest.mark.parametrize("value", [3, [1], {"blocks.*": True}, int, [nn.Linear(1, 1)]])
def test_activation_checkpointing_of_no_modules_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError, match=r"activation_checkpointing=.*: expected False, True, 'auto', a module class"):
        FxPipeStrategy(activation_checkpointing=value)


@pytest.mark.parametrize("value", [True, "auto", "blocks.*", nn.Linear, ["blocks.*", nn.Linear], {nn.Linear}, ()])
def test_activation_checkpointing_accepts_classes_and_patterns(value: Any) -> None:
    FxPipeStrategy(activation_checkpointing=value)


@pytest.mark.parametrize("name", ["timeout", "heartbeat_timeout"])
def test_a_time_is_seconds_or_a_timedelta(name: str) -> None:
    kept = {"timeout": "_timeout", "heartbeat_timeout": "_heartbeat"}[name]
    for value in (90, 90.0, timedelta(seconds=90)):
        assert getattr(FxPipeStrategy(**{name: value}), kept) == timedelta(seconds=90)  # type: ignore[arg-type]
    for wrong in (0, -1.0, timedelta(), "90", True):
        with pytest.raises(ValueError, match=rf"FxPipeStrategy\({name}=.*: expected a positive number of seconds"):
            FxPipeStrategy(**{name: wrong})  # type: ignore[arg-type]
    assert FxPipeStrategy(heartbeat_timeout=None)._heartbeat is None


@pytest.mark.parametrize("value", ["shard", 1])
def test_sharding_the_optimizer_state_is_a_bool(value: Any) -> None:
    with pytest.raises(ValueError, match=r"shard_optimizer_state=.*: expected True or False"):
        FxPipeStrategy(shard_optimizer_state=value)


def test_the_newest_torch_that_is_tested_is_the_newest_that_is_allowed() -> None:
    """.ci/versions.py installs it from a file of its own, and nothing older in its place."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'"torch>=[\d.]+,<2\.(\d+)"', pyproject)
    assert found is not None
    newest = (ROOT / ".ci/newest.txt").read_text(encoding="utf-8").splitlines()[-1]
    assert newest == f"torch>=2.{int(found[1]) - 1},<2.{found[1]}"


def test_cuts_are_chosen_or_given() -> None:
    with pytest.raises(ValueError, match="omit one of the two"):
        FxPipeStrategy(balance="auto", split_points=["layers.1"])
    with pytest.raises(ValueError, match="omit stage_of, device_speeds and device_memory_gib"):
        FxPipeStrategy(stage_of={"head": 1}, split_points=["layers.1"])


@pytest.mark.parametrize(
    "options",
    [
        {"balance": "flops"},
        {"split_points": ["layers.1"]},
        {"activation_checkpointing": True},
        {"stage_of": {"0": 0}},
        {"device_speeds": [1, 2]},
        {"device_memory_gib": "auto"},
    ],
)
def test_a_plan_goes_with_no_other_cuts(options: dict[str, Any]) -> None:
    plan = make_plan(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(2, 2), num_stages=2)
    with pytest.raises(ValueError, match="the plan determines the cuts"):
        FxPipeStrategy(plan=plan, **options)


@pytest.mark.parametrize(("value", "nearest"), [("1F1", "'1f1b'"), ("ZBVZeroBubbles", "'zbv_zero_bubble'"), ("fastest", "")])
def test_an_unknown_schedule_is_a_value_error(value: Any, nearest: str) -> None:
    did_you_mean = rf"; did you mean {nearest}\?$" if nearest else r"\(CSV\)$"
    with pytest.raises(ValueError, match=rf"expected one of 'auto', 'gpipe', '1f1b', .*{did_you_mean}"):
        FxPipeStrategy(schedule=value)


TORCHS_NAMES = {
    **{"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved_1f1b", "LoopedBFS": "looped_bfs"},
    **{"InterleavedZeroBubble": "interleaved_zero_bubble", "ZBVZeroBubble": "zbv_zero_bubble", "DualPipeV": "dualpipev"},
}


@pytest.mark.parametrize(("value", "name"), [*TORCHS_NAMES.items(), ("dual-pipe_v", "dualpipev"), ("AUTO", "auto")])
def test_a_schedule_may_be_spelled_as_torch_does(value: str, name: str) -> None:
    assert FxPipeStrategy(schedule=value)._schedule.name == name


def test_a_plan_that_cannot_be_read_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(PartitionError, match=r"absent\.json"):
        FxPipeStrategy(plan=tmp_path / "absent.json")


def test_a_plan_is_taken_as_a_path_or_an_object(tmp_path: Path) -> None:
    plan = make_plan(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.ones(2, 3), num_stages=2)
    plan.save(tmp_path / "plan.json")
    for given in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        assert FxPipeStrategy(plan=given)._plans.options.given == plan


def test_the_strategy_is_registered_by_name() -> None:
    assert "fxpipe" in StrategyRegistry.available_strategies()
    strategy = StrategyRegistry.get("fxpipe")
    assert type(strategy) is FxPipeStrategy
    assert issubclass(FxPipeStrategy, Strategy)
    assert FxPipeStrategy.strategy_name == "fxpipe"


def test_a_trainer_finds_the_strategy_by_name_and_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", started)
    trainer = Trainer(strategy="fxpipe", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    assert type(trainer.strategy) is FxPipeStrategy
    assert (trainer.world_size, trainer.num_devices, trainer.num_nodes) == (1, 1, 1)  # one replica
    assert trainer.strategy.num_processes == 2
    assert trainer.strategy.root_device == torch.device("cpu")
    assert not torch.distributed.is_initialized()


def test_a_trainer_takes_a_strategy_object() -> None:
    strategy = FxPipeStrategy(num_stages=2, num_microbatches=4, schedule="gpipe")
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    assert trainer.strategy is strategy


@pytest.mark.parametrize("name", ["plan", "topology"])
def test_what_setup_makes_is_not_there_before(name: str) -> None:
    with pytest.raises(RuntimeError, match="not set up yet|not available before"):
        getattr(FxPipeStrategy(), name)
