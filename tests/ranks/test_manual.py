"""Manual optimization: steps that call the model, train and step their optimizers as they like, as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy, UnsupportedError
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import Run, compare, go

Ranks = Callable[[int], RankPool]


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Manual(L.LightningModule):
    """Keeps in ``seen`` what its steps and hooks see."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.automatic_optimization = False
        self.seen: list[Any] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append({name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None})

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(8)
        return DataLoader(TensorDataset(*(torch.randn(17, width, generator=generator) for width in (5, 3))), batch_size=8)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def update(self, loss: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Adversarial(Manual):
    """Two networks that train each other; the first is called inside the second's loss, with its gradients and without."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = mlp(4, 12, 9, 5), mlp(5, 10, 8, 1)

    def noise(self, real: Tensor) -> Tensor:
        return torch.randn(len(real), 4)

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        (real, _), (first, second) = batch, self.optimizers()  # type: ignore[misc]
        z, ones = self.noise(real), torch.ones(len(real), 1)
        self.toggle_optimizer(first)
        loss = F.binary_cross_entropy_with_logits(self.critic(self(z)), ones)
        self.update(loss, first)
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        fake = F.binary_cross_entropy_with_logits(self.critic(self(z).detach()), 0 * ones)
        other = fake + F.binary_cross_entropy_with_logits(self.critic(real), ones)
        self.update(other, second)
        self.untoggle_optimizer(second)
        self.log_dict({"first": loss, "second": other}, on_step=True, on_epoch=True)
        return {"loss": loss + other}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("real", self.critic(batch[0]).sigmoid().mean())

    val_dataloader = Manual.train_dataloader

    def configure_optimizers(self) -> Any:
        adam = [torch.optim.Adam(part.parameters(), 0.02, betas=(0.5, 0.9)) for part in (self.generator, self.critic)]
        return adam, [torch.optim.lr_scheduler.StepLR(adam[0], 1, 0.5)]

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]


class Deep(Adversarial):
    """As many layers in each model as four stages need."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = mlp(4, 12, 9, 9, 5), mlp(5, 10, 9, 8, 1)


class WithoutNoise(Adversarial):
    """A checkpoint of a pipeline has the random numbers' state, and one of a single device has not."""

    def noise(self, real: Tensor) -> Tensor:
        return real[:, :4]


class Accumulating(Manual):
    """Steps for every second batch only, and clips; the last batch has one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(5, 9, 7, 3)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        optimizer: Any = self.optimizers()
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        self.log("perplexity", loss.exp(), on_epoch=True)
        return {"loss": loss}


class Recurrent(Manual):
    """Each call takes what the one before gave: the gradient flows back through all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.cell, self.head = mlp(5, 8, 6), mlp(11, 12, 6), nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        state, losses = self.encoder(batch[0]), []
        for _ in range(3):
            state = self.cell(torch.cat([batch[0], state], 1))
            losses.append(F.mse_loss(self.head(state), batch[1]))
        loss = torch.stack(losses).sum()
        self.update(loss, self.optimizers())
        return {"loss": loss, "state": state.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["state"])


class Teaching(Manual):
    """Moves a teacher and normalises weights by hand, uses a parameter itself, and looks at gradients and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.head = mlp(5, 9, 9, 6), nn.Linear(6, 6)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.codes = nn.Parameter(torch.randn(4, 6))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        with torch.no_grad():
            target = self.teacher(batch[0] + 0.1 * torch.randn_like(batch[0]))
        z = self.head(self.student(batch[0]))
        nearest = self.codes[torch.cdist(z, self.codes).argmin(1)]
        loss = F.mse_loss(F.normalize(z, dim=1), F.normalize(target, dim=1)) + (nearest - z).square().mean()
        self.update(loss, self.optimizers())
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm())
        with torch.no_grad():
            for mine, teachers in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                teachers.data.mul_(0.9).add_(mine.data, alpha=0.1)
            self.head.weight.copy_(F.normalize(self.head.weight, dim=1))
        # A single stage has what this looks at: its rank does not wait where the others do.
        self.seen.append(float(self.student[0].weight.sum()))
        return {"loss": loss}


class Rolling(Manual):
    """Makes its data with the model, and then trains on it for several epochs in batches of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(5, 12, 4), mlp(5, 10, 8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        states, first, second = batch[0], *self.optimizers()  # type: ignore[misc]
        with torch.no_grad():
            policy = torch.distributions.Categorical(logits=self.actor(states))
            actions = policy.sample()
            before, value = policy.log_prob(actions), self.critic(states).squeeze(1)
        returns = batch[1].sum(1)
        for _ in range(2):
            for chosen in torch.randperm(len(states)).split(3):
                policy = torch.distributions.Categorical(logits=self.actor(states[chosen]))
                ratio = (policy.log_prob(actions[chosen]) - before[chosen]).exp()
                advantage = (returns - value)[chosen]
                loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                self.update(loss, first)
                second.zero_grad()
                F.mse_loss(self.critic(states[chosen]).squeeze(1), returns[chosen]).backward()  # not manual_backward
                second.step()
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.actor.parameters(), 0.02), torch.optim.Adam(self.critic.parameters(), 0.02)


class Sharpening(Manual):
    """Ascends before it descends, and weighs two losses by gradients that nothing accumulates."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = mlp(5, 9, 7, 6), nn.Linear(6, 3)

    def loss(self, batch: Any) -> Tensor:
        features = self.net(batch[0])
        out = self.last(features)
        one, other = F.mse_loss(out, batch[1]), out.abs().mean()
        of_one = torch.autograd.grad(one, [self.last.weight, features], retain_graph=True)
        (of_other,) = torch.autograd.grad(other, self.last.weight, retain_graph=True)
        self.seen += [*of_one, of_other]
        return one + other * (of_one[0].norm() / (of_other.norm() + 1e-4)).detach()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        self.manual_backward(self.loss(batch))
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        with torch.no_grad():
            steps = [p.grad * (0.05 / norm) for p in self.parameters() if p.grad is not None]
            for parameter, step in zip(self.parameters(), steps, strict=True):
                parameter.add_(step)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        with torch.no_grad():
            for parameter, step in zip(self.parameters(), steps, strict=True):
                parameter.sub_(step)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss}


class Tied(Manual):
    """A weight that is used in two stages; dropout; a batch that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(5, 5, bias=False), mlp(5, 30, 5)
        self.last = nn.Linear(5, 5, bias=False)
        self.last.weight = self.first.weight
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rest(self.first(x)).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        if batch_idx == 1:
            return {"loss": torch.zeros(())}
        loss = (self.dropout(self(batch[0])) - batch[0]).square().mean()
        self.update(loss, self.optimizers())
        return {"loss": loss}


class Printing(Accumulating):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        print(f"batch {batch_idx} of replica {self.global_rank} of {self.trainer.world_size}")
        return super().training_step(batch, batch_idx)


def seen(trainer: L.Trainer, module: Any, folder: Path) -> Any:
    return module.seen


def _run(module: type[Manual], **changes: Any) -> Run:
    return Run(module=module, look=seen, **changes)


RUNS = {
    "adversarial": _run(Adversarial, calls=("fit", "validate")),
    "adversarial, one microbatch": _run(Adversarial, strategy={"num_microbatches": 1}),
    "accumulating": _run(Accumulating, strategy={"num_microbatches": 4}),
    "recurrent": _run(Recurrent),
    "teaching": _run(Teaching),
    "rolling": _run(Rolling),
    "sharpening": _run(Sharpening),
    "tied": _run(Tied),
    "resumed": _run(
        WithoutNoise,
        callbacks=lambda folder: [L.pytorch.callbacks.ModelCheckpoint(folder, "{step}", save_top_k=-1)],
        options={"enable_checkpointing": True},
        resume_from="step=6.ckpt",
    ),
    "two stages on each": _run(Deep, strategy={"num_microbatches": 4, "stages_per_rank": 2}),
    "stages in a V": _run(Deep, strategy={"num_microbatches": 4, "schedule": "zbv_zero_bubble"}),
    # Sums over microbatches round otherwise.
    "mixed precision": _run(Adversarial, options={"precision": "bf16-mixed"}, strategy={"num_microbatches": 1}),
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    place = Path(folder, f"{name}-{stages}")
    place.mkdir(exist_ok=True)
    return go(RUNS[name], place, stages)


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_manual_optimization_is_that_of_one_device(ranks: Ranks, tmp_path: Path, stages: int) -> None:
    compare(ranks, do, list(RUNS), tmp_path, stages)


class SecondDerivative(Accumulating):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        self.manual_backward(slope.norm())


class ForSomeOnly(Accumulating):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(self.net(batch[0]).sum(), inputs=list(self.net[0].parameters()))


REFUSED: dict[str, tuple[type[Manual], Sequence[str]]] = {
    "second derivative": (SecondDerivative, ["differentiates a gradient of the pipelined calls again"]),
    "backward for some": (ForSomeOnly, ["backward for some parameters only", "net.0.weight", "toggle_optimizer"]),
}


def refused(case: str) -> str:
    trainer = make_trainer(max_epochs=1, strategy=FxPipeStrategy(num_microbatches=2), devices=2)
    with pytest.raises(UnsupportedError) as caught:
        trainer.fit(REFUSED[case][0]())
    return str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_what_manual_optimization_cannot_do_is_refused(ranks: Ranks, case: str) -> None:
    for message in ranks(2).run(refused, case):
        for words in REFUSED[case][1]:
            assert words in message


def printed() -> str:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        make_trainer(max_epochs=1, strategy=FxPipeStrategy(num_microbatches=2), devices=2).fit(Printing())
    return out.getvalue()


def test_a_step_that_every_rank_runs_prints_once(ranks: Ranks) -> None:
    one, other = ranks(2).run(printed)
    assert [line for line in one.splitlines() if "replica" in line] == [f"batch {i} of replica 0 of 1" for i in range(3)]
    assert "replica" not in other
