"""LightningModules that use devices in the ways in which people do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

Batch = tuple[Tensor, Tensor]
TABLE = torch.linspace(0, 1, 12)


class Mlp(nn.Module):
    """Four blocks and a head, with ``extra(self, x)`` added to the input."""

    def __init__(self, extra: Callable[[Any, Tensor], Any] = lambda self, x: 0) -> None:
        super().__init__()
        self.extra = extra
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(12, 5)
        self.table = torch.linspace(0, 1, 12)
        self.temperature = torch.tensor(2.0)
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.extra(self, x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Recurrent(nn.Module):
    """A recurrent encoder and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(12, 12, num_layers=2, batch_first=True)
        self.middle = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.encoder(x[:, None])[0][:, 0]))


class Masked(nn.Module):
    """Attention with a causal mask that is made in the forward, on the input's device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(12, 2, 24, batch_first=True) for _ in range(3))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None] + torch.arange(3, device=x.device)[None, :, None]
        mask = torch.full((3, 3), float("-inf"), device=x.device).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x.mean(dim=1))


class Schedule(nn.Module):
    """Noise levels as a diffusion model has them: buffers, and a method that is no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("betas", torch.linspace(0, 0.1, 10))

    def add_noise(self, x: Tensor, steps: Tensor) -> Tensor:
        return x + self.betas[steps][:, None] * torch.randn_like(x)


class Rotary(nn.Module):
    """Moves a tensor that is neither parameter nor buffer along with the module."""

    def __init__(self) -> None:
        super().__init__()
        self.freqs = torch.linspace(0, 1, 12)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.freqs = fn(self.freqs)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x * self.freqs


class Lit(L.LightningModule):
    """A module around one of the above, whose step begins with ``before(self, x)``."""

    def __init__(self, model: nn.Module | None = None, before: Callable[[Any, Tensor], Tensor] = lambda self, x: x) -> None:
        super().__init__()
        self.model = model or Mlp()
        self.before = before
        self.second = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        self.teacher = nn.Linear(12, 12).requires_grad_(False)
        self.schedule = Schedule()
        self.rotary = Rotary()
        self.loss_mean = MeanMetric()
        self.register_buffer("scale", torch.ones(12))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(self.before(self, x)), y)
        self.loss_mean(loss)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class TwoCalls(Lit):
    """Uses two models, one after the other, with code between them."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.model(x.to(self.device)) + torch.arange(5, device=self.device)
        h = h * self.scale[:5]
        return nn.functional.cross_entropy(self.second(h), y)


class OwnAutocast(Lit):
    """Switches autocast on in its step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = self.model(batch[0])
        return nn.functional.cross_entropy(logits.float(), batch[1])


def _under_autocast_off(self: Mlp, x: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        return self.blocks[0][0](x.float()) * 0


@torch.no_grad()
def _taught(self: Lit, x: Tensor) -> Tensor:
    return x + self.teacher(x)


FORWARDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "made on the input's device": lambda self, x: torch.arange(12, device=x.device) + torch.ones(12).to(x.device),
    "made on the parameters' device": lambda self, x: torch.zeros(12, device=next(self.parameters()).device),
    "made like a parameter": lambda self, x: self.head.weight.new_zeros(12) + torch.zeros_like(x),
    "cuda()": lambda self, x: torch.ones(12).cuda(),
    "a branch on is_cuda": lambda self, x: 0 if x.is_cuda else torch.ones(3),
    "a buffer": lambda self, x: self.mean + self.mean.to(x),
    "an attribute on the CPU, moved": lambda self, x: self.table.to(x.device),
    "a number on the CPU": lambda self, x: x / self.temperature,
    "a global on the CPU, moved": lambda self, x: TABLE.to(x.device, x.dtype),
    "random numbers": lambda self, x: torch.randn(x.shape, device=x.device) + torch.rand_like(x) + torch.bernoulli(x * 0),
    "autocast switched off": _under_autocast_off,
}
PRELUDES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "to(self.device)": lambda self, x: x.to(self.device),
    "made on self.device": lambda self, x: x + torch.arange(12, device=self.device),
    "made on the parameters' device": lambda self, x: x + torch.zeros(12, device=next(self.parameters()).device),
    "a parameter asked for its device": lambda self, x: x.to(self.model.head.weight.device),
    "a buffer": lambda self, x: x * self.scale,
    "a submodule's buffer": lambda self, x: self.schedule.add_noise(x, torch.arange(x.shape[0], device=x.device) % 10),
    "a module without parameters": lambda self, x: self.rotary(x),
    "a frozen module": _taught,
    "random numbers": lambda self, x: x + torch.randn_like(x) * torch.rand(1, device=self.device),
    "cuda()": lambda self, x: x + torch.ones(12).cuda(),
}
MODULES: dict[str, Callable[[], Lit]] = {
    "plain": Lit,
    "recurrent": lambda: Lit(Recurrent()),
    "masked": lambda: Lit(Masked()),
    "several calls": TwoCalls,
    "autocast in the step": OwnAutocast,
    **{f"forward: {name}": partial(lambda extra: Lit(Mlp(extra)), extra) for name, extra in FORWARDS.items()},
    **{f"before: {name}": partial(lambda before: Lit(before=before), before) for name, before in PRELUDES.items()},
}
