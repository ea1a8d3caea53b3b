"""The command line: it plans what a LightningCLI config describes, and says on stderr what is wrong with one."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_fxpipe import PartitionPlan, make_plan
from lightning_fxpipe.__main__ import main
from lightning_fxpipe.planner.simulated_plan import SCHEDULES
from lightning_fxpipe.simulation.devices import DEVICES

# A module beside the config, as a user has it; its name is no other's.
SOURCE = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self, width: int = 8, depth: int = 4):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).sum()


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Data(L.LightningDataModule):
    def __init__(self, width: int = 8, batch_size: int = 8):
        super().__init__()
        self.width, self.batch_size, self.calls = width, batch_size, []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(stage)

    def train_dataloader(self):
        assert self.calls == ["prepare_data", "fit"], self.calls
        return DataLoader(TensorDataset(torch.randn(64, self.width)), batch_size=self.batch_size)
"""
MODULE = "fxpipe_command_line_example"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the module, which is the current one; imports are as before afterwards."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop(MODULE, None)


def section(name: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": f"{MODULE}.{name}", "init_args": init_args}


def config_of(**changes: Any) -> dict[str, Any]:
    """A complete config, with these sections changed; a section that is None is left out."""
    complete = {"trainer": {"devices": 2}, "model": section("Net"), "data": section("Data")} | changes
    return {key: value for key, value in complete.items() if value is not None}


def write(config: Any, folder: Path, name: str = "config.yaml") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config))
    return str(path)


Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command, which must succeed, and returns what it printed."""

    def call(*arguments: str) -> str:
        assert main(arguments) == 0
        return capsys.readouterr().out

    return call


@pytest.fixture
def fail(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command, which must fail with a message for a person, and returns that."""

    def call(*arguments: str, status: int = 1) -> str:
        assert main(arguments) == status
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        return err

    return call


def plan_by_hand(num_stages: int, batch_size: int = 8, num_microbatches: int = 1) -> PartitionPlan:
    """What the example's plan must be equal to."""
    module = sys.modules[MODULE]
    return make_plan(module.Net(), [torch.randn(batch_size, 8)], num_stages=num_stages, num_microbatches=num_microbatches)


# ------------------------------------------------------------------ what it prints


def test_the_version_names_the_packages_that_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    names = ("lightning-fxpipe", "torch", "lightning")
    assert capsys.readouterr().out.strip() == ", ".join(f"{name} {version(name)}" for name in names)


def test_without_a_command_it_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 0
    assert "doctor    print versions" in capsys.readouterr().out


def test_simulate_prints_the_plan_and_what_a_step_would_take(project: Path, run: Run) -> None:
    out = run("simulate", "--config", write(config_of(), project), "--device", "h100", "--num-microbatches", "2")
    assert out.startswith(str(plan_by_hand(2, num_microbatches=2)))
    lines = [line.split() for line in out.splitlines()]
    assert ["Schedule", "Stages", "Step", "Idle", "Memory", "Rank"] in lines
    assert {line[0] for line in lines if line and line[0] in SCHEDULES} == {*SCHEDULES}
    assert "Simulated step with 2 microbatches on 2 x h100" in out.splitlines()


def test_simulate_takes_a_device_from_a_file(project: Path, run: Run) -> None:
    config = write(config_of(), project)
    device = {"flops_per_second": 1e3, "bytes_per_second": 1e12, "link_latency_seconds": 100, "memory_bytes": 1e9}
    out = run("simulate", "--config", config, "--device", write(device, project, "device.yaml"))
    by_schedule = {line.split()[0]: line.split()[2:4] for line in out.splitlines() if line.split()[:1] == ["gpipe"]}
    # Two stages of two layers of 8 x 8, four microbatches of two samples: half a second a forward, and two messages of 100 s.
    seconds, unit = by_schedule["gpipe"]
    assert unit == "s"
    assert 200 < float(seconds) < 220
    faster = run("simulate", "--config", config, "--device", write({**device, "link_latency_seconds": 0}, project, "fast.yaml"))
    assert faster != out


def test_layouts_prints_stages_and_replicas_and_saves_the_plan_of_the_fastest(project: Path, run: Run) -> None:
    config, path = write(config_of(), project), project / "plan.json"
    device = {"flops_per_second": 1e3, "bytes_per_second": 1e12, "memory_bytes": 1e9, "link_bytes_per_second": 1e12}
    options = ("layouts", "--config", config, "--num-devices", "4", "--device", write(device, project, "device.yaml"))
    out = run(*options, "--output", str(path))
    rows = [line.split()[:2] for line in out.splitlines() if line.split()[:1] in (["1"], ["2"], ["4"])]
    assert [row for row in rows if row in (["1", "4"], ["2", "2"], ["4", "1"])] == [["1", "4"], ["2", "2"], ["4", "1"]]
    plan = PartitionPlan.load(path)
    assert plan.num_stages == 1
    assert plan.chosen is not None
    assert plan.chosen.num_microbatches == 1
    html, trace = project / "layouts.html", project / "layouts.json"
    run(*options, "--html", str(html), "--trace", str(trace))
    assert '"ranks":[[0],[1],[2],[3]]' in html.read_text(encoding="utf-8")
    assert "average of " in trace.read_text(encoding="utf-8")
    slow = run(*options, "--replica-bytes-per-second", "1", "--output", str(path), "--schedules", "gpipe", "1f1b")
    assert slow != out
    assert PartitionPlan.load(path).num_stages == 4


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("tpu", "no such file"),
        ({"flops_per_second": 1}, "bytes_per_second"),
        ({"flops_per_second": 1, "bytes_per_second": 1, "cores": 2}, "unexpected keyword argument 'cores'"),
        ({"flops_per_second": "fast", "bytes_per_second": 1}, "could not convert string to float"),
        ([1, 2], "'list' object has no attribute 'items'"),
    ],
)
def test_a_device_that_is_none_is_refused(project: Path, fail: Run, device: Any, message: str) -> None:
    name = device if isinstance(device, str) else write(device, project, "device.yaml")
    error = fail("simulate", "--config", write(config_of(), project), "--device", name)
    assert "Cannot read the device description" in error
    assert message in error


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_fxpipe", "plan", "--config", "absent.yaml"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: No such file: absent.yaml\n")


def test_a_config_is_planned_for_its_devices(project: Path, run: Run) -> None:
    out = run("plan", "--config", write(config_of(), project))
    # The default: up to four microbatches for each of several stages, of two samples or more, so 4.
    assert out.splitlines()[:-1] == str(plan_by_hand(2, num_microbatches=4)).splitlines()
    assert out.splitlines()[-1] == "Schedule gpipe, 4 microbatches of 2 samples; rank 0: stage 1, rank 1: stage 0"
    assert "in 2 stages" in out


def test_a_list_of_devices_is_counted(project: Path, run: Run) -> None:
    config = write(config_of(trainer={"devices": [0, 2, 3]}), project)
    assert "in 3 stages" in run("plan", "--config", config)


def test_options_override_the_config(project: Path, run: Run) -> None:
    out = run("plan", "--config", write(config_of(), project), "--num-stages", "4", "--num-microbatches", "2")
    assert out.startswith(str(plan_by_hand(4, num_microbatches=2)))
    assert "one microbatch of 4" in out


def test_stages_begin_with_the_split_points(project: Path, run: Run) -> None:
    config = write(config_of(trainer={"devices": 2}), project)
    out = run("plan", "--config", config, "--split-points", "net.1", "net.2")
    assert "in 3 stages" in out
    begins = [line.split()[1] for line in out.splitlines() if line.split()[:1] in (["0"], ["1"], ["2"])]
    assert begins == ["net.0", "net.1", "net.2"]


def test_another_balance_is_asked_for(project: Path, run: Run) -> None:
    config = write(config_of(), project)
    assert "in 2 stages" in run("plan", "--config", config, "--num-stages", "2", "--balance", "flops")


def test_init_args_reach_the_classes(project: Path, run: Run) -> None:
    config = config_of(model=section("Net", depth=6), data=section("Data", batch_size=24))
    out = run("plan", "--config", write(config, project), "--num-stages", "6", "--num-microbatches", "1")
    assert "in 6 stages" in out
    assert "one microbatch of 24" in out


def test_a_config_with_a_section_for_each_subcommand_is_read_at_fit(project: Path, run: Run) -> None:
    out = run("plan", "--config", write({"fit": config_of(), "test": config_of(model=None)}, project))
    assert "in 2 stages" in out


def test_a_config_of_a_program_with_fixed_classes_is_read_with_these(project: Path, run: Run) -> None:
    """LightningCLI(Net, Data) writes their arguments straight into the sections."""
    config = write(config_of(model={"depth": 3}, data={"batch_size": 4}), project)
    classes = ("--model-class", f"{MODULE}.Net", "--data-class", f"{MODULE}.Data")
    assert "in 3 stages" in run("plan", "--config", config, *classes, "--num-stages", "3")
    assert "in 5 stages" in run("plan", "--config", config, *classes, "--model.depth", "5", "--num-stages", "5")


def test_classes_and_their_arguments_can_be_given_on_the_command_line(project: Path, run: Run) -> None:
    config = write(config_of(model=None, data=None), project)
    classes = ("--model", f"{MODULE}.Net", "--data", f"{MODULE}.Data")
    assert "in 2 stages" in run("plan", "--config", config, *classes)
    out = run("plan", "--config", write(config_of(), project), "--model.init_args.depth", "6", "--num-stages", "6")
    assert "in 6 stages" in out


def test_the_config_is_printed_with_its_overrides(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--config", write(config_of(), project), "--model.init_args.depth", "6", "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"] == section("Net", width=8, depth=6)


def test_the_other_sections_of_a_config_have_no_effect(project: Path, run: Run) -> None:
    """The Trainer of the config, its loggers and callbacks may need another machine."""
    trainer = {"devices": 2, "accelerator": "gpu", "logger": {"class_path": "not.installed.Logger"}}
    config = config_of(trainer=trainer, seed_everything=1, ckpt_path=None, optimizer=section("NotThere"))
    assert "in 2 stages" in run("plan", "--config", write(config, project))


@pytest.mark.parametrize("start", [".", "elsewhere"])
def test_classes_beside_the_folder_of_a_config_are_found(
    project: Path, run: Run, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    folder = project / "experiments"
    for path in (folder, project / "elsewhere"):
        path.mkdir()
    (project / f"{MODULE}.py").rename(folder / f"{MODULE}.py")
    monkeypatch.chdir(project / start)
    assert "in 2 stages" in run("plan", "--config", write(config_of(), folder / "configs"))


# ------------------------------------------------------------------ what it saves


def test_the_saved_plan_is_the_printed_one(project: Path, run: Run) -> None:
    out = run("plan", "--config", write(config_of(), project), "--num-stages", "3", "--output", "plan.json")
    loaded = PartitionPlan.load(project / "plan.json")
    assert loaded == plan_by_hand(3, num_microbatches=4)
    assert out.startswith(f"{loaded}\n")


def test_nothing_is_saved_when_planning_fails(project: Path, fail: Run) -> None:
    fail("plan", "--config", write(config_of(), project), "--num-stages", "9", "--output", "plan.json")
    assert not (project / "plan.json").exists()


# ------------------------------------------------------------------ what is wrong


def test_an_absent_config_is_named(project: Path, fail: Run) -> None:
    assert "absent.yaml" in fail("plan", "--config", "absent.yaml")


def test_a_config_that_is_no_mapping_is_refused(project: Path, fail: Run) -> None:
    assert "The config is not a mapping" in fail("plan", "--config", write(["a", "list"], project))


def test_a_config_that_is_no_yaml_is_refused(project: Path, fail: Run) -> None:
    (project / "config.yaml").write_text("model: [unclosed\n")
    message = fail("plan", "--config", "config.yaml")
    assert "Cannot read the config." in message
    assert "config.yaml" in message


def test_a_config_without_data_asks_for_it(project: Path, fail: Run) -> None:
    message = "The config defines no data.\n  What to do: Pass --data package.module.Class, or --config FILE"
    assert message in fail("plan", "--config", write(config_of(data=None), project))


@pytest.mark.parametrize("name", ["model", "data"])
def test_a_config_without_a_class_needs_an_option(project: Path, fail: Run, name: str) -> None:
    message = fail("plan", "--config", write(config_of(**{name: {"batch_size": 4}}), project))
    assert f"does not name the class of its {name}" in message
    assert f"Pass --{name}-class package.module.Class" in message


@pytest.mark.parametrize(
    "class_path", ["no_such_module_for_fxpipe.Net", f"{MODULE}.NoSuchClass", "JustAName"], ids=["module", "class", "no dot"]
)
def test_a_class_that_cannot_be_imported_is_named(project: Path, fail: Run, class_path: str) -> None:
    message = fail("plan", "--config", write(config_of(model={"class_path": class_path}), project), status=2)
    assert class_path in message
    message = fail("plan", "--config", write(config_of(), project), "--model-class", class_path)
    assert f"Cannot import {class_path}" in message


@pytest.mark.parametrize(("option", "value"), [("hight", 3), ("depth", "many")], ids=["name", "type"])
def test_init_args_that_the_class_does_not_take_are_named(project: Path, fail: Run, option: str, value: Any) -> None:
    message = fail("plan", "--config", write(config_of(model=section("Net", **{option: value})), project), status=2)
    assert option in message
    assert message.endswith("Try `fxpipe plan --help`.\n")
    assert len(message.splitlines()) < 20  # and not the usage


@pytest.mark.parametrize("trainer", [None, {}, {"devices": "auto"}, {"devices": -1}], ids=["no trainer", "none", "auto", "all"])
def test_an_unknown_number_of_devices_asks_for_one(project: Path, fail: Run, trainer: Any) -> None:
    message = fail("plan", "--config", write(config_of(trainer=trainer), project))
    assert "The number of stages is not known" in message
    assert "--num-stages" in message


def test_more_stages_than_the_model_allows_are_refused(project: Path, fail: Run) -> None:
    message = fail("plan", "--config", write(config_of(), project), "--num-stages", "9")
    assert "Cannot form 9 stages." in message


@pytest.mark.parametrize("option", ["--num-stages", "--num-microbatches"])
@pytest.mark.parametrize("number", ["0", "-1"])
def test_a_number_that_is_not_positive_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str], option: str, number: str
) -> None:
    """Zero must not fall back to the default in silence. argparse may refuse it, with its own exit status 2."""
    try:
        status = main(["plan", "--config", write(config_of(), project), option, number])
    except SystemExit as leaving:
        status = leaving.code
    out, err = capsys.readouterr()
    assert status in (1, 2)
    assert out == ""
    assert option in err or "stages" in err or "microbatches" in err


def test_an_output_that_cannot_be_written_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["plan", "--config", write(config_of(), project), "--output", "no/such/folder/plan.json"])
    assert status == 1
    message = capsys.readouterr().err
    assert "Cannot write a file." in message
    assert "Pass a path in an existing, writable folder to --output" in message
    assert "no/such/folder" in message


# ------------------------------------------------------------------ what it draws


def data_of(page: Path) -> dict[str, Any]:
    """What the page at a path shows."""
    text = page.read_text(encoding="utf-8")
    return dict(json.loads(text.partition('id="data">')[2].partition("</script>")[0]))


def test_simulate_saves_a_page_a_figure_and_a_trace(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    pictures = ["--html", "step.html", "--plot", "step.svg", "--trace", "step.json"]
    arguments = ["simulate", "--config", write(config_of(), project), "--schedules", "zb_h1", "1f1b", "zb_h1", *pictures]
    assert main(arguments) == 0
    assert capsys.readouterr().err.endswith("Saved to step.html\nSaved to step.svg\nSaved to step.json\n")
    page = data_of(project / "step.html")
    assert sorted(each["name"] for each in page["alternatives"]) == ["1f1b", "zb_h1"]
    assert page["memoryLimitBytes"] == DEVICES["a100"].memory_bytes
    assert "<svg" in (project / "step.svg").read_text()
    names = [event["name"] for event in json.loads((project / "step.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert sorted(names) == sorted(
        action for each in page["alternatives"] for rank in each["timelines"][0]["ranks"] for action in rank["work"]
    )


def test_plan_saves_a_page_of_the_very_plan_with_a_simulated_step(project: Path, run: Run) -> None:
    options = ["--balance", "memory", "--output", "plan.json", "--html", "plan.html", "--device", "h200"]
    out = run("plan", "--config", write(config_of(), project), *options)
    page = data_of(project / "plan.html")
    assert page["plan"]["text"] == str(PartitionPlan.load("plan.json"))
    assert out.startswith(page["plan"]["text"])
    assert page["memoryLimitBytes"] == DEVICES["h200"].memory_bytes
    assert {each["name"] for each in page["alternatives"]} == {*SCHEDULES}


def test_a_page_has_the_cuts_that_are_asked_for(project: Path, run: Run) -> None:
    config = write(config_of(trainer={"devices": 2}), project)
    run("plan", "--config", config, "--split-points", "net.3", "--html", "plan.html")
    page = data_of(project / "plan.html")
    assert [stage["first"] for stage in page["plan"]["stages"]] == ["net.0", "net.3"]
    three_layers, one_layer = (stage["stateBytes"] for stage in page["plan"]["stages"])
    assert three_layers == 3 * one_layer


def test_a_step_that_cannot_be_simulated_has_a_page_that_says_why(project: Path, run: Run) -> None:
    config = write(config_of(model=section("Manual")), project)
    out = run("plan", "--config", config, "--html", "plan.html")
    page = data_of(project / "plan.html")
    assert out.startswith(page["plan"]["text"])
    assert page["alternatives"] == []
    assert page["notes"] == ["Steps that run on every rank cannot be simulated: manual optimization."]


@pytest.mark.parametrize("option", ["--html", "--plot", "--trace"])
def test_a_picture_that_cannot_be_written_is_named(project: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    path = "no/such/folder/step.png"
    assert main(["simulate", "--config", write(config_of(), project), "--schedules", "1f1b", option, path]) == 1
    err = capsys.readouterr().err
    assert f"Pass a path in an existing, writable folder to {option}" in err
    assert path in err
    assert "Saved to" not in err


@pytest.mark.parametrize("command", [("simulate",), ("layouts", "--num-devices", "2")], ids=["simulate", "layouts"])
def test_an_unknown_schedule_is_refused(project: Path, fail: Run, command: tuple[str, ...]) -> None:
    message = fail(*command, "--config", write(config_of(), project), "--schedules", "2f2b")
    assert "The schedule does not exist" in message
    assert "2f2b" in message


# ------------------------------------------------------------------ a saved plan, JSON


def test_a_saved_plan_is_simulated_as_it_is(project: Path, run: Run) -> None:
    config = write(config_of(), project)
    run("plan", "--config", config, "--split-points", "net.1", "--output", "plan.json")
    plan = PartitionPlan.load("plan.json")
    found = json.loads(run("simulate", "--config", config, "--plan", "plan.json", "--json"))
    assert found["plan"] == json.loads((project / "plan.json").read_text())
    assert found["device"]["name"] == "a100"
    assert found["refused"]["v_half"] == "The schedule needs 4 stages on 2 devices, but the plan has 2."
    names = [each["schedule"] for each in found["schedules"]]
    seconds = [each["step_seconds"] for each in found["schedules"]]
    assert seconds == sorted(seconds)
    assert found["fastest"] == names[0]
    found = json.loads(run("layouts", "--config", config, "--num-devices", "4", "--plan", "plan.json", "--json"))
    assert {(each["num_ranks"], each["stages_per_rank"]) for each in found["layouts"]} == {(1, 2), (2, 1)}
    assert found["plan"]["stages"] == json.loads((project / "plan.json").read_text())["stages"]
    assert plan.num_stages == 2


def test_simulate_and_layouts_have_the_cuts_that_are_asked_for(project: Path, run: Run) -> None:
    config, cuts = write(config_of(), project), ["--split-points", "net.1", "--json"]
    planned = json.loads(run("plan", "--config", config, *cuts))
    assert json.loads(run("simulate", "--config", config, *cuts))["plan"] == planned
    found = json.loads(run("layouts", "--config", config, "--num-devices", "2", "--schedules", "1f1b", *cuts))
    assert [each["num_ranks"] for each in found["layouts"]] == [2]
    assert [stage["first_module"] for stage in found["plan"]["stages"]] == ["net.0", "net.1"]


def test_the_fastest_is_marked(project: Path, run: Run) -> None:
    out = run("simulate", "--config", write(config_of(), project))
    marked = [line.split()[0] for line in out.splitlines() if line.endswith("fastest")]
    rows = [line.split()[0] for line in out.splitlines() if line.split()[:1] and line.split()[0] in SCHEDULES]
    assert marked == rows[:1]


def test_each_layout_is_logged_as_soon_as_it_is_there(project: Path, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning_fxpipe"):
        run("layouts", "--config", write(config_of(), project), "--num-devices", "4")
    lines = [record.message for record in caplog.records if " of 3: " in record.message]
    assert [line.partition(":")[0] for line in lines] == ["1 of 3", "2 of 3", "3 of 3"]
    assert "samples/s" in lines[0]


# ------------------------------------------------------------------ the program


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_needs_neither_torch_nor_lightning(option: str) -> None:
    program = (
        "import sys\nfrom lightning_fxpipe.__main__ import main\n"
        f"try: main([{option!r}])\nfinally: print(sys.modules.keys() & {{'torch', 'lightning', 'jsonargparse'}})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


def test_the_console_script_is_this_function() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"fxpipe": f"{main.__module__}:{main.__name__}"}


def test_doctor_prints_what_a_report_needs_and_sends_a_tensor_there_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert f"torch {version('torch')}" in lines["Versions"]
    assert {*lines} == {"Versions", "Platform", "Devices", "Backend", "Round"}
    assert "2 processes" in lines["Round"]


def test_doctor_says_what_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    assert main(["doctor"]) == 1
    assert "no_such_interface" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("command", ["simulate", "layouts", "plan"])
def test_schedules_may_be_spelled_as_torch_does(project: Path, run: Run, command: str) -> None:
    options = {"simulate": ("--schedules",), "layouts": ("--num-devices", "2", "--schedules"), "plan": ("--schedule",)}[command]
    arguments = (command, "--config", write(config_of(), project), "--num-microbatches", "2", *options)
    assert run(*arguments, "1F1B") == run(*arguments, "1f1b")


def test_a_table_of_ones_own_is_simulated_beside_names(project: Path, run: Run, fail: Run) -> None:
    (project / "mine.csv").write_text("1F0,1B0,1F1,1B1\n0F0,0F1,0B0,0B1\n")
    options = ("simulate", "--config", write(config_of(), project), "--num-microbatches", "2")
    rows = [line.split() for line in run(*options, "--schedules", "1f1b", "mine.csv").splitlines()]
    named, mine = (next(row for row in rows if row[:1] == [name]) for name in ("1f1b", "mine.csv"))
    assert mine[1:6] == named[1:6]
    assert "Cannot read the schedule table" in fail(*options, "--schedules", "absent.csv")


def test_without_a_config_or_a_model_it_says_what_to_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 1
    told = capsys.readouterr().err
    assert "No config, and no --model." in told
    assert "Pass --model package.module.Class, or --config FILE" in told


def test_a_reader_that_has_read_enough_ends_the_output_without_a_traceback() -> None:
    """As `fxpipe plan ... | head` does."""
    program = f"import sys; from lightning_fxpipe.__main__ import main; import lightning_fxpipe.cli.doctor as d; {PRINTS}"
    shell = f"{sys.executable} -c '{program}' | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "141"
    assert "Traceback" not in done.stderr


PRINTS = 'd.doctor = lambda *_: [print("x" * 100000) for _ in range(10)] and 0; sys.exit(main(["doctor"]))'
