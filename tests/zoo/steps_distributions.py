"""Distributions of torch between the parts of a model: variational autoencoders, policies, mixtures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import (
    Categorical,
    Independent,
    MixtureSameFamily,
    Normal,
    TanhTransform,
    TransformedDistribution,
    kl_divergence,
)
from torch.nn import functional

from tests.zoo.steps_case import CLASSES, DIM, WIDTH, Case, Sgd, labelled, mlp

LATENT = 4


class Variational(Sgd):
    """The whole autoencoder is the forward: encoder, draw, decoder. It returns the distribution, too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(DIM, WIDTH, WIDTH, 2 * LATENT), mlp(LATENT, WIDTH, WIDTH, DIM)

    def forward(self, x: Tensor) -> Any:
        mean, scale = self.encoder(x).chunk(2, -1)
        posterior = Normal(mean, functional.softplus(scale) + 1e-6)
        return self.decoder(posterior.rsample()), posterior

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        decoded, posterior = self(batch[0])
        divergence = kl_divergence(posterior, Normal(torch.zeros_like(posterior.loc), torch.ones_like(posterior.scale)))
        self.log("divergence", divergence.sum(-1).mean())
        return functional.mse_loss(decoded, batch[0]) + 0.1 * divergence.sum(-1).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        decoded, posterior = self(batch[0])
        self.log("val_loss", functional.mse_loss(decoded, batch[0]) - posterior.log_prob(posterior.mean).mean())


class VariationalStep(Variational):
    """The step calls the parts itself, as lightning-bolts does, and asks for checked arguments."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mean, scale = self.encoder(batch[0]).chunk(2, -1)
        prior = Independent(Normal(torch.zeros_like(mean), torch.ones_like(mean), validate_args=True), 1)
        posterior = Independent(Normal(mean, (scale / 2).exp(), validate_args=True), 1)
        z = posterior.rsample()
        loss = functional.mse_loss(self.decoder(z), batch[0]) + 0.1 * (posterior.log_prob(z) - prior.log_prob(z)).mean()
        self.log("loss", loss)
        return loss


class Policy(Sgd):
    """Actions are drawn from what the model says, and rewarded."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = mlp(DIM, WIDTH, WIDTH), mlp(WIDTH, WIDTH, CLASSES), mlp(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x).tanh()
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        policy, value = self(batch[0])
        action = policy.sample()
        reward = (action == batch[1]).float()
        advantage = reward - value.detach()
        loss = -(policy.log_prob(action) * advantage) - 0.01 * policy.entropy() + (value - reward) ** 2
        return loss.mean()


class SquashedActor(Sgd):
    """A draw of the actor goes into the critic."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(DIM, WIDTH, WIDTH, 4), mlp(DIM + 2, WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mean, scale = self.actor(batch[0]).chunk(2, -1)
        policy = TransformedDistribution(Normal(mean, scale.clamp(-3, 1).exp()), [TanhTransform(cache_size=1)])
        action = policy.rsample()
        value = self.critic(torch.cat([batch[0], action], dim=1)).squeeze(-1)
        return (0.1 * policy.log_prob(action).sum(-1) - value).mean()


class MixtureDensity(Sgd):
    """The model returns a mixture, whose likelihood is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(DIM, WIDTH, WIDTH, 9)

    def forward(self, x: Tensor) -> MixtureSameFamily:
        weights, means, scales = self.net(x).chunk(3, -1)
        return MixtureSameFamily(Categorical(logits=weights), Normal(means, functional.softplus(scales) + 1e-3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return -self(batch[0]).log_prob(batch[1].float()).mean()


class GumbelCodes(Sgd):
    """Discrete codes that gradients pass through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(DIM, WIDTH, 2 * LATENT), nn.Linear(2 * LATENT, DIM)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        codes = functional.gumbel_softmax(self.encoder(batch[0]).view(-1, 2, LATENT), tau=0.7, hard=True)
        return functional.mse_loss(self.decoder(codes.flatten(1)), batch[0])


VALIDATE = ("validate",)

CASES: dict[str, Case] = {
    "variational": Case(make=Variational, batches=labelled, microbatches=(1, 2), evaluations=VALIDATE),
    "variational_three_stages": Case(make=Variational, batches=labelled, microbatches=(4,), stages=3),
    "variational_step": Case(make=VariationalStep, batches=labelled, microbatches=(1, 2), evaluations=VALIDATE),
    "policy": Case(make=Policy, batches=labelled, microbatches=(1, 2)),
    "squashed_actor": Case(make=SquashedActor, batches=labelled, microbatches=(1, 2)),
    "mixture_density": Case(make=MixtureDensity, batches=labelled, microbatches=(1, 2)),
    "gumbel_codes": Case(make=GumbelCodes, batches=labelled, microbatches=(1, 2)),
}
