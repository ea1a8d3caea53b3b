"""The example program, cut down to seconds, from both of its configs; and the benchmark at a toy size."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[1] / "examples"
BENCHMARKS = EXAMPLES.parent / "benchmarks"

TINY = [
    *("--model.dim=16", "--model.num_layers=2", "--model.num_heads=2", "--model.context=16"),
    *("--data.context=16", "--data.num_train_samples=48", "--data.num_val_samples=16"),
    *("--trainer.max_epochs=1", "--trainer.log_every_n_steps=1"),
]


def train(tmp_path: Path, subcommand: str, config: str = "lm_fxpipe.yaml", *flags: str) -> str:
    """What the example program prints."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(20):
        (texts / f"{i:02d}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    command = [sys.executable, EXAMPLES / "train_lm.py", subcommand, "--config", EXAMPLES / "configs" / config, *TINY]
    command += [f"--data.path={texts}", "--data.pattern=*.txt", *flags]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    return run.stdout + run.stderr


@pytest.mark.parametrize("config", ["lm_fxpipe.yaml", pytest.param("lm_fxpipe_class.yaml", marks=pytest.mark.slow)])
def test_the_language_model_trains_on_two_processes(tmp_path: Path, config: str) -> None:
    printed = train(tmp_path, "fit", config)
    assert "Pipeline of model" in printed
    assert "Bigram baseline" in printed
    assert "Trained 3 steps with FxPipeStrategy on 2 devices" in printed
    folder = tmp_path / "lightning_logs" / "byte_lm" / "version_0"
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["train_loss"]] == ["0", "1", "2"]
    assert [row["step"] for row in rows if row["val_loss"]] == ["2"]
    assert (folder / "checkpoints" / "last.ckpt").is_file()


def test_the_step_that_is_taken_apart_equals_one_device() -> None:
    program = EXAMPLES / "anatomy.py"
    assert len(program.read_text().splitlines()) <= 150  # read in one sitting
    run = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    sections = re.findall(r"^--- (\d)", run.stdout, re.MULTILINE)
    assert sections == ["1", "2", "3", "3", "4", "5", "6"]
    assert "rank 0, 0F0: receives 0, sends 1" in run.stdout
    assert len(re.findall("the gradient of .* is that of one device", run.stdout)) == 8


def test_the_program_ends_well_where_no_validation_has_run(tmp_path: Path) -> None:
    printed = train(tmp_path, "fit", "lm_fxpipe.yaml", "--trainer.max_steps=2", "--trainer.devices=1")
    assert "No validation has run to its end" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["fit", "--trainer.max_steps=2"],
        ["fit", "--trainer.limit_val_batches=0"],
        ["fit", "--trainer.limit_train_batches=1"],
        ["fit", "--trainer.fast_dev_run=true"],
        ["fit", "--trainer.max_epochs=0"],
        ["fit", "--trainer.devices=3"],
        ["fit", "--trainer.devices=1", "--trainer.strategy=auto"],
        ["fit", "--trainer.strategy=ddp"],
        ["fit", "--trainer.enable_progress_bar=false", "--trainer.logger=false"],
        ["fit", "--trainer.precision=bf16-mixed"],
        ["fit", "--data.batch_size=1"],
        ["validate"],
        ["test"],
        ["predict"],
    ],
    ids=lambda flags: " ".join(flags),
)
def test_the_program_ends_well_with_what_a_newcomer_tries(tmp_path: Path, flags: list[str]) -> None:
    subcommand, *rest = flags
    assert "Traceback" not in train(tmp_path, subcommand, "lm_fxpipe.yaml", *rest)


def test_fine_tuning_gives_the_loss_of_one_device_and_a_model_to_load(tmp_path: Path) -> None:
    losses = {}
    for devices in (1, 2):
        command = [sys.executable, EXAMPLES / "hf_finetune.py", "--steps=3", f"--devices={devices}", "--output=saved"]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
        (losses[devices],) = re.findall(r"Loss after 3 steps: ([\d.]+)", run.stdout)
    assert losses[1] == losses[2]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert sum(parameter.numel() for parameter in saved.parameters()) > 100_000


def test_the_slurm_script_requests_the_devices_that_its_config_uses() -> None:
    script = (EXAMPLES / "slurm" / "train.sbatch").read_text()
    requested = dict(re.findall(r"^#SBATCH --([\w-]+)=(\d+)$", script, flags=re.MULTILINE))
    (command,) = re.findall(r"^srun python (.*)$", script, flags=re.MULTILINE)
    run = subprocess.run(
        [sys.executable, *command.split(), "--print_config"], cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr[-3000:]
    trainer = yaml.safe_load(run.stdout)["trainer"]
    assert trainer["strategy"] == "fxpipe"
    assert (trainer["num_nodes"], trainer["devices"]) == (int(requested["nodes"]), int(requested["ntasks-per-node"]))
    assert requested["gpus-per-node"] == requested["ntasks-per-node"]


@pytest.mark.slow
def test_the_step_time_benchmark_compares_equal_work(tmp_path: Path) -> None:
    sizes = ["--dim=16", "--num-layers=2", "--num-heads=2", "--context=8", "--batch-size=4", "--microbatches=2"]
    command = [sys.executable, BENCHMARKS / "step_time.py", *sizes, "--rounds=1", "--steps=2"]
    run = subprocess.run([*command, f"--output={tmp_path / 'out.json'}"], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    losses = json.loads((tmp_path / "out.json").read_text())["losses"]
    assert len(losses["single"]) == 5
    for candidate in ("whole", "torch", "fxpipe"):
        assert losses[candidate] == pytest.approx(losses["single"], abs=1e-5)


@pytest.mark.slow
def test_the_start_time_benchmark_takes_both_to_their_first_step() -> None:
    command = [sys.executable, BENCHMARKS / "start_time.py", "--layers=2", "--dim=16", "--rounds=1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    (ddp,), (fxpipe,) = ([line for line in run.stdout.splitlines() if line.split()[:1] == [name]] for name in ("ddp", "fxpipe"))
    assert len(ddp.split()) + 1 == len(fxpipe.split())  # and a ratio with its range


@pytest.mark.slow
def test_the_planning_benchmark_plans_each_size() -> None:
    command = [sys.executable, BENCHMARKS / "plan_time.py", "--layers", "2", "6", "--stages", "2", "3"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [line.split()[:2] for line in run.stdout.splitlines() if line.split() and line.split()[0].isdecimal()]
    assert rows == [["2", "2"], ["2", "3"], ["6", "2"], ["6", "3"]]


@pytest.mark.slow
def test_the_benchmark_of_cuts_compares_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before\n\n```text\n```\n\nafter\n")
    command = [sys.executable, BENCHMARKS / "partition_quality.py", "--models", "resnet", "--stages", "2", "3"]
    run = subprocess.run([*command, "--write", page], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [line.split() for line in run.stdout.splitlines() if line.split()[:1] == ["ResNet-50"]]
    assert [row[1] for row in rows] == ["2", "3"]
    for *_, plan, best, deepspeed, uniform, blocks in rows:
        assert 1 <= float(best) <= float(plan) <= 1.05 * float(best)
        assert float(best) <= min(map(float, (deepspeed, uniform, blocks)))
    assert page.read_text() == f"Before\n\n```text\n{run.stdout}```\n\nafter\n"


@pytest.mark.slow
def test_the_benchmark_of_replicas_compares_them_with_ddp() -> None:
    command = [sys.executable, BENCHMARKS / "replicas_time.py", "--sizes", "tiny", "--rounds", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [line.split() for line in run.stdout.splitlines() if line.split()[:1] == ["tiny"]]
    assert [row[1] for row in rows] == ["ddp", "replicate", "shard"]
    assert rows[0][4] == "1.000"


@pytest.mark.slow
def test_the_benchmark_of_simulated_steps_compares_four_schedules() -> None:
    command = [sys.executable, BENCHMARKS / "simulated_time.py", "--sizes", "small", "--rounds", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [line.split() for line in run.stdout.splitlines() if line.split()[:1] == ["small"]]
    assert [row[1] for row in rows] == ["gpipe", "1f1b", "interleaved_1f1b", "zbv_zero_bubble"]
    for _, _, simulated, measured, *_ in rows:
        assert 0 < float(simulated) < 10 * float(measured)


@pytest.mark.slow
def test_the_benchmark_of_skips_compares_two_ways() -> None:
    sizes = ["--width=4", "--side=16", "--batch-size=4", "--microbatches=2", "--steps=2", "--rounds=1"]
    command = [sys.executable, BENCHMARKS / "skips_time.py", *sizes]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    (passed_on,) = (line.split() for line in run.stdout.splitlines() if line.split()[:2] == ["from", "stage"])
    (directly,) = (line.split() for line in run.stdout.splitlines() if line.split()[:1] == ["directly"])
    assert float(directly[-1]) == float(passed_on[-1]) == 0  # differences of the losses
    assert float(directly[1]) < float(passed_on[4])  # MiB


@pytest.mark.slow
def test_the_benchmark_of_schedules_compares_them() -> None:
    sizes = ["--dim=16", "--num-layers=4", "--num-heads=2", "--context=8", "--batch-size=8", "--microbatches=4"]
    command = [sys.executable, BENCHMARKS / "schedule_time.py", *sizes, "--steps=2", "--rounds=1"]
    run = subprocess.run([*command, "--schedules", "gpipe", "zb_h1", "v_half"], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = {line.split()[0]: line.split() for line in run.stdout.splitlines() if line.split()[:1]}
    for name in ("gpipe", "zb_h1", "v_half"):
        assert float(rows[name][-1]) < 1e-4  # of the losses


@pytest.mark.slow
def test_the_benchmark_of_what_is_chosen_compares_it() -> None:
    command = [sys.executable, BENCHMARKS / "chosen_time.py", "--size=tiny", "--rounds=1"]
    run = subprocess.run([*command, "--candidates", "auto", "1f1b 4"], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = {line.split()[0]: line.split() for line in run.stdout.splitlines() if line.split()[:1]}
    for name in ("defaults", "auto", "1f1b"):
        assert float(rows[name][-1]) < 1e-4  # of the losses
    assert "simulated" in run.stdout


@pytest.mark.slow
def test_the_benchmark_of_predictions_compares_them_with_measured_steps() -> None:
    command = [sys.executable, BENCHMARKS / "predicted_time.py", "--sizes", "small", "--rounds=1", "--steps=3"]
    run = subprocess.run([*command, "--schedules", "gpipe", "zb_h1"], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [line.split() for line in run.stdout.splitlines() if line.split()[:1] == ["small"]]
    assert [row[1] for row in rows] == ["gpipe", "zb_h1"]
    for _, _, predicted, measured, *_ in rows:
        assert 0 < float(predicted) < 10 * float(measured)


@pytest.mark.slow
def test_the_overhead_benchmark_divides_the_whole_step(tmp_path: Path) -> None:
    sizes = ["--stages=2", "--microbatches=2", "--warmup-steps=2", "--steps=3"]
    command = [sys.executable, BENCHMARKS / "overhead.py", *sizes]
    run = subprocess.run([*command, f"--output={tmp_path / 'out.json'}"], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "The strategy, all parts" in run.stdout
    few, many = json.loads((tmp_path / "out.json").read_text())["seconds"]["tiny"]
    for rank in (*few, *many):
        # A part that is never charged has lost its function's name; what is the last stage's only, the others do not have.
        assert not {name for name, (worked, _) in rank.items() if worked <= 0 and name != "around the user's step"}
        assert len(rank) >= 18


@pytest.mark.slow
def test_the_benchmark_on_one_device_does_the_same_work_with_every_candidate() -> None:
    sizes = [
        "--accelerator=cpu",
        "--size=tiny",
        "--stages=2",
        "--warmup-steps=2",
        "--steps=2",
        "--counted-steps=1",
        "--rounds=1",
    ]
    command = [sys.executable, BENCHMARKS / "gpu_time.py", *sizes]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [line.split() for line in run.stdout.splitlines() if " (" in line and "Work(" not in line]
    differences = [float(row[-1]) for row in rows]
    assert len(differences) == 5
    assert max(differences) < 1e-4
