"""Steps and models that draw random numbers: one device's numbers are the only right ones, for any number of microbatches."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.steps_case import CLASSES, DIM, WIDTH, Case, Sgd, classifier, cross_entropy, labelled, mlp, unlabelled


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(10, DIM)
        self.net = mlp(DIM, WIDTH, WIDTH, DIM)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(x + self.time(t))


class Diffusion(Sgd):
    """Noise and time are used before the model, and the noise again in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Denoiser()
        self.register_buffer("alphas", torch.linspace(0.99, 0.1, 10))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        noise = torch.randn_like(batch)
        t = torch.randint(0, 10, (len(batch),), device=batch.device)
        alpha = self.alphas[t].unsqueeze(1)
        noisy = alpha.sqrt() * batch + (1 - alpha).sqrt() * noise
        loss = F.mse_loss(self.model(noisy, t), noise)
        self.log("mean_time", t.float().mean())
        return loss


class NoiseAfterTheModel(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.model = classifier()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        return cross_entropy(logits + 0.3 * torch.randn_like(logits), batch[1])


class NoiseAugmentation(NoiseAfterTheModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] + 0.1 * torch.randn(batch[0].shape)
        return cross_entropy(self.model(x), batch[1])


class Mixup(NoiseAfterTheModel):
    """Mixes samples of the whole batch, so one microbatch it must be."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        share, order = float(np.random.beta(0.4, 0.4)), torch.randperm(len(x))
        logits = self.model(share * x + (1 - share) * x[order])
        self.log("share", share)
        return share * cross_entropy(logits, y) + (1 - share) * cross_entropy(logits, y[order])


class PythonChoice(NoiseAfterTheModel):
    """One choice for the whole batch, before the model, and another after it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].flip(1) if random.random() < 0.5 else batch[0] * random.choice([0.5, 2.0])
        loss = cross_entropy(self.model(x), batch[1])
        return loss * random.choice([1.0, 3.0])


class DropoutModel(NoiseAfterTheModel):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(DIM, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, CLASSES)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.model(batch[0]), batch[1])


class NoiseInForward(NoiseAfterTheModel):
    def forward(self, x: Tensor) -> Tensor:
        return self.model(x + 0.2 * torch.randn_like(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])


class MasksInputs(NoiseAfterTheModel):
    """Coins decide which features are hidden, as in masked modelling."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = torch.bernoulli(torch.full(batch[0].shape, 0.4)).bool()
        return cross_entropy(self.model(batch[0].masked_fill(hidden, 0.0)), batch[1])


class OwnGenerator(NoiseAfterTheModel):
    """A generator of the module's own, drawn from once in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] + 0.1 * torch.randn(batch[0].shape, generator=self.generator)
        return cross_entropy(self.model(x), batch[1])


class SamplesActions(Sgd):
    """As in reinforcement learning: actions are drawn from what the model gives."""

    def __init__(self) -> None:
        super().__init__()
        self.model = classifier()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        policy = torch.distributions.Categorical(logits=self.model(batch[0]))
        actions = policy.sample()
        return -(policy.log_prob(actions) * (actions == batch[1]).float()).mean()


CASES: dict[str, Case] = {
    "diffusion": Case(make=Diffusion, batches=unlabelled, microbatches=(1, 2)),
    "noise_after_the_model": Case(make=NoiseAfterTheModel, batches=labelled, microbatches=(1, 2)),
    "noise_augmentation": Case(make=NoiseAugmentation, batches=labelled, microbatches=(1, 2)),
    "mixup": Case(make=Mixup, batches=labelled, microbatches=(1,)),
    "python_choice": Case(make=PythonChoice, batches=labelled, microbatches=(1, 2)),
    "dropout": Case(make=DropoutModel, batches=labelled, microbatches=(1, 2)),
    "noise_in_forward": Case(make=NoiseInForward, batches=labelled, microbatches=(1, 2)),
    "masks_inputs": Case(make=MasksInputs, batches=labelled, microbatches=(1, 4)),
    "own_generator": Case(make=OwnGenerator, batches=labelled, microbatches=(1, 2)),
    "samples_actions": Case(make=SamplesActions, batches=labelled, microbatches=(1, 4)),
}
