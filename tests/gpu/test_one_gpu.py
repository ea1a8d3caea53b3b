"""Runs on one GPU, in one process, compared with the plain Trainer: ``pytest -m gpu -n 0 tests/gpu``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy, Recording, make_plan, read_recording
from lightning_fxpipe.stages.memory import memory_for_rank
from tests.devicemodules import MODULES
from tests.gpu.waits import noted, noting
from tests.lit import Recorder, make_trainer, snapshot
from tests.ranks.runs import Net, assert_same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")


@pytest.fixture(autouse=True)
def exact_kernels() -> Iterator[None]:
    """Both runs use the same kernels; what is left are their sums in another order."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = before


def trainer_of(pipelined: bool, folder: Path, num_microbatches: int, **options: Any) -> L.Trainer:
    place = {"strategy": FxPipeStrategy(num_microbatches=num_microbatches)} if pipelined else {}
    return make_trainer(accelerator="gpu", default_root_dir=folder, **{"max_epochs": 1, **options, **place})


def loader(samples: int = 24) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(8)
    return DataLoader(TensorDataset(torch.randn(samples, 12, generator=generator), torch.arange(samples) % 5), batch_size=8)


def trained(module: L.LightningModule, pipelined: bool, folder: Path, num_microbatches: int = 1, **options: Any) -> Any:
    """What a fit must agree on."""
    L.seed_everything(3, verbose=False)
    recorder = Recorder()
    trainer = trainer_of(pipelined, folder, num_microbatches, callbacks=[recorder], **options)
    trainer.fit(module, loader())
    state = {fqn: value.cpu() for fqn, value in snapshot(module).items()}
    gradients = [{fqn: value.cpu() for fqn, value in step.items()} for step in recorder.gradients]
    return {"losses": recorder.losses, "gradients": gradients, "state": state, "steps": trainer.global_step}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_as_with_the_plain_trainer(name: str, tmp_path: Path) -> None:
    results = []
    for pipelined in (False, True):
        torch.manual_seed(1)
        results.append(trained(MODULES[name](), pipelined, tmp_path))
    assert_same(results[1], results[0], name)


IN_ONE_PROCESS = ["gpipe", "looped_bfs", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "v_half", "v_min"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("schedule", IN_ONE_PROCESS)
def test_several_stages_share_the_gpu(schedule: Any, precision: str, tmp_path: Path) -> None:
    seen = []
    for pipelined in (False, True):
        L.seed_everything(3, verbose=False)
        module, recorder = Net(), Recorder()
        strategy = FxPipeStrategy(num_stages=2, num_microbatches=2 if precision == "32-true" else 1, schedule=schedule)
        place = {"strategy": strategy} if pipelined else {}
        options: dict[str, Any] = {"precision": precision, "callbacks": [recorder], "max_epochs": 2}
        trainer = make_trainer(accelerator="gpu", devices=1, default_root_dir=tmp_path, **options, **place)
        trainer.fit(module, loader())
        state = {fqn: value.float().cpu() for fqn, value in snapshot(module).items()}
        gradients = [{fqn: value.float().cpu() for fqn, value in step.items()} for step in recorder.gradients]
        seen.append((recorder.losses, gradients, state, trainer.global_step))
    _assert_close(seen[1], seen[0], 1e-5 if precision == "32-true" else 2e-2, schedule)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_on_the_cpu_is_planned_with_a_batch_on_the_gpu(name: str) -> None:
    module, (x, y) = MODULES[name](), next(iter(loader()))
    plan = make_plan(module, (x.cuda(), y.cuda()), num_stages=2, num_microbatches=2)
    assert plan.num_stages == 2
    assert all(tensor.device.type == "cpu" for tensor in module.parameters())
    assert module.device.type == "cpu"
    if "autocast" not in name and "cuda" not in name:
        assert make_plan(module.cuda(), (x, y), num_stages=2, num_microbatches=2).num_stages == 2


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_calls_of_the_trainer_in_each_precision(precision: str, num_microbatches: int, tmp_path: Path) -> None:
    seen = []
    for pipelined in (False, True):
        L.seed_everything(3, verbose=False)
        module, recorder = Net(), Recorder()
        trainer = trainer_of(
            pipelined,
            tmp_path,
            num_microbatches,
            precision=precision,
            callbacks=[recorder],
            max_epochs=2,
            gradient_clip_val=0.5,
        )
        trainer.fit(module)
        evaluated = trainer.validate(module, verbose=False), trainer.test(module, verbose=False)
        predicted = [output.float().cpu() for output in trainer.predict(module)]
        state = {fqn: value.float().cpu() for fqn, value in snapshot(module).items()}
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = None if scaler is None else float(scaler.get_scale())
        seen.append((recorder.losses, state, metrics, evaluated, predicted, scale))
    exact = num_microbatches == 1 or precision == "32-true"
    _assert_close(seen[1], seen[0], 1e-5 if exact else 2e-2, precision)


def _assert_close(found: Any, expected: Any, tolerance: float, where: str) -> None:
    if isinstance(expected, (Tensor, float)):
        torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=tolerance, atol=tolerance)
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            _assert_close(found[key], value, tolerance, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, pair in enumerate(zip(found, expected, strict=True)):
            _assert_close(*pair, tolerance, f"{where}[{index}]")
    else:
        assert found == expected, where


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("as_folder", [True, False])
def test_a_run_goes_on_from_its_checkpoint(as_folder: bool, precision: str, tmp_path: Path) -> None:
    L.seed_everything(3, verbose=False)
    whole = Net()
    trainer_of(False, tmp_path, 1, precision=precision, max_epochs=2).fit(whole)
    L.seed_everything(3, verbose=False)
    first, second = Net(), Net()
    place = {"strategy": FxPipeStrategy(num_microbatches=1, save_distributed_checkpoint=as_folder)}
    trainer = make_trainer(accelerator="gpu", max_epochs=1, precision=precision, default_root_dir=tmp_path, **place)
    trainer.fit(first)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    place = {"strategy": FxPipeStrategy(num_microbatches=1)}
    trainer = make_trainer(accelerator="gpu", max_epochs=2, precision=precision, default_root_dir=tmp_path, **place)
    trainer.fit(second, ckpt_path=str(tmp_path / "one.ckpt"))
    for fqn, value in snapshot(second).items():
        torch.testing.assert_close(value.cpu(), snapshot(whole)[fqn].cpu(), rtol=1e-5, atol=1e-5)


def test_the_module_is_on_the_gpu_while_it_runs_and_whole_on_the_cpu_afterwards(tmp_path: Path) -> None:
    devices = []

    class Asks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            devices.append((self.device, next(self.parameters()).device, batch[0].device))
            return super().training_step(batch, batch_idx)

    module = Asks()
    trainer_of(True, tmp_path, 2).fit(module)
    assert {device for step in devices for device in step} == {torch.device("cuda", 0)}
    assert module.device.type == "cpu"
    assert module(torch.zeros(2, 12)).shape == (2, 5)


def test_dropout_draws_the_numbers_of_the_plain_trainer(tmp_path: Path) -> None:
    def with_dropout() -> Net:
        module = Net()
        module.head.append(nn.Dropout(0.5))
        return module

    results = [trained(with_dropout(), pipelined, tmp_path) for pipelined in (False, True)]
    assert_same(results[1], results[0], "dropout")


@pytest.mark.parametrize("options", [{}, {"num_stages": 2, "num_microbatches": 4, "schedule": "gpipe"}], ids=["one", "two"])
def test_the_host_waits_once_in_a_step_at_most(options: dict[str, Any], tmp_path: Path) -> None:
    class Quiet(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

    strategy = FxPipeStrategy(**options)
    trainer = make_trainer(
        accelerator="gpu", max_epochs=2, strategy=strategy, callbacks=[noting(tmp_path / "waits")], default_root_dir=tmp_path
    )
    trainer.fit(Quiet(), loader())
    waits = noted(tmp_path / "waits")
    assert len(waits) == 3
    assert all(len(batch) <= 1 for batch in waits), waits


def test_a_gpu_counts_what_torch_holds_and_does_not_use() -> None:
    device = torch.device("cuda", 0)
    tensor = torch.empty(2**28, dtype=torch.uint8, device=device)
    before = memory_for_rank(device, 4)
    del tensor  # torch keeps the memory for the next one
    after = memory_for_rank(device, 4)
    assert before is not None
    assert after is not None
    assert after - before == 2**28


def test_a_recorded_step_has_the_gpus_times_and_memory(tmp_path: Path) -> None:
    strategy = FxPipeStrategy(
        num_stages=2, num_microbatches=2, schedule="gpipe", record=Recording(tmp_path, first_step=1, num_steps=1)
    )
    L.seed_everything(3, verbose=False)
    make_trainer(accelerator="gpu", max_epochs=1, strategy=strategy).fit(Net(), loader())
    measured, simulated = read_recording(tmp_path)
    actions = {str(span.work) for span in simulated.ranks[0]}
    assert actions == {f"{stage}{kind}{index}" for stage in (0, 1) for kind in "FB" for index in (0, 1)}
    assert all(0 <= span.seconds < 60 for span in measured.ranks[0])
    assert len(measured.kept_bytes[0]) == len(actions)
    assert all(num_bytes > 0 for _, num_bytes in measured.kept_bytes[0])
