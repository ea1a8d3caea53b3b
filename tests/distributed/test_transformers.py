"""Models of transformers, wrapped as most people wrap them, on two ranks and on one device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.distributed.pool import RankPool
from tests.distributed.runs import Run, assert_as_on_one_device, go


class Wrapped(L.LightningModule):
    """Training calls the model, validation the module, prediction a part of the model."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.pretrained = importlib.import_module("tests.zoo.pretrained")  # imports transformers
        config = getattr(self.pretrained.transformers, kind)(**options)
        torch.manual_seed(2)
        self.model = self.pretrained.transformers.AutoModelForCausalLM.from_config(config)

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


def gpt2() -> Wrapped:
    pretrained = importlib.import_module("tests.zoo.pretrained")
    return Wrapped("GPT2Config", **pretrained.GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def mixtral() -> Wrapped:
    """Its loss uses what hooks collect from the routers, which are installed by the first call."""
    pretrained = importlib.import_module("tests.zoo.pretrained")
    return Wrapped("MixtralConfig", **pretrained.HEADS, num_local_experts=4, output_router_logits=True)


CALLS = ("fit", "validate", "predict")
OPTIONS = {"max_epochs": 1, "num_sanity_val_steps": 1}
RUNS = {
    "gpt2": Run(module=gpt2, calls=CALLS, options=OPTIONS),
    "mixtral": Run(module=mixtral, calls=CALLS, options=OPTIONS),
}


def do_all(folder: str, stages: int) -> dict[str, Any]:
    return {name: go(run, Path(folder), stages) for name, run in RUNS.items()}


def test_wrapped_models_are_those_of_one_device(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    expected = do_all(str(tmp_path), 0)
    results = ranks(2).run(do_all, str(tmp_path), 2, timeout_seconds=300)
    for name in RUNS:
        assert_as_on_one_device([result[name] for result in results], expected[name], name)
