"""Steps that call the model once, in every form that people write, on every form of batch."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tests.zoo.steps_case import CLASSES, DIM, WIDTH, Case, Sgd, classifier, cross_entropy, generator, labelled, mlp, tokens


class SelfCall(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss


class ModelCall(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.model = classifier()

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        logits = self.model(x)
        self.log("accuracy", (logits.argmax(1) == y).float().mean(), prog_bar=True)
        return {"loss": cross_entropy(logits, y)}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class DirectForward(ModelCall):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.model.forward(batch[0]), batch[1])


class SuperForward(SelfCall):
    """Lightning's own docs call ``self.forward(x)``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.forward(batch[0]), batch[1])


class WithLabels(nn.Module):
    """A model in Hugging Face's manner: labels in, loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(DIM, WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.body(inputs if mask is None else inputs * mask))
        loss = None if labels is None else cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "hidden": None}


class HfDict(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.model = WithLabels()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.model(**batch)
        self.log("mean_logit", out["logits"].mean())
        return out["loss"]


@dataclass
class ModelOutput:
    loss: Tensor | None
    logits: Tensor


class WithDataclass(WithLabels):
    def forward(self, inputs: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        out = super().forward(inputs, mask, labels)
        return ModelOutput(out["loss"], out["logits"])


class HfDataclass(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.model = WithDataclass()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.model(**batch)
        self.log("mean_logit", out.logits.mean())
        return out.loss


def hf_batches() -> list[Any]:
    return [{"inputs": x, "mask": (x > -1).float(), "labels": y} for x, y in labelled()]


def encodings() -> list[Any]:
    return [UserDict(batch) for batch in hf_batches()]


class NestedBatch(SelfCall):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x, _), target = batch["image"]["views"], batch["target"]
        assert batch["split"] == "train"
        assert batch["nothing"] is None
        return cross_entropy(self(x), target[0]) * batch["factor"]


def nested_batches() -> list[Any]:
    return [
        {
            "image": {"views": [x, x * 2], "size": (3, 4)},
            "target": (y, None),
            "split": "train",
            "nothing": None,
            "factor": 2,
            "scale": torch.tensor(0.5),
        }
        for x, y in labelled(12, 12, 12)
    ]


class Sample(NamedTuple):
    x: Tensor
    y: Tensor
    name: str


class NamedTupleBatch(SelfCall):
    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch.x), batch.y)


@dataclass
class Record:
    x: Tensor
    y: Tensor
    names: list[str]


class DataclassBatch(SelfCall):
    def training_step(self, batch: Record, batch_idx: int) -> Tensor:
        assert len(batch.names) == len(batch.x)
        return cross_entropy(self(batch.x), batch.y)


class StringsPerSample(SelfCall):
    """Each sample's weight is in its name, so a name that lands beside another sample changes the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = nn.functional.cross_entropy(self(batch["x"]), batch["y"], reduction="none")
        weights = torch.tensor([float(len(name)) for name in batch["names"]])
        return (losses * weights).mean()


def named_samples() -> list[Any]:
    return [{"x": x, "y": y, "names": ["n" * (1 + i % 5) for i in range(len(x))], "ids": None} for x, y in labelled(8, 8, 8)]


class ArraysPerSample(StringsPerSample):
    """Words and numpy arrays with an entry for each sample, beside a list that has another length."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = nn.functional.cross_entropy(self(batch["x"]), batch["y"], reduction="none")
        weights = torch.tensor([float(len(words)) for words in batch["words"]]) + torch.from_numpy(batch["weights"])
        assert batch["classes"] == ["a", "b", "c"]
        return (losses * weights).mean()


def worded_samples() -> list[Any]:
    return [
        {
            "x": x,
            "y": y,
            "words": [["w"] * (i % 3) for i in range(8)],
            "weights": np.linspace(0, 1, 8, dtype=np.float32),
            "classes": ["a", "b", "c"],
        }
        for x, y in labelled()
    ]


class ListBatch(SelfCall):
    def training_step(self, batch: list[Any], batch_idx: int) -> Tensor:
        x, y, nothing, power = batch
        assert nothing is None
        return cross_entropy(self(x), y) ** power


class PythonLabels(SelfCall):
    """Labels that a collate function left as a list of ints."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch["x"]), torch.tensor(batch["y"]))


class KeywordArguments(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()

    def forward(self, x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None, mode: str = "sum") -> Tensor:
        h = x * scale if mask is None else x * mask
        return self.net(h) * (2.0 if mode == "double" else 1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self(x=batch[0], scale=0.5, mode="double"), batch[1])


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = mlp(DIM, WIDTH, 4), mlp(4, WIDTH, DIM)

    def encode(self, x: Tensor) -> Tensor:
        return self.down(x)

    def decode(self, z: Tensor) -> Tensor:
        return self.up(z)


class MethodCalls(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.model = EncoderDecoder()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self.model.encode(batch[0])
        self.log("code", z.abs().mean())
        return nn.functional.mse_loss(self.model.decode(z), batch[0])


class TokenModel(Sgd):
    """The shift of a language model is made in the step, from one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, WIDTH)
        self.body, self.head = mlp(WIDTH, WIDTH, WIDTH), nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.token(ids)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch[:, :-1])
        return cross_entropy(logits.reshape(-1, 11), batch[:, 1:].reshape(-1))


class Padded(TokenModel):
    """Every batch is padded to a length of its own; the mean is over samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch["ids"])
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch["ids"], reduction="none") * batch["mask"]
        loss = (losses.sum(1) / batch["mask"].sum(1)).mean()
        self.log("length", float(batch["ids"].shape[1]))
        return loss


def padded_batches() -> list[Any]:
    g = generator()
    found = []
    for length in (5, 9, 7):
        lengths = torch.randint(2, length + 1, (8, 1), generator=g)
        ids = torch.randint(11, (8, length), generator=g)
        found.append({"ids": ids, "mask": (torch.arange(length) < lengths).float()})
    return found


CASES: dict[str, Case] = {
    "self_call": Case(make=SelfCall, batches=labelled, microbatches=(1, 2, 4)),
    "model_call": Case(make=ModelCall, batches=labelled, microbatches=(4,)),
    "direct_forward": Case(make=DirectForward, batches=labelled, microbatches=(1, 2)),
    "self_forward": Case(make=SuperForward, batches=labelled, microbatches=(2,)),
    "hf_dict": Case(make=HfDict, batches=hf_batches, microbatches=(1, 4)),
    "hf_dataclass": Case(make=HfDataclass, batches=hf_batches, microbatches=(2,)),
    "user_dict_batch": Case(make=HfDict, batches=encodings, microbatches=(1, 4)),
    "nested_batch": Case(make=NestedBatch, batches=nested_batches, microbatches=(3,)),
    "named_tuple_batch": Case(
        make=NamedTupleBatch, batches=lambda: [Sample(x, y, "train") for x, y in labelled()], microbatches=(2,)
    ),
    "dataclass_batch": Case(
        make=DataclassBatch,
        batches=lambda: [Record(x, y, [f"sample {i}" for i in range(len(x))]) for x, y in labelled()],
        microbatches=(1, 2),
    ),
    "strings_per_sample": Case(make=StringsPerSample, batches=named_samples, microbatches=(1, 2, 4)),
    "arrays_per_sample": Case(make=ArraysPerSample, batches=worded_samples, microbatches=(2,)),
    "list_batch": Case(make=ListBatch, batches=lambda: [[x, y, None, 1] for x, y in labelled()], microbatches=(2,)),
    "python_labels": Case(
        make=PythonLabels, batches=lambda: [{"x": x, "y": y.tolist()} for x, y in labelled()], microbatches=(1, 4)
    ),
    "keyword_arguments": Case(make=KeywordArguments, batches=labelled, microbatches=(2,)),
    "method_calls": Case(make=MethodCalls, batches=labelled, microbatches=(1, 4)),
    "shifted_tokens": Case(make=TokenModel, batches=lambda: tokens((8, 6), (8, 6), (8, 6)), microbatches=(4,)),
    "padded_lengths": Case(make=Padded, batches=padded_batches, microbatches=(1, 4)),
    "smaller_last_batch": Case(make=SelfCall, batches=lambda: labelled(12, 12, 7), microbatches=(1, 4, 5)),
    "last_batch_of_one": Case(make=SelfCall, batches=lambda: labelled(8, 8, 1), microbatches=(1, 2)),
    "three_stages": Case(make=SelfCall, batches=lambda: labelled(9, 9, 5), microbatches=(3,), stages=3),
}
