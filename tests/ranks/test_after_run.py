"""After a run the module is what it would be after a run on one device: whole, usable, and ready for the next run."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fxpipe.stages.memory
from lightning_fxpipe import FxPipeStrategy, UnsupportedError
from tests.lit import LitModel, make_loader, make_trainer
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]
TOKENS = torch.arange(10).view(2, 5)


class Words(L.LightningModule):
    """Tied weights, an LSTM's second list of weights, batch statistics, buffers of several kinds, a head that only trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 11)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False] * 8))
        self.register_buffer("phase", torch.tensor([1 + 2j, 3j]))
        self.auxiliary = nn.Linear(16, 1)

    def forward(self, x: Tensor, with_auxiliary: bool = False) -> Any:
        h, _ = self.lstm(self.embed(x))
        h = self.norm(h.mean(1)).masked_fill(self.mask, 0.5) * self.phase.imag.sum()
        for layer in self.layers:
            h = torch.relu(layer(h)) + h
        output = self.head(h) * self.scale
        return (output, self.auxiliary(h)) if with_auxiliary else output

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output, auxiliary = self(batch[0], with_auxiliary=True)
        return nn.functional.cross_entropy(output, batch[1]) + auxiliary.pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def words(num_samples: int, length: int = 5, batch_size: int = 16) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(num_samples)
    x = torch.randint(0, 11, (num_samples, length), generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(0, 11, (num_samples,), generator=generator)), batch_size=batch_size)


def trainer_of(stages: int, **options: Any) -> L.Trainer:
    place = {"strategy": FxPipeStrategy(num_microbatches=1), "devices": stages} if stages > 1 else {}
    return make_trainer(**({"max_epochs": 2} | place | options))


def session_of_a_user(folder: str, stages: int = 1) -> dict[str, Any]:
    """What somebody does in one script: run after run, with the module used and changed in between."""
    L.seed_everything(2, verbose=False)
    module = Words()
    parameters, found = list(module.parameters()), {}
    best = ModelCheckpoint(dirpath=folder, monitor="val_loss", filename="{epoch}-{val_loss:.4f}")
    trainer = trainer_of(stages, callbacks=[best], enable_checkpointing=True)

    found["validated before"] = trainer.validate(module, words(32), verbose=False)
    trainer.fit(module, words(48), words(32))
    found["same objects"] = all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    found["tied"] = module.head.weight is module.embed.weight
    found["device"] = str(module.device)
    found["called"] = module.eval()(TOKENS).detach()
    found["copied"] = copy.deepcopy(module)(TOKENS).detach()
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other = Words()
    other.load_state_dict(torch.load(buffer))
    found["saved and loaded"] = other.eval()(TOKENS).detach()
    module.double().float().to("cpu").train()

    found["tested"] = trainer.test(module, words(20), verbose=False)
    found["tested at its best"] = trainer.test(module, words(20), ckpt_path="best", verbose=False)
    found["best"] = Path(best.best_model_path).name
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, words(48, length=7, batch_size=12), words(32))
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    found["predicted"] = torch.cat(trainer.predict(module, words(20)))  # type: ignore[arg-type]

    # The same module in another Trainer; another module; one that has got another head, and frozen layers.
    second = trainer_of(stages)
    second.fit(module, words(40))
    found["fit again"] = second.validate(module, words(32), verbose=False)
    module.head = nn.Linear(16, 11)
    module.head.load_state_dict({"weight": torch.ones(11, 16) / 7, "bias": torch.arange(11.0)})
    module.layers.requires_grad_(False)
    second.fit_loop.max_epochs = 4
    second.fit(module, words(40))
    found["changed"] = second.validate(module, words(32), verbose=False)
    resumed = Words()
    trainer_of(stages, max_epochs=5).fit(resumed, words(48), ckpt_path=f"{folder}/after.ckpt")
    found["state"] = {fqn: value.clone() for fqn, value in module.state_dict().items()}
    found["resumed"] = {fqn: value.clone() for fqn, value in resumed.state_dict().items()}
    return found


def piped_session(folder: str) -> dict[str, Any]:
    return session_of_a_user(folder, stages=2)


def test_a_script_of_several_runs_goes_as_on_one_device(ranks: Ranks, tmp_path: Path) -> None:
    expected = session_of_a_user(str(tmp_path / "one"))
    for found in ranks(2).run(piped_session, str(tmp_path / "pipe"), timeout_seconds=240):
        assert found.keys() == expected.keys()
        for key, wanted in expected.items():
            if isinstance(wanted, (Tensor, dict)):
                torch.testing.assert_close(found[key], wanted, rtol=0, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
            elif isinstance(wanted, list):
                assert found[key] == [pytest.approx(metrics, abs=1e-5) for metrics in wanted], key
            else:
                assert found[key] == wanted, key


# --------------------------------------------------------------------------- where it is not made whole


def split_fit(strategy_options: dict[str, Any], num_bytes: int | None) -> dict[str, Any]:
    """Fits, validates with the same Trainer, and tries another one."""
    before = lightning_fxpipe.stages.memory.available_memory
    lightning_fxpipe.stages.memory.available_memory = lambda: num_bytes
    try:
        module = LitModel("mlp")
        weight = module.model[0].weight if hasattr(module.model, "__getitem__") else next(module.parameters())
        trainer = make_trainer(max_epochs=1, strategy=FxPipeStrategy(**strategy_options), devices=2)
        trainer.fit(module, make_loader("mlp"))
        missing = sum(parameter.is_meta for parameter in module.parameters())
        validated = trainer.validate(module, make_loader("mlp", num_samples=20), verbose=False)
        refused = ""
        if missing:
            with pytest.raises(UnsupportedError) as caught:
                make_trainer(max_epochs=1, strategy="fxpipe", devices=2).fit(module, make_loader("mlp"))
            refused = str(caught.value)
        return {
            "missing": missing,
            "validated": validated,
            "refused": refused,
            "lost reads as nan": bool(weight.isnan().all()),
            "shape": tuple(weight.shape),
        }
    finally:
        lightning_fxpipe.stages.memory.available_memory = before


def cases_of_splitting() -> list[dict[str, Any]]:
    return [
        split_fit({"gather_after_run": False}, None),
        split_fit({}, 1000),
        split_fit({"gather_after_run": True}, 1000),
        split_fit({}, None),
    ]


def test_the_module_stays_split_where_that_is_wished_or_memory_is_short(ranks: Ranks) -> None:
    results = ranks(2).run(cases_of_splitting)
    for without, short, forced, unknown in results:
        for split in (without, short):
            assert split["missing"]
            assert "gather_after_run" in split["refused"]
            assert split["validated"] == [pytest.approx(unknown["validated"][0], abs=1e-6)]
        for whole in (forced, unknown):
            assert whole["missing"] == 0
            assert not whole["lost reads as nan"]
    # Whoever kept a reference to a parameter that another rank has gets nan, not the values from before training.
    assert [without["lost reads as nan"] for without, *_ in results].count(True) == 1
    assert len({result[0]["shape"] for result in results}) == 1


def failing_fit() -> tuple[bool, str]:
    class Fails(LitModel):
        def on_train_epoch_end(self) -> None:
            raise ValueError("no more")

    module = Fails("mlp")
    with pytest.raises(ValueError, match="no more"):
        make_trainer(max_epochs=1, strategy="fxpipe", devices=2).fit(module, make_loader("mlp"))
    return any(parameter.is_meta for parameter in module.parameters()), str(module.device)


def test_a_run_that_fails_does_not_wait_for_the_other_ranks(ranks: Ranks) -> None:
    for is_split, _ in ranks(2).run(failing_fit):
        assert is_split
