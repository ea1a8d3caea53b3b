"""A pipeline of one stage is a run without the strategy, with every version of torch that the package installs with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_fxpipe import FxPipeStrategy, make_plan
from lightning_fxpipe.__main__ import main
from tests.lit import LitModel, fit_and_record, make_loader, make_trainer


def one_stage(num_microbatches: int = 1) -> dict[str, Any]:
    return {"strategy": FxPipeStrategy(num_microbatches=num_microbatches), "devices": 1}


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_fit_is_that_of_the_default_strategy(name: str) -> None:
    torch.testing.assert_close(fit_and_record(name, **one_stage()), fit_and_record(name), rtol=1e-5, atol=1e-6)


def test_microbatches_make_the_batch() -> None:
    torch.testing.assert_close(fit_and_record("mlp", **one_stage(4)), fit_and_record("mlp"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_microbatches", [1, 4])  # with one, the state of random numbers goes from stage to stage: bytes
@pytest.mark.parametrize("schedule", ["gpipe", "looped_bfs"])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_several_stages_share_the_device(name: str, schedule: str, num_microbatches: int) -> None:
    strategy = FxPipeStrategy(schedule=schedule, num_stages=2, num_microbatches=num_microbatches)
    place = {"strategy": strategy, "devices": 1}
    torch.testing.assert_close(fit_and_record(name, **place), fit_and_record(name), rtol=1e-5, atol=1e-6)


class Checkpointed(LitModel):
    """Its model runs under activation checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.model, x, use_reentrant=False)

    def _loss(self, batch: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])


def run(folder: Path, options: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One epoch, a second one from its checkpoint, validation and prediction."""
    found = {}
    path = folder / "half.ckpt"
    for epochs in (1, 2):
        L.seed_everything(1, verbose=False)
        module = Checkpointed("mlp")
        trainer = make_trainer(max_epochs=epochs, callbacks=[ModelCheckpoint(folder)], enable_checkpointing=True, **options())
        trainer.fit(module, make_loader("mlp"), ckpt_path=path if epochs == 2 else None)
        trainer.save_checkpoint(path)
    found["metrics"] = trainer.validate(module, make_loader("mlp"), verbose=False)[0]
    found["outputs"] = trainer.predict(module, make_loader("mlp"))
    found["state"] = {fqn: value.cpu() for fqn, value in module.state_dict().items()}
    return found


def test_resume_evaluation_and_activation_checkpointing(tmp_path: Path) -> None:
    torch.testing.assert_close(run(tmp_path / "a", one_stage), run(tmp_path / "b", dict), rtol=1e-5, atol=1e-6)


def test_nothing_deprecated_is_called_by_the_package(tmp_path: Path) -> None:
    """Whether torch's, Lightning's or Python's: the newest ones are the first to say what they will take away."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(tmp_path, lambda: one_stage(4))
        for name in ("gpt", "unet"):
            make_plan(LitModel(name), next(iter(make_loader(name))), num_stages=2)
    deprecated = (FutureWarning, DeprecationWarning, PendingDeprecationWarning)
    ours = [w for w in caught if issubclass(w.category, deprecated) and "lightning_fxpipe" in Path(w.filename).parts]
    assert [f"{w.filename}:{w.lineno}: {w.message}" for w in ours] == []


def test_a_run_that_goes_on_with_another_number_of_stages_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning_fxpipe"):
        for epochs, stages in ((1, 1), (2, 2), (3, 2)):
            strategy = FxPipeStrategy(num_stages=stages, num_microbatches=2)
            trainer = make_trainer(max_epochs=epochs, strategy=strategy, devices=1)
            trainer.fit(LitModel("mlp"), make_loader("mlp"), ckpt_path=tmp_path / "a.ckpt" if epochs > 1 else None)
            trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert [text for text in caplog.messages if "Resumed" in text] == ["Resumed a checkpoint of 1 stage with 2."]


class WithoutOptimizer(LitModel):
    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_run_without_an_optimizer_is_saved_and_goes_on(as_folder: bool, tmp_path: Path) -> None:
    """Lightning has one then whose state is an empty dict."""
    path, steps = tmp_path / "none.ckpt", []
    for epochs in (1, 2):
        strategy = FxPipeStrategy(save_distributed_checkpoint=as_folder)
        trainer = make_trainer(max_epochs=epochs, strategy=strategy, devices=1)
        trainer.fit(WithoutOptimizer("mlp"), make_loader("mlp"), ckpt_path=path if epochs == 2 else None)
        trainer.save_checkpoint(path)
        steps.append(trainer.global_step)
    assert steps[1] == 2 * steps[0]
    assert main(["convert", str(path), str(tmp_path / "other"), "--to", "file" if as_folder else "folder"]) == 0


class Adversaries(L.LightningModule):
    """A GAN whose validation calls its parts one after the other, which no stages of its two models can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
        self.critic = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc,attr-defined]
        (x,) = batch
        made = self.generator(x[:, :4])
        first.zero_grad()
        self.manual_backward(-self.critic(made).mean())
        first.step()
        second.zero_grad()
        self.manual_backward(self.critic(made.detach()).mean() - self.critic(x).mean())
        second.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("fooled", self.critic(self.generator(batch[0][:, :4])).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.generator.parameters(), 0.01), torch.optim.Adam(self.critic.parameters(), 0.01)


def fooled(**options: Any) -> tuple[dict[str, Tensor], list[str]]:
    module = Adversaries()
    samples = torch.randn(18, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(samples), batch_size=6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(max_epochs=2, **options)
        trainer.fit(module, loader, loader)
    said = [str(one.message) for one in caught if "cannot be pipelined" in str(one.message)]
    return {**module.state_dict(), **trainer.callback_metrics}, said


@pytest.mark.parametrize("num_stages", [2, 4])
def test_an_evaluation_that_stages_cannot_follow_runs_without(num_stages: int) -> None:
    expected, _ = fooled()
    found, said = fooled(strategy=FxPipeStrategy(num_stages=num_stages, schedule="gpipe"), devices=1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert len(said) == 1
    assert "so it runs without" in said[0]
    assert "in an order that the plan's stages cannot follow" in said[0]


class LogsNumbers(LitModel):
    """Logs a number and a tensor of each precision."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss((batch[0].to(self.dtype), batch[1]))
        values = {"rate": 0.001, "loss": loss, "single": loss.float(), "count": 3, "number": batch[1].sum()}
        self.log_dict(values)
        for reduce_fx in ("mean", "sum", "max"):
            named = {f"{reduce_fx} {name}": value for name, value in values.items()}
            self.log_dict(named, on_step=False, on_epoch=True, reduce_fx=reduce_fx)
        return loss

    def _loss(self, batch: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])


@pytest.mark.parametrize("precision", ["64-true", "32-true", "bf16-true"])
def test_logged_values_have_the_type_of_one_device(precision: str) -> None:
    found = []
    for place in ({}, {"strategy": FxPipeStrategy(num_stages=2, num_microbatches=2, schedule="gpipe"), "devices": 1}):
        trainer = make_trainer(max_epochs=1, precision=precision, **place)
        trainer.fit(LogsNumbers("mlp"), make_loader("mlp"))
        found.append(dict(trainer.callback_metrics))
    expected, logged = found
    assert {name: value.dtype for name, value in logged.items()} == {name: value.dtype for name, value in expected.items()}
    exact = [name for name in expected if name.split()[-1] in ("rate", "count", "number")]
    assert {name: logged[name] for name in exact} == {name: expected[name] for name in exact}
