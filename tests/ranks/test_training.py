"""What Lightning does around the steps, through the pipeline and on one device: the same runs, the same numbers."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import BatchError, FxPipeStrategy, make_plan
from tests.lit import LitModel, Recorder, make_loader, make_trainer, snapshot
from tests.models import make_samples
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]


def merged(results: list[dict[str, Any]], key: str) -> dict[str, Tensor]:
    """The parts that the ranks have, together."""
    return {name: value for result in results for name, value in result[key].items()}


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for fqn, value in expected.items():
        torch.testing.assert_close(found[fqn], value, rtol=0, atol=atol, msg=lambda text, fqn=fqn: f"{fqn}: {text}")


# --------------------------------------------------------------------------- accumulation, clipping, order of the data


def fit(options: dict[str, Any], shuffle: bool = False, seed: int | None = 5, model: str = "gpt") -> dict[str, Any]:
    if seed is not None:
        L.seed_everything(seed, verbose=False)
    module, recorder = LitModel(model), Recorder()
    trainer = make_trainer(max_epochs=2, callbacks=[recorder], **options)
    trainer.fit(module, make_loader(model, shuffle=shuffle))
    return {"state": snapshot(module), "losses": recorder.losses, "gradients": recorder.gradients[-1]}


def piped_fit(stages: int, options: dict[str, Any], shuffle: bool = False, model: str = "gpt") -> dict[str, Any]:
    return fit({"strategy": FxPipeStrategy(), "devices": stages, **options}, shuffle, model=model)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {"precision": "64-true"},
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()),
)
def test_trainer_options_give_the_same_run(ranks: Ranks, options: dict[str, Any]) -> None:
    expected = fit(options)
    results = ranks(2).run(piped_fit, 2, options)
    assert_same_state(merged(results, "state"), expected["state"])
    assert_same_state(merged(results, "gradients"), expected["gradients"])
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-5)


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_come_in_the_order_of_one_device(ranks: Ranks, shuffle: bool) -> None:
    # Lightning's injected DistributedSampler would shuffle even a loader that does not.
    expected = fit({}, shuffle)
    for result in ranks(2).run(piped_fit, 2, {}, shuffle):
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-5)


# --------------------------------------------------------------------------- seeds, data, batches that no one has set


class NoisyStep(LitModel):
    """Draws random numbers in the step, before the model and after it, and has a target that needs them again."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        noise = torch.randn(len(x), 1)
        output = self.model(x + noise * 0.1)
        loss = nn.functional.cross_entropy(output + noise * 0.01 + torch.rand(1) * 1e-3, y)
        self.log("train_loss", loss)
        return loss


def different_data() -> str:
    torch.manual_seed(int(os.environ["RANK"]))
    x = torch.randn(16, 12) + (int(os.environ["RANK"]))
    loader = DataLoader(TensorDataset(x, torch.zeros(16, dtype=torch.long)), batch_size=8)
    with pytest.raises(BatchError) as caught:
        make_trainer(max_epochs=1, strategy=FxPipeStrategy(), devices=2).fit(LitModel("mlp"), loader)
    return str(caught.value)


def test_data_that_differs_between_ranks_is_refused(ranks: Ranks) -> None:
    # The first stage would take its inputs from one dataset and the last stage its targets from another.
    for message in ranks(2).run(different_data):
        assert "The ranks of the pipeline loaded different batches" in message
        assert "seed_everything" in message


def unseeded_fit(options: dict[str, Any], seed: int | None = None) -> dict[str, Any]:
    """Trains from a seed; by default from another one on each rank, as if no code had seeded the generator."""
    module, recorder = NoisyStep("mlp"), Recorder()
    seed = 70 + int(os.environ["RANK"]) if seed is None else seed
    torch.manual_seed(seed)  # after the model, which seeds itself
    trainer = make_trainer(max_epochs=2, callbacks=[recorder], num_sanity_val_steps=1, **options)
    trainer.fit(module, make_loader("mlp", shuffle=True), make_loader("mlp"))
    return {"seed": seed, "losses": recorder.losses, "state": snapshot(module), "rng": torch.get_rng_state()}


def piped_unseeded_fit() -> dict[str, Any]:
    return unseeded_fit({"strategy": FxPipeStrategy(num_microbatches=4), "devices": 2})


def test_ranks_that_nobody_seeded_draw_as_rank_0_does(ranks: Ranks) -> None:
    # Different shuffles would train stage 0 on other samples than the loss is computed for.
    first, second = ranks(2).run(piped_unseeded_fit)
    assert first["seed"] != second["seed"]
    expected = unseeded_fit({}, first["seed"])
    assert_same_state(merged([first, second], "state"), expected["state"])
    for result in (first, second):
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert torch.equal(result["rng"], expected["rng"])


class ByChance(nn.Module):
    """Draws in its forward, from each generator: scheduled sampling, layer drop, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        steps = [self.linear if random.random() < 0.5 else nn.functional.relu for _ in range(3)]
        for step in steps:
            x = x + step(x) * float(numpy.random.randn()) * 0.1
        return nn.functional.dropout(x, 0.2, self.training)


class LitByChance(LitModel):
    def __init__(self) -> None:
        super().__init__("mlp")
        self.model = nn.Sequential(*(nn.Sequential(ByChance(), nn.Tanh()) for _ in range(4)), nn.Linear(12, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + random.random() + float(numpy.random.rand()))  # goes on where the stages have stopped


def fit_by_chance(options: dict[str, Any]) -> dict[str, Any]:
    L.seed_everything(9, verbose=False)
    module, recorder = LitByChance(), Recorder()
    make_trainer(max_epochs=1, callbacks=[recorder], **options).fit(module, make_loader("mlp", shuffle=True))
    return {"losses": recorder.losses, "state": snapshot(module), "next": (random.random(), numpy.random.rand())}


def piped_fit_by_chance(stages: int) -> dict[str, Any]:
    return fit_by_chance({"strategy": FxPipeStrategy(num_microbatches=1), "devices": stages})


@pytest.mark.parametrize("stages", [2, 3])
def test_with_one_microbatch_modules_draw_as_on_one_device_from_all_generators(ranks: Ranks, stages: int) -> None:
    expected = fit_by_chance({})
    results = ranks(stages).run(piped_fit_by_chance, stages)
    assert_same_state(merged(results, "state"), expected["state"])
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert result["next"] == expected["next"]


class Shifted(LitModel):
    """Its step uses a buffer that is no part of the model, and so belongs to no stage."""

    def __init__(self, name: str) -> None:
        super().__init__(name)  # which seeds
        torch.manual_seed(int(os.environ["RANK"]))
        self.register_buffer("shift", torch.rand(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((x + self.shift, y), batch_idx)


def shift_of_unseeded_rank() -> tuple[Tensor, Tensor]:
    """Before and after a run."""
    module = Shifted("mlp")
    before = module.shift.clone()
    make_trainer(max_epochs=1, limit_train_batches=1, strategy=FxPipeStrategy(), devices=2).fit(module, make_loader("mlp"))
    return before, module.shift


def test_what_no_stage_holds_starts_with_the_values_of_rank_zero(ranks: Ranks) -> None:
    """Else the first stage would compute with another shift than the rank that has the loss."""
    (expected, first), (other, second) = ranks(2).run(shift_of_unseeded_rank)
    assert not torch.equal(expected, other)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


def noisy_fit(options: dict[str, Any]) -> dict[str, Any]:
    L.seed_everything(9, verbose=False)
    module, recorder = NoisyStep("mlp"), Recorder()
    trainer = make_trainer(max_epochs=1, callbacks=[recorder], **options)
    trainer.fit(module, make_loader("mlp", num_samples=64, shuffle=True))
    return {"losses": recorder.losses, "state": snapshot(module)}


def piped_noisy_fit() -> dict[str, Any]:
    return noisy_fit({"strategy": FxPipeStrategy(num_microbatches=1), "devices": 3})


def test_the_step_draws_the_numbers_of_one_device(ranks: Ranks) -> None:
    expected = noisy_fit({})
    results = ranks(3).run(piped_noisy_fit)
    assert_same_state(merged(results, "state"), expected["state"])
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-5)


# --------------------------------------------------------------------------- monitors, evaluation, prediction


def monitored_fit(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    L.seed_everything(5, verbose=False)
    module = LitModel("mlp")
    stop = EarlyStopping(monitor="val_loss", patience=1, min_delta=0.01)
    keep = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_top_k=2, filename="{epoch}-{val_loss:.4f}")
    trainer = make_trainer(max_epochs=12, callbacks=[stop, keep], enable_checkpointing=True, **options)
    trainer.fit(module, make_loader("mlp"), make_loader("mlp", num_samples=20))
    # Now, because test(ckpt_path=...) restores the callbacks too.
    stopped_epoch, kept = stop.stopped_epoch, sorted(Path(path).name for path in keep.best_k_models)
    validated = trainer.validate(module, make_loader("mlp", num_samples=20), verbose=False)
    tested = trainer.test(module, make_loader("mlp", num_samples=20), ckpt_path="best", verbose=False)
    predictions = trainer.predict(module, DataLoader(TensorDataset(*make_samples("mlp", 20)), batch_size=8))
    return {
        "stopped_epoch": stopped_epoch,
        "best": Path(keep.best_model_path).name,
        "kept": kept,
        "validated": validated,
        "tested": tested,
        "predictions": predictions,
    }


def piped_monitored_fit(folder: str) -> dict[str, Any]:
    return monitored_fit(folder, {"strategy": FxPipeStrategy(num_microbatches=3), "devices": 2})


def test_monitors_stop_and_keep_the_same_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    expected = monitored_fit(str(tmp_path / "one"), {})
    assert expected["stopped_epoch"] > 0, "early stopping must stop for the test to mean something"
    results = ranks(2).run(piped_monitored_fit, str(tmp_path / "pipe"))
    for result in results:
        assert result["stopped_epoch"] == expected["stopped_epoch"]
        assert result["best"] == expected["best"]
        assert result["kept"] == expected["kept"]
        for kind in ("validated", "tested"):
            assert len(result[kind]) == 1
            assert result[kind][0] == pytest.approx(expected[kind][0], abs=1e-5)
        for found, wanted in zip(result["predictions"], expected["predictions"], strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert sorted(path.name for path in (tmp_path / "pipe").iterdir()) == expected["kept"]


# --------------------------------------------------------------------------- plans


def fit_with_plan(path: str, stages: int) -> dict[str, Any]:
    L.seed_everything(5, verbose=False)
    module = LitModel("gpt")
    strategy = FxPipeStrategy(plan=path, num_microbatches=4, gather_after_run=False)
    trainer = make_trainer(max_epochs=2, strategy=strategy, devices=stages)
    trainer.fit(module, make_loader("gpt"))
    return {"state": snapshot(module), "plan": strategy.plan, "own": [n for n, p in module.named_parameters() if not p.is_meta]}


def test_a_saved_plan_decides_where_parameters_live(ranks: Ranks, tmp_path: Path) -> None:
    expected = fit({})
    plan = make_plan(LitModel("gpt"), make_samples("gpt", 16), num_stages=3, num_microbatches=4)
    plan.save(tmp_path / "plan.json")
    results = ranks(3).run(fit_with_plan, str(tmp_path / "plan.json"), 3)
    for rank, result in enumerate(results):
        assert result["plan"] == plan
        assert set(result["own"]) == set(plan.stages[2 - rank].fqns)
    assert_same_state(merged(results, "state"), expected["state"])


# --------------------------------------------------------------------------- modules of other forms


class SelfCall(L.LightningModule):
    """``self(x)`` with a frozen first part, a dict batch, a dict result, and training after the pipelined call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.frozen = nn.Sequential(nn.Linear(12, 16), nn.ReLU(inplace=True)).requires_grad_(False)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True)) for _ in range(4))
        self.head = nn.Linear(16, 5)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.frozen(x)
        for layer in self.body:
            h = layer(h)
        return {"logits": self.head(h), "hidden": (h, None)}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        out = self(batch["x"])
        loss = nn.functional.cross_entropy(out["logits"] / self.temperature, batch["y"]) + out["hidden"][0].pow(2).mean() * 1e-2
        self.log_dict({"loss": loss, "temperature": self.temperature})
        return {"loss": loss, "logits": out["logits"]}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit_self_call(options: dict[str, Any]) -> dict[str, Any]:
    class Outputs(L.Callback):
        def __init__(self) -> None:
            self.logits: list[Tensor] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.logits += [outputs["logits"].detach()] if "logits" in outputs else []

    x, y = make_samples("mlp", 39)
    samples = [{"x": a, "y": b, "name": f"sample {i}", "nothing": 0} for i, (a, b) in enumerate(zip(x, y, strict=True))]
    module, outputs = SelfCall(), Outputs()
    trainer = make_trainer(max_epochs=2, callbacks=[outputs], **options)
    trainer.fit(module, DataLoader(samples, batch_size=16))  # type: ignore[arg-type]
    return {
        "state": snapshot(module),
        "logits": outputs.logits,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
    }


def piped_self_call(stages: int) -> dict[str, Any]:
    return fit_self_call({"strategy": "fxpipe", "devices": stages})


@pytest.mark.parametrize("stages", [2, 4])
def test_frozen_in_place_and_outer_parameters(ranks: Ranks, stages: int) -> None:
    expected = fit_self_call({})
    results = ranks(stages).run(piped_self_call, stages)
    assert_same_state(merged(results, "state"), expected["state"])
    for result in results:
        assert result["metrics"] == pytest.approx(expected["metrics"], abs=1e-5)
    for found, wanted in zip(results[0]["logits"], expected["logits"], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
