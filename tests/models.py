"""Models for tests: small, but in the forms that break pipelines (long skips, tied weights, BatchNorm, reshapes)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rotary import RotaryDecoder


class SkipMLP(nn.Module):
    """Every layer also gets the first layer's output, and the last gets the input: relays through all stages."""

    def __init__(self, width: int = 24, depth: int = 7, num_classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Linear(12, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width + 12, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        first = h = torch.tanh(self.stem(x))
        for layer in self.layers:
            h = torch.tanh(layer(h)) + first
        return self.head(torch.cat((h, x), dim=1))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        # No bias: the gradient of a key's bias is zero but for rounding, which Adam blows up to full steps. Even one device
        # differs from itself by 5e-3 there when it accumulates over microbatches.
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class TiedGPT(nn.Module):
    """Embedding and output layer are one parameter, used by the first and the last stage."""

    def __init__(self, vocab: int = 40, dim: int = 16, depth: int = 4, context: int = 12) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.randn(context, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, 2) for _ in range(depth))
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tok(ids) + self.pos[: ids.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.ln(h))


class BasicBlock(nn.Module):
    """torchvision's, with its names and its in-place ReLU."""

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample: nn.Module | None = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """torchvision's ResNet-18, with its names; ``width`` 64 is the original."""

    def __init__(self, width: int = 64, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(width, width), BasicBlock(width, width))
        self.layer2 = nn.Sequential(BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 2 * width))
        self.layer3 = nn.Sequential(BasicBlock(2 * width, 4 * width, 2), BasicBlock(4 * width, 4 * width))
        self.layer4 = nn.Sequential(BasicBlock(4 * width, 8 * width, 2), BasicBlock(8 * width, 8 * width))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class UNet(nn.Module):
    """Skips from each level down to the level up, so that several tensors cross every cut."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        w = width
        self.down1 = self._conv(1, w)
        self.down2 = self._conv(w, 2 * w)
        self.down3 = self._conv(2 * w, 4 * w)
        self.middle = self._conv(4 * w, 4 * w)
        self.up3 = self._conv(8 * w, 2 * w)
        self.up2 = self._conv(4 * w, w)
        self.up1 = self._conv(2 * w, w)
        self.out = nn.Conv2d(w, 1, 1)

    @staticmethod
    def _conv(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.down3(F.max_pool2d(b, 2))
        m = self.middle(F.max_pool2d(c, 2))
        x = self.up3(torch.cat((F.interpolate(m, size=c.shape[-2:]), c), 1))
        x = self.up2(torch.cat((F.interpolate(x, size=b.shape[-2:]), b), 1))
        x = self.up1(torch.cat((F.interpolate(x, size=a.shape[-2:]), a), 1))
        return self.out(x)


def make_model(name: str) -> nn.Module:
    """A model by name, from a fixed seed."""
    torch.manual_seed(7)
    makers: dict[str, Any] = {
        "mlp": SkipMLP,
        "gpt": TiedGPT,
        "resnet": lambda: ResNet18(width=4, num_classes=5),
        "unet": UNet,
        "rotary": lambda: RotaryDecoder(depth=4),
    }
    return makers[name]()


def make_samples(name: str, count: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets for a model."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=generator)

    def integer(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, (count, *shape), generator=generator)

    if name == "mlp":
        return normal(12), integer(5)
    if name in ("gpt", "rotary"):
        ids = integer(40, 11)
        return ids[:, :-1], ids[:, 1:]
    if name == "resnet":
        return normal(3, 32, 32), integer(5)
    return normal(1, 16, 16), normal(1, 16, 16)


def loss_of(name: str, output: Tensor, target: Tensor) -> Tensor:
    """Mean loss over the samples."""
    if name == "unet":
        return F.mse_loss(output, target)
    return F.cross_entropy(output.flatten(0, -2), target.flatten())
