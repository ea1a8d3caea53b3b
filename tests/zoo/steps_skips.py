"""Steps that call the model for some batches only, and steps that call none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.steps_case import CLASSES, DIM, WIDTH, Case, Sgd, classifier, cross_entropy, labelled, mlp


class Plain(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.model = classifier()


class SkipsAfter(Plain):
    """Calls the model, and then returns None."""

    skipped: tuple[int, ...] = (1,)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return None if batch_idx in self.skipped else loss


class SkipsBefore(Plain):
    """Returns before the model is called."""

    skipped: tuple[int, ...] = (1,)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if batch_idx in self.skipped:
            return None
        return cross_entropy(self.model(batch[0]), batch[1])


class SkipsTheFirst(SkipsBefore):
    skipped = (0, 3)


class SkipsTheLast(SkipsBefore):
    skipped = (2,)


class SkipsTheFirstAfter(SkipsAfter):
    skipped = (0, 1)


class SkipsWithDropout(SkipsBefore):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(DIM, WIDTH), nn.Dropout(0.4), mlp(WIDTH, WIDTH, WIDTH, CLASSES), nn.Dropout(0.1))


class SkipsWhatIsNotFinite(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        if batch_idx == 1:
            loss = loss / 0.0
        return loss if torch.isfinite(loss) else None


class SkipsOneSample(Plain):
    """With several microbatches, some of them are skipped, and others not."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        return None if len(batch[0]) < 3 else loss


class TwoCalls(Sgd):
    """An encoder and a decoder; ``when`` says where a batch is left."""

    when = "before"

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(DIM, WIDTH, 4), mlp(4, WIDTH, DIM)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if batch_idx == 1 and self.when == "before":
            self.log("left", 1.0)
            return None
        x = batch[0] * 2
        loss = (self.decoder(self.encoder(x)) - x).square().mean()
        if batch_idx == 1 and self.when == "after":
            return None
        return loss


class TwoCallsThenNone(TwoCalls):
    when = "after"


class ValidatesSome(Plain):
    """Validation calls the model for every other batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", batch[0].mean())
        if batch_idx % 2 == 0:
            return
        self.log("val", cross_entropy(self.model(batch[0]), batch[1]))


class ValidatesWithoutModel(Plain):
    """Validation needs no model, or only a parameter; it draws, and keeps something."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.model(batch[0]) * self.scale, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("noise", torch.rand(()))
        self.seen.append(float(batch[0].mean()))

    def on_validation_epoch_end(self) -> None:
        self.log("seen", sum(self.seen))
        self.seen.clear()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("scale", self.scale)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[0].sum(dim=1)


EVERYWHERE = ("validate", "test", "predict")

CASES: dict[str, Case] = {
    "skips_after_the_call": Case(make=SkipsAfter, batches=labelled, microbatches=(1, 4)),
    "skips_before_the_call": Case(make=SkipsBefore, batches=labelled, microbatches=(1, 4)),
    "skips_on_three_stages": Case(make=SkipsBefore, batches=labelled, microbatches=(4,), stages=3),
    "skips_the_first": Case(make=SkipsTheFirst, batches=lambda: labelled(8, 8, 7, 8, 8), microbatches=(3,)),
    "skips_the_first_after": Case(make=SkipsTheFirstAfter, batches=lambda: labelled(8, 8, 7), microbatches=(2,)),
    "skips_a_new_shape": Case(make=SkipsTheLast, batches=lambda: labelled(8, 8, 5), microbatches=(2,)),
    "skips_with_dropout": Case(make=SkipsWithDropout, batches=labelled, microbatches=(1,)),
    "skips_and_accumulates": Case(
        make=SkipsBefore,
        batches=lambda: labelled(8, 8, 8, 8),
        microbatches=(2,),
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "skips_what_is_not_finite": Case(make=SkipsWhatIsNotFinite, batches=labelled, microbatches=(1, 4)),
    "skips_some_microbatches": Case(make=SkipsOneSample, batches=lambda: labelled(8, 5), microbatches=(2,)),
    "skips_several_calls": Case(make=TwoCalls, batches=labelled, microbatches=(1, 2)),
    "skips_after_several_calls": Case(make=TwoCallsThenNone, batches=labelled, microbatches=(2,)),
    "validates_some": Case(
        make=ValidatesSome, batches=lambda: labelled(8, 8, 5, 5), microbatches=(2,), evaluations=EVERYWHERE[:1]
    ),
    "validates_without_model": Case(
        make=ValidatesWithoutModel, batches=lambda: labelled(8, 8, 5), microbatches=(1, 2), evaluations=EVERYWHERE
    ),
}
