"""Ordinary steps around models that are hard to cut, and around training that changes what is trained."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.steps_case import CLASSES, DIM, WIDTH, Case, Sgd, classifier, cross_entropy, labelled, mlp, tokens


class Classifies(Sgd):
    """The step; the model is each subclass's own."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = classifier() if model is None else model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


class Attention(nn.Module):
    """A small vision transformer: a class token, positions and a scale that are parameters of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(1, 8)
        self.cls = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, DIM + 1, 8))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.cls.expand(x.shape[0], -1, -1), self.stem(x.unsqueeze(-1))], dim=1) + self.positions
        for block in self.blocks:
            h = block(h)
        return self.head(h[:, 0] * self.scale)


class Counts(nn.Module):
    """Buffers that the forward changes, at the top level and in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.net(x) / self.calls


class CountsOnly(nn.Module):
    """A step counter that nothing else in the forward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x)


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(DIM, WIDTH, WIDTH), mlp(WIDTH, WIDTH, CLASSES)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return self.second(h - self.mean)


class TiedTokens(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.body = nn.Embedding(11, WIDTH), mlp(WIDTH, WIDTH, WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.token(ids)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class SharedBlock(nn.Module):
    """One block, used at three depths."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(DIM, WIDTH), mlp(WIDTH, WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for _ in range(3):
            h = h + self.block(h)
        return self.head(h)


def half_frozen() -> nn.Module:
    model = classifier(4)
    model[:4].requires_grad_(False)
    return model


class Unfreezes(L.Callback):
    """Thaws the first half when the second epoch starts."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.model[:4].requires_grad_(trainer.current_epoch > 0)


class UnusedParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused, self.net, self.spare = nn.Linear(4, 4), classifier(), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Dominated(nn.Module):
    """Almost all parameters are in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.big, self.head = nn.Linear(DIM, 4), mlp(4, 120, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.big(self.stem(x)).tanh())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(1, 5)
        self.lstm, self.head = nn.LSTM(5, WIDTH, num_layers=2, batch_first=True), mlp(WIDTH, WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, _) = self.lstm(self.stem(x.unsqueeze(-1)))
        return self.head(out[:, -1] + hidden[-1])


class Experts(nn.Module):
    """Sends each sample to one expert; how many samples an expert gets depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(mlp(WIDTH, WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        weight, choice = gates.max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return x + out


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.experts, self.head = nn.Linear(DIM, WIDTH), Experts(), mlp(WIDTH, WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.experts(self.stem(x)))


class Hooked(Classifies):
    """Forward hooks on a block, one of which changes the output, and one on the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.model[2].register_forward_hook(lambda module, args, output: output * 1.5)
        self.model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        self.model[4].weight.register_hook(lambda gradient: gradient * 2)


class CheckpointedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.net, x, use_reentrant=False)


def checkpointed() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, WIDTH), CheckpointedBlock(), CheckpointedBlock(), nn.Linear(WIDTH, CLASSES))


def normalised() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(DIM, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)),
        *(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None), nn.ReLU(), nn.Linear(WIDTH, CLASSES)),
    )


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(DIM, WIDTH, WIDTH), mlp(WIDTH, WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.first(x), p=0.0, training=self.training))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4))
        self.head = nn.Linear(4 * DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x.unsqueeze(1)).flatten(1))


class GroupedAdamW(Classifies):
    """Parameter groups, a scheduler for each step, and clipping by the Trainer."""

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 1e-3}], lr=1e-2, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class TrainedParameters(Classifies):
    """The optimizer gets what is trained at the start, as most do for a frozen backbone."""

    def __init__(self) -> None:
        super().__init__(half_frozen())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


EPOCHS = {"max_epochs": 2}
ACCUMULATE = {"accumulate_grad_batches": 2}
CLIP = {"gradient_clip_val": 0.1}


def classifies(make: Any, *microbatches: int, **options: Any) -> Case:
    """The ordinary step around a model."""
    return Case(make=lambda: Classifies(make()), batches=labelled, microbatches=microbatches, **options)


CASES: dict[str, Case] = {
    "class_token": classifies(Attention, 1, 4),
    "counting_buffer": classifies(Counts, 1),
    "counting_only": classifies(CountsOnly, 1),
    "running_mean": classifies(RunningMean, 1),
    "tied_tokens": Case(make=TiedTokens, batches=lambda: tokens((8, 6), (8, 6), (8, 6)), microbatches=(1, 4)),
    "shared_block": classifies(SharedBlock, 4),
    "frozen_half": classifies(half_frozen, 4),
    "trained_parameters": Case(make=TrainedParameters, batches=labelled, microbatches=(2,)),
    "unfreezes": classifies(half_frozen, 2, trainer=EPOCHS, callbacks=(Unfreezes,)),
    "unused_parameters": classifies(UnusedParameters, 4),
    "dominating_layer": classifies(Dominated, 2),
    "lstm": classifies(Recurrent, 1, 4),
    "mixture_of_experts": classifies(MixtureOfExperts, 1, 2),
    "hooks": Case(make=Hooked, batches=labelled, microbatches=(1, 2)),
    "checkpointed": classifies(checkpointed, 1, 4),
    "batch_norm": classifies(normalised, 1),
    "functional_dropout": classifies(FunctionalDropout, 2),
    "convolutional": classifies(Convolutional, 4),
    "accumulation": classifies(classifier, 1, 4, trainer=ACCUMULATE),
    "accumulation_uneven": Case(
        make=Classifies, batches=lambda: labelled(8, 8, 5), microbatches=(4,), trainer=ACCUMULATE | EPOCHS
    ),
    "groups_scheduler_clipping": Case(make=GroupedAdamW, batches=labelled, microbatches=(4,), trainer=CLIP, stages=3),
}
