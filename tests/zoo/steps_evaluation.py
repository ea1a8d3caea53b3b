"""Validation, test and predict steps that use the model in another way than training does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.steps_case import CLASSES, DIM, WIDTH, Case, Sgd, classifier, cross_entropy, generator, labelled, mlp, unlabelled


class Everywhere(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.model = classifier()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.log("val_loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch[0])
        self.log_dict({"accuracy": (logits.argmax(1) == batch[1]).float().mean(), "test_loss": cross_entropy(logits, batch[1])})

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        logits = self.model(batch[0])
        return {"classes": logits.argmax(1), "probabilities": logits.softmax(1), "names": [str(y) for y in batch[1].tolist()]}


@dataclass
class Prediction:
    classes: Tensor
    names: list[str]


class PredictsDataclass(Everywhere):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        classes = self.model(batch[0]).argmax(1)
        return Prediction(classes, [str(c) for c in classes.tolist()])


class PredictsArrays(Everywhere):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch[0])
        return logits.numpy(), logits.argmax(1).tolist()


class CollectsForTheEpoch(Everywhere):
    """Gathers all predictions and scores them at the end, as Lightning's migration guide says."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.found.append(self.model(batch[0]).softmax(1))

    def on_validation_epoch_end(self) -> None:
        self.log("spread", torch.cat(self.found).std(0).mean())
        self.found.clear()


class OtherOutputs(Everywhere):
    """The forward returns more where it is asked to."""

    def forward(self, x: Tensor, with_hidden: bool = False) -> Any:
        hidden = self.model[:3](x)
        logits = self.model[3:](hidden)
        return (logits, hidden) if with_hidden else logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        logits, hidden = self(batch[0], with_hidden=True)
        self.log_dict({"val_loss": cross_entropy(logits, batch[1]), "hidden": hidden.pow(2).mean()})

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0], with_hidden=True)


class OnlyTheEncoder(Sgd):
    """Training calls the whole model, evaluation only a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = mlp(DIM, WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.encoder(batch[0])


class TwoCallsInValidation(OnlyTheEncoder):
    """Test-time augmentation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = (self(batch[0]) + self(batch[0] * 0.9)) / 2
        self.log("val_loss", cross_entropy(logits, batch[1]))


class ValidatesGraphs(Sgd):
    """Rows of several graphs in one batch, which cannot be split; validation calls the encoder again, and so runs whole."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = mlp(DIM, WIDTH, 4), nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows, graph, y = batch
        sums = torch.zeros(len(y), 4).index_add(0, graph, self.encoder(rows))
        return (self.head(sums).squeeze(-1) - y).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.training_step(batch, batch_idx)
        self.log("val_loss", loss, batch_size=4)
        self.log("size", self.encoder(batch[0] * loss).norm(), batch_size=4)


def graphs() -> list[Any]:
    """Batches of four graphs: their rows, the graph of each row, and a target for each graph."""
    g = generator()
    return [(torch.randn(12, DIM, generator=g), torch.arange(12) // 3, torch.randn(4, generator=g)) for _ in range(3)]


class EncoderThenHead(OnlyTheEncoder):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.encoder(batch[0])
        self.log_dict({"val_loss": cross_entropy(self.head(hidden), batch[1]), "norm": hidden.norm(dim=1).mean()})


class OtherInputs(OnlyTheEncoder):
    """Labels in training, none in prediction; inputs of another rank."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = self.head(self.encoder(x))
        return logits if y is None else cross_entropy(logits.reshape(-1, CLASSES), y.reshape(-1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(*batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", self(x.unsqueeze(1), y.unsqueeze(1)))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)


class NoModelInValidation(OnlyTheEncoder):
    """Logs something that needs no model."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean target", batch[1].float().mean())


class Generates(Sgd):
    """Prediction calls the model as often as it makes tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.body, self.head = nn.Embedding(9, WIDTH), mlp(WIDTH, WIDTH, WIDTH), nn.Linear(WIDTH, 9)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.token(ids)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        ids = batch
        for _ in range(3):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], dim=1)
        return ids


class Translates(Sgd):
    """The right tokens go into the decoder in training, its own in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.encoder = nn.Embedding(9, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.target, self.decoder = nn.Embedding(9, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 9)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        _, state = self.encoder(self.source(source))
        return self.head(self.decoder(self.target(target), state)[0])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        target = batch.flip(1)
        return cross_entropy(self(batch, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        _, state = self.encoder(self.source(batch))
        token, found = batch[:, -1:], []
        for _ in range(batch.shape[1] - 1):
            decoded, state = self.decoder(self.target(token), state)
            token = self.head(decoded).argmax(-1)
            found.append(token)
        self.log("accuracy", (torch.cat(found, dim=1) == batch.flip(1)[:, 1:]).float().mean())


class CallsCounted(nn.Linear):
    """Counts its calls in a buffer, in evaluation only."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.calls += 1
        return super().forward(x)


class Denoises(Sgd):
    """Validation logs the loss, and then the first batch's samples go through the model again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = CallsCounted(DIM, WIDTH), mlp(WIDTH, WIDTH, WIDTH, DIM)
        self.num_validated = 0
        self.samples: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.first(x).tanh())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        noise = torch.randn_like(batch)
        return nn.functional.mse_loss(self(batch + noise), noise)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.num_validated += 1
        noise = torch.randn_like(batch)
        self.log("val_loss", nn.functional.mse_loss(self(batch + noise), noise))
        if batch_idx == 0:
            x = torch.randn(3, DIM)
            while x.norm() > 0 and len(self.samples) < 4:
                x = x - 0.1 * self(x) + 0.01 * torch.randn_like(x)
                self.samples.append(x)

    def on_validation_epoch_end(self) -> None:
        self.log_dict({"validated": float(self.num_validated), "spread": torch.cat(self.samples).std()})
        self.log("calls", self.first.calls.sum())
        self.samples.clear()


class DecodesFirst(OnlyTheEncoder):
    """Validation goes backwards through the model."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = mlp(DIM, WIDTH, DIM), mlp(DIM, WIDTH, CLASSES)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.head(batch[0])
        self.log("cycle", (self.encoder(batch[0] * logits.mean(1, keepdim=True))).norm())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.encoder(batch[0] * self.head(batch[0]).mean())


def sentences() -> list[Any]:
    g = torch.Generator().manual_seed(3)
    return [torch.randint(9, (8, 5), generator=g) for _ in range(3)]


ALL = ("validate", "test", "predict")
VAL_PREDICT = ("validate", "predict")

CASES: dict[str, Case] = {
    "all_steps": Case(make=Everywhere, batches=lambda: labelled(8, 8, 5), microbatches=(1, 4), evaluations=ALL),
    "predicts_dataclass": Case(make=PredictsDataclass, batches=labelled, microbatches=(2,), evaluations=("predict",)),
    "predicts_arrays": Case(make=PredictsArrays, batches=labelled, microbatches=(2,), evaluations=("predict",)),
    "collects_for_the_epoch": Case(make=CollectsForTheEpoch, batches=labelled, microbatches=(2,), evaluations=("validate",)),
    "other_outputs": Case(make=OtherOutputs, batches=labelled, microbatches=(2,), evaluations=VAL_PREDICT),
    "only_the_encoder": Case(make=OnlyTheEncoder, batches=labelled, microbatches=(2,), evaluations=("predict",)),
    "two_calls_in_validation": Case(make=TwoCallsInValidation, batches=labelled, microbatches=(2,), evaluations=("validate",)),
    "validates_graphs": Case(make=ValidatesGraphs, batches=graphs, microbatches=(1,), evaluations=("validate",), always=True),
    "encoder_then_head_in_validation": Case(
        make=EncoderThenHead, batches=labelled, microbatches=(2,), evaluations=("validate",)
    ),
    "other_inputs": Case(make=OtherInputs, batches=labelled, microbatches=(2,), evaluations=VAL_PREDICT),
    "no_model_in_validation": Case(make=NoModelInValidation, batches=labelled, microbatches=(2,), evaluations=("validate",)),
    "translates": Case(make=Translates, batches=sentences, microbatches=(1, 2), evaluations=("validate",)),
    "denoises": Case(make=Denoises, batches=unlabelled, microbatches=(1, 2), evaluations=("validate",)),
    "decodes_first": Case(make=DecodesFirst, batches=labelled, microbatches=(2,), stages=3, evaluations=VAL_PREDICT),
    "generates": Case(make=Generates, batches=sentences, microbatches=(2,), evaluations=("predict",)),
}
