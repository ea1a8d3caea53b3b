"""Steps that call several modules, or one several times."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.steps_case import CLASSES, DIM, WIDTH, Case, Sgd, classifier, cross_entropy, generator, labelled, mlp, unlabelled


class ReadmeAutoencoder(Sgd):
    """The one in Lightning's README."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
        self.decoder = nn.Sequential(nn.Linear(3, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 12))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = F.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.encoder(batch[0].view(batch[0].size(0), -1))


def images() -> list[Any]:
    g = generator()
    return [(torch.randn(8, 1, 3, 4, generator=g), torch.randint(CLASSES, (8,), generator=g)) for _ in range(3)]


class VaeInStep(Sgd):
    """The noise is drawn between the calls, and the KL term uses what the decoder never saw."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(DIM, WIDTH, 8), mlp(4, WIDTH, DIM)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        mu, logvar = self.encoder(x).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        reconstruction = F.mse_loss(self.decoder(z), x)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).mean()
        self.log_dict({"kl": kl, "reconstruction": reconstruction})
        return reconstruction + 0.1 * kl


class VaeWithoutNoise(VaeInStep):
    """The same without random numbers, so that what is left is the two calls and the values that outlive them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        mu, logvar = self.encoder(x).chunk(2, dim=1)
        reconstruction = F.mse_loss(self.decoder(mu + 0.1 * (0.5 * logvar).exp()), x)
        return reconstruction - 0.05 * (1 + logvar - mu.pow(2) - logvar.exp()).mean()


class VaeInForward(VaeInStep):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mu + torch.randn_like(mu) * (0.5 * logvar).exp()), mu, logvar

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        reconstruction, mu, logvar = self(batch[0])
        return F.mse_loss(reconstruction, batch[0]) - 0.05 * (1 + logvar - mu.pow(2) - logvar.exp()).mean()


class Clip(Sgd):
    """Two towers and a parameter that the step itself uses; the loss compares all samples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = mlp(DIM, WIDTH, 4), mlp(DIM, WIDTH, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        image = F.normalize(self.image(batch[0]), dim=-1)
        text = F.normalize(self.text(batch[0] * 0.5 + 1), dim=-1)
        logits = self.logit_scale.exp() * image @ text.t()
        labels = torch.arange(len(image))
        self.log("scale", self.logit_scale)
        return (cross_entropy(logits, labels) + cross_entropy(logits.t(), labels)) / 2


class ClipPerSample(Clip):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        image, text = self.image(batch[0]), self.text(batch[0] * 0.5 + 1)
        return -F.logsigmoid(self.logit_scale * (image * text).sum(1)).mean()


class ScaleAfterOneCall(Sgd):
    """A parameter of the step's own, after a single call."""

    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch[0]) * self.logit_scale.exp(), batch[1])


class Siamese(Sgd):
    """One encoder, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(DIM, WIDTH, WIDTH, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, other = self.encoder(batch[0]), self.encoder(batch[0].flip(1))
        distance = (one - other).pow(2).sum(1)
        loss = torch.where(batch[1] == 0, distance, F.relu(1 - distance)).mean()
        self.log("distance", distance.mean())
        return loss


class SimClr(Siamese):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one = F.normalize(self.encoder(batch[0]), dim=1)
        other = F.normalize(self.encoder(batch[0].flip(1)), dim=1)
        both = torch.cat([one, other])
        similarity = (both @ both.t() / 0.5).masked_fill(torch.eye(len(both), dtype=torch.bool), -1e9)
        return cross_entropy(similarity, torch.arange(len(both)).roll(len(one)))


class ConcatenatedViews(Siamese):
    """Both views go through the encoder in one call, twice as large as the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, other = self.encoder(torch.cat([batch[0], batch[0].flip(1)])).chunk(2)
        return (1 - F.cosine_similarity(one, other)).mean()


class SeveralHeads(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = mlp(DIM, WIDTH, WIDTH)
        self.classes, self.value = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.backbone(batch[0]).tanh()
        first = cross_entropy(self.classes(h), batch[1])
        self.log("class_loss", first)
        second = F.mse_loss(self.value(h).squeeze(1), batch[0].sum(1))
        self.log("value_loss", second)
        return first + 0.5 * second


class TeacherBefore(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = classifier().requires_grad_(False).eval(), classifier()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0]).softmax(1)
        return F.kl_div(self.student(batch[0]).log_softmax(1), target, reduction="batchmean")


class TeacherAfter(TeacherBefore):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        log_probabilities = self.student(batch[0]).log_softmax(1)
        with torch.no_grad():
            target = self.teacher(batch[0]).softmax(1)
        return F.kl_div(log_probabilities, target, reduction="batchmean")


class MomentumTeacher(TeacherBefore):
    """The teacher follows the student, in a hook, and is called under ``no_grad`` although it could be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


class Perceptual(Sgd):
    """A frozen net compares the output with the input; gradients flow through it."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = mlp(DIM, WIDTH, WIDTH, DIM)
        self.features = mlp(DIM, WIDTH, 5).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.generator(batch[0])
        return F.mse_loss(self.features(output), self.features(batch[0])) + 0.1 * F.l1_loss(output, batch[0])


class Powers(Sgd):
    """Powers written as operators, in place too, between the model's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(DIM, WIDTH, WIDTH), mlp(WIDTH, WIDTH, DIM)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = 0.5 + 1.5 ** self.encoder(batch[0]) ** 2
        hidden **= 2
        return ((self.decoder(hidden) - batch[0]) ** 2).mean()


class FrozenBackbone(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = mlp(DIM, WIDTH, WIDTH).requires_grad_(False)
        self.head = mlp(WIDTH, WIDTH, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            features = self.backbone(batch[0])
        return cross_entropy(self.head(features), batch[1])


class FrozenBackboneWithGradient(FrozenBackbone):
    """Frozen, and nobody bothered to call it under ``no_grad``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.head(self.backbone(batch[0])), batch[1])


class UsedNowAndThen(Sgd):
    """Looks at what lies between its calls, and at parts of a result, with some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(DIM, WIDTH, WIDTH, 4), mlp(4, WIDTH, WIDTH, DIM)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.encoder(batch)
        out = self.decoder(hidden)
        if batch_idx == 1:
            self.log("hidden", hidden.square().mean())
        return (out - batch).square().mean()


class ByCounter(UsedNowAndThen):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.encoder(batch)
        return (self.decoder(hidden) - batch).square().mean() + self.penalty(hidden)

    def penalty(self, hidden: Tensor) -> Any:
        return hidden.square().mean() if self.global_step > 0 else 0.0


class Result(nn.Module):
    """Has more in its result than a loss needs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(DIM, WIDTH, WIDTH), mlp(WIDTH, WIDTH, DIM)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.body(x)
        out = self.head(hidden)
        return {"loss": (out - x).square().mean(), "hidden": hidden, "more": [out, hidden * 2]}


class PartOfAResult(Sgd):
    """Other parts in validation than in training, and in training now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Result()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        result = self.model(batch)
        if batch_idx % 2:
            self.log("hidden", result["hidden"].mean())
        return result["loss"]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.model(batch)["loss"])

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", self.model(batch)["more"][1].mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model(batch)


CASES: dict[str, Case] = {
    "readme_autoencoder": Case(make=ReadmeAutoencoder, batches=images, microbatches=(1, 4), evaluations=("predict",)),
    "vae_in_step": Case(make=VaeInStep, batches=labelled, microbatches=(1, 4)),
    "vae_without_noise": Case(make=VaeWithoutNoise, batches=labelled, microbatches=(1, 4)),
    "vae_in_forward": Case(make=VaeInForward, batches=labelled, microbatches=(1, 4)),
    "clip": Case(make=Clip, batches=labelled, microbatches=(1,)),
    "clip_per_sample": Case(make=ClipPerSample, batches=labelled, microbatches=(1, 2, 4)),
    "scale_after_one_call": Case(make=ScaleAfterOneCall, batches=labelled, microbatches=(2,)),
    "siamese": Case(make=Siamese, batches=labelled, microbatches=(4,)),
    "simclr": Case(make=SimClr, batches=labelled, microbatches=(1,)),
    "concatenated_views": Case(make=ConcatenatedViews, batches=labelled, microbatches=(1, 4)),
    "several_heads": Case(make=SeveralHeads, batches=labelled, microbatches=(1, 4)),
    "teacher_before": Case(make=TeacherBefore, batches=labelled, microbatches=(1, 4)),
    "teacher_after": Case(make=TeacherAfter, batches=labelled, microbatches=(1, 4)),
    "momentum_teacher": Case(make=MomentumTeacher, batches=labelled, microbatches=(2,)),
    "perceptual": Case(make=Perceptual, batches=labelled, microbatches=(1, 4)),
    "powers": Case(make=Powers, batches=labelled, microbatches=(1, 4)),
    "frozen_backbone": Case(make=FrozenBackbone, batches=labelled, microbatches=(1, 4)),
    "frozen_backbone_with_gradient": Case(make=FrozenBackboneWithGradient, batches=labelled, microbatches=(2,)),
    "used_now_and_then": Case(make=UsedNowAndThen, batches=unlabelled, microbatches=(2,), stages=3),
    "used_by_counter": Case(make=ByCounter, batches=unlabelled, microbatches=(2,), stages=3),
    "part_of_a_result": Case(
        make=PartOfAResult, batches=unlabelled, microbatches=(2,), stages=3, evaluations=("validate", "test", "predict")
    ),
}
