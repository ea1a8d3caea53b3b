"""A model in Hugging Face's manner inside a LightningModule: each step calls another level of it."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.steps_case import CLASSES, DIM, WIDTH, Case, Sgd, generator, mlp


class Output(dict[str, Any]):
    """A result whose entries are attributes, as ``ModelOutput`` is."""

    __getattr__ = dict.__getitem__


class Backbone(nn.Module):
    """The part that a user may call alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedder = nn.Linear(DIM, WIDTH)
        self.layers = nn.ModuleList(mlp(WIDTH, WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor | None = None, embedded: Tensor | None = None) -> Output:
        hidden = self.embedder(x) if embedded is None else embedded
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return Output(hidden=hidden)


class Pretrained(nn.Module):
    """Labels in, loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Backbone()
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.classifier(self.base(x).hidden)
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return Output(loss=loss, logits=logits)


class ModelThenSelf(Sgd):
    """Training calls the model, the other steps the module around it, and parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Pretrained()

    def forward(self, **batch: Any) -> Output:
        return self.model(**batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self(**batch)
        self.log("val_loss", outputs.loss)
        self.log("val_accuracy", (outputs.logits.argmax(1) == batch["labels"]).float().mean())
        return outputs.loss  # type: ignore[no-any-return]

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_norm", self.model.base(batch["x"]).hidden.norm(dim=1).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        embedded = torch.tanh(self.model.base.embedder(batch["x"]))
        return self.model.base(embedded=embedded).hidden  # type: ignore[no-any-return]


class SelfThenModel(ModelThenSelf):
    """Training calls the module, whose forward takes the model's result apart, the other steps the model and parts of it."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> tuple[Tensor | None, Tensor]:  # type: ignore[override]
        outputs = self.model(x, labels=labels)
        return outputs.loss, outputs.logits.softmax(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, scores = self(**batch)
        self.log("score", scores.amax(1).mean())
        return loss  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model.base.embedder(batch["x"])  # type: ignore[no-any-return]


class FrozenBase(ModelThenSelf):
    """The head alone is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.model.base.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Gpt2(ModelThenSelf):
    """The real thing, tiny."""

    def __init__(self) -> None:
        super().__init__()
        pretrained = importlib.import_module("tests.zoo.pretrained")  # imports transformers
        torch.manual_seed(2)
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = pretrained.transformers.GPT2Config(**pretrained.GPT2, **no_dropout)
        self.model = pretrained.transformers.AutoModelForCausalLM.from_config(config)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(**batch).loss)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_norm", self.model.transformer(batch["input_ids"]).last_hidden_state.norm(dim=-1).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        embedded = self.model.get_input_embeddings()(batch["input_ids"])
        return self.model.transformer(inputs_embeds=embedded).last_hidden_state.mean(dim=1)  # type: ignore[no-any-return]


def labelled_dicts() -> list[Any]:
    """Features and classes by name."""
    g = generator()
    return [{"x": torch.randn(n, DIM, generator=g), "labels": torch.randint(CLASSES, (n,), generator=g)} for n in (8, 8, 5)]


def texts() -> list[Any]:
    """Token numbers, which are their own labels."""
    g = generator()
    tokens = [torch.randint(3, 60, (4, 7), generator=g) for _ in range(2)]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in tokens]


ALL = ("validate", "test", "predict")
SANITY: dict[str, Any] = {"num_sanity_val_steps": 1}

CASES: dict[str, Case] = {
    "model_then_self": Case(
        make=ModelThenSelf, batches=labelled_dicts, microbatches=(1, 2), evaluations=ALL, trainer=SANITY, always=True
    ),
    "self_then_model": Case(make=SelfThenModel, batches=labelled_dicts, microbatches=(2,), evaluations=ALL, trainer=SANITY),
    "self_then_model_three_stages": Case(
        make=SelfThenModel, batches=labelled_dicts, microbatches=(1,), evaluations=ALL, trainer=SANITY, stages=3, always=True
    ),
    "frozen_base": Case(make=FrozenBase, batches=labelled_dicts, microbatches=(2,), evaluations=ALL, trainer=SANITY),
    "gpt2": Case(make=Gpt2, batches=texts, microbatches=(2,), evaluations=ALL, trainer=SANITY, always=True),
}
