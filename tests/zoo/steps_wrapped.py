"""A model in Hugging Face's manner inside a LightningModule: each step calls another level of it."""

from __future__ import annotations

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


class CachesTables(nn.Module):
    """Makes a table and a mask on its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.embedder = nn.Linear(DIM, WIDTH)
        self.layers = nn.ModuleList(mlp(WIDTH, WIDTH, WIDTH) for _ in range(4))
        self.classifier = nn.Linear(WIDTH, CLASSES)
        self.table: Tensor | None = None
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Output:
        hidden = self.embedder(x)
        if self.table is None or self.table.shape[0] != hidden.shape[1]:
            self.table = torch.sin(torch.arange(hidden.shape[1]) / 3.0).to(hidden)
        if WIDTH not in self.masks:
            self.masks[WIDTH] = torch.arange(WIDTH) % 3 == 0
        for layer in self.layers:
            hidden = layer(hidden + self.table).masked_fill(self.masks[WIDTH], 0.0)
        logits = self.classifier(hidden)
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return Output(loss=loss, logits=logits, base=hidden)


class CachesOnFirstCall(ModelThenSelf):
    """What the first call sets is there afterwards, too."""

    def __init__(self) -> None:
        super().__init__()
        self.model = CachesTables()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_norm", self.model(batch["x"]).base.norm(dim=1).mean())
        self.log("table", self.model.table.sum())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(**batch).logits.softmax(1)  # type: ignore[no-any-return]


def labelled_dicts() -> list[Any]:
    """Features and classes by name."""
    g = generator()
    return [{"x": torch.randn(n, DIM, generator=g), "labels": torch.randint(CLASSES, (n,), generator=g)} for n in (8, 8, 5)]


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
    "caches_on_first_call": Case(
        make=CachesOnFirstCall, batches=labelled_dicts, microbatches=(2,), evaluations=ALL, trainer=SANITY, always=True
    ),
}
