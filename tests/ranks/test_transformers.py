"""Models of transformers, wrapped as most people wrap them, on two ranks and on one device."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.ranks.pool import RankPool
from tests.ranks.runs import Run, assert_as_on_one_device, go


class Wrapped(L.LightningModule):
    """Training calls the model, validation the module, prediction a part of the model."""

    def __init__(self, kind: str, head: str = "CausalLM", **options: Any) -> None:
        super().__init__()
        self.pretrained = importlib.import_module("tests.zoo.pretrained")  # imports transformers
        config = getattr(self.pretrained.transformers, kind)(**options)
        torch.manual_seed(2)
        self.model = getattr(self.pretrained.transformers, f"AutoModelFor{head}").from_config(config)

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self(**batch)
        self.log_dict({"val_loss": outputs.loss, "accuracy": (outputs.logits.argmax(-1) == batch["labels"]).float().mean()})

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        embedded = self.model.get_input_embeddings()(batch["input_ids"])
        return self.model.base_model(inputs_embeds=embedded).last_hidden_state.mean(dim=1)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader([self.pretrained.text(4, seed) for seed in range(2)], batch_size=None)  # type: ignore[arg-type]

    val_dataloader = predict_dataloader = train_dataloader


class Padded(Wrapped):
    """Texts of several lengths with an attention mask; the last batch is smaller."""

    batches = "padded_text"

    def train_dataloader(self) -> DataLoader[Any]:
        make = getattr(self.pretrained, self.batches)
        return DataLoader([make(5, 0), make(5, 1), make(3, 2)], batch_size=None)

    val_dataloader = predict_dataloader = train_dataloader


class Classifies(Padded):
    batches = "classified_text"


class Translates(Padded):
    batches = "pairs"

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(**batch).logits


class Counts(Padded):
    """Divides its loss by the number of tokens, as transformers' own Trainer has it when it accumulates gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step({**batch, "num_items_in_batch": (batch["labels"] != -100).sum()}, batch_idx)


def padded(kind: str, options: str, cls: type[Padded] = Padded, **more: Any) -> Callable[[], Padded]:
    return lambda: cls(kind, **{**getattr(importlib.import_module("tests.zoo.pretrained"), options), **more})


def gpt2() -> Wrapped:
    pretrained = importlib.import_module("tests.zoo.pretrained")
    return Wrapped("GPT2Config", **pretrained.GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def mixtral() -> Wrapped:
    """Its loss uses what hooks collect from the routers, which are installed by the first call."""
    pretrained = importlib.import_module("tests.zoo.pretrained")
    return Wrapped("MixtralConfig", **pretrained.HEADS, num_local_experts=4, output_router_logits=True)


CALLS = ("fit", "validate", "predict")
OPTIONS = {"max_epochs": 1, "num_sanity_val_steps": 1}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BERT = {"head": "SequenceClassification", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"head": "Seq2SeqLM", "vocab_size": 67, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
MODULES: dict[str, Callable[[], Wrapped]] = {
    "gpt2": gpt2,
    "gpt2 with a mask": padded("GPT2Config", "GPT2", **NO_DROPOUT),
}
MORE_MODULES: dict[str, Callable[[], Wrapped]] = {
    "mixtral": mixtral,
    "bert with a mask": padded("BertConfig", "HEADS", Classifies, **BERT),
    # The place of the last token, in each row of the logits.
    "gpt2 classifies": padded("GPT2Config", "GPT2", Classifies, **NO_DROPOUT, head="SequenceClassification", pad_token_id=0),
    "mixtral with a mask": padded("MixtralConfig", "HEADS", num_local_experts=4, output_router_logits=True),
    "llama": padded("LlamaConfig", "HEADS", Counts),
    "mistral": padded("MistralConfig", "HEADS", sliding_window=4),
    "bart": padded("BartConfig", "ENCODER_DECODER", Translates, head="Seq2SeqLM", dropout=0.0),
    "t5": padded("T5Config", "ENCODER_DECODER", Translates, **T5),
}


def do_all(folder: str, stages: int, names: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """The results, and what was said of batches that run as one microbatch."""
    modules = {**MODULES, **MORE_MODULES}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        results = {n: go(Run(module=modules[n], calls=CALLS, options=OPTIONS), Path(folder), stages) for n in names}
    return results, [str(warning.message) for warning in told if "microbatch" in str(warning.message)]


def assert_pipelined(pool: RankPool, names: tuple[str, ...], folder: str) -> None:
    """They are as on one device, and in several microbatches."""
    expected, _ = do_all(folder, 0, names)
    ranks = pool.run(do_all, folder, pool.world_size, names, timeout_seconds=400)
    assert [said for _, said in ranks] == [[]] * pool.world_size
    for name in names:
        assert_as_on_one_device([results[name] for results, _ in ranks], expected[name], name)


@pytest.mark.parametrize("name", MODULES)
def test_wrapped_models_are_those_of_one_device(ranks: Callable[[int], RankPool], tmp_path: Path, name: str) -> None:
    """With a mask, too, which is indexed by the numbers of the samples."""
    assert_pipelined(ranks(2), (name,), str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_MODULES)
def test_more_models_are_those_of_one_device(ranks: Callable[[int], RankPool], tmp_path: Path, name: str) -> None:
    assert_pipelined(ranks(2), (name,), str(tmp_path))
