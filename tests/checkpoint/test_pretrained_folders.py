"""Checkpoints of a run as folders that ``from_pretrained`` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_fxpipe import FxPipeError, FxPipeStrategy
from lightning_fxpipe.__main__ import main
from lightning_fxpipe.checkpoint.converting import Conversion, Target, convert
from lightning_fxpipe.checkpoint.locations import Location
from tests.lit import make_trainer

MODELS: dict[str, Any] = {
    "GPT2, tied": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)),
    "Llama": lambda: LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    ),
}


class Tunes(L.LightningModule):
    """As one fine-tunes a model of transformers; ``scale`` is beside it."""

    def __init__(self, name: str, *, has_scale: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = MODELS[name]()
        if has_scale:
            self.scale = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch, labels=batch).loss * getattr(self, "scale", 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _trained(folder: Path, name: str, *, as_folder: bool = True, has_scale: bool = False) -> tuple[Tunes, Path]:
    module, path = Tunes(name, has_scale=has_scale), folder / "trained.ckpt"
    strategy = FxPipeStrategy(num_stages=2, num_microbatches=2, save_distributed_checkpoint=as_folder)
    trainer = make_trainer(max_steps=2, strategy=strategy)
    trainer.fit(module, torch.randint(0, 64, (2, 4, 8), generator=torch.Generator().manual_seed(2)))
    trainer.save_checkpoint(path)
    return module, path


def _converted(source: Path, target: Path, submodule: str | None = None) -> Conversion:
    options: dict[str, Any] = {"only_weights": False, "pickle_is_trusted": False, "overwrites": False}
    return convert(Location.of(source), target, Target.PRETRAINED, submodule=submodule, **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("as_folder", [True, False], ids=["folder", "file"])
def test_the_loaded_model_is_the_trained_one(tmp_path: Path, name: str, as_folder: bool) -> None:
    module, path = _trained(tmp_path, name, as_folder=as_folder)
    assert main(["convert", str(path), str(tmp_path / "model"), "--to", "pretrained"]) == 0
    module.net.config.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.state_dict().keys() == module.net.state_dict().keys()
    torch.testing.assert_close(loaded.state_dict(), module.net.state_dict(), rtol=0, atol=0)


def test_a_submodule_beside_other_tensors_is_named(tmp_path: Path) -> None:
    module, path = _trained(tmp_path, "Llama", has_scale=True)
    done = _converted(path, tmp_path / "model", "net")
    assert done.submodule == "net"
    assert "scale" in done.left_out
    assert "those of the submodule net, under its own names" in done.report(path)
    module.net.config.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(loaded.state_dict(), module.net.state_dict(), rtol=0, atol=0)


def test_names_stay_where_no_submodule_has_all_tensors(tmp_path: Path) -> None:
    _, path = _trained(tmp_path, "Llama", has_scale=True)
    assert not _converted(path, tmp_path / "model").submodule


def test_a_submodule_that_is_not_there_is_named(tmp_path: Path) -> None:
    _, path = _trained(tmp_path, "Llama")
    with pytest.raises(FxPipeError, match=r"(?s)no tensors of this submodule.*Where: model.*one of net"):
        _converted(path, tmp_path / "model", "model")


def test_the_option_is_for_this_format_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["convert", "last.ckpt", str(tmp_path / "model.safetensors"), "--submodule", "net"])
    assert "--submodule applies to --to pretrained only" in capsys.readouterr().err


def test_the_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = _trained(tmp_path, "Llama")
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(FxPipeError, match=r"(?s)requires the package huggingface_hub.*pip install"):
        _converted(path, tmp_path / "model")
