"""LightningModules that make their layers in ``configure_model``, and plain ones that lie on the meta device."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

WIDTH = 16


class Block(nn.Module):
    """Weights of every kind: of torch's layers, drawn by hand, cut off, constant; tables that are saved and not; a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        nn.init.trunc_normal_(self.linear.weight, std=0.3)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH) * torch.rand(WIDTH))
        self.register_buffer("unsaved", torch.randn(WIDTH), persistent=False)
        self.tables = [torch.rand(WIDTH), torch.arange(WIDTH)]
        self.rate = torch.linspace(0, 0.1, 3).tolist()[1] + float(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        shift = self.shift + self.unsaved + self.tables[0] * self.tables[1]
        return torch.tanh(self.norm(self.linear(x)) * self.scale + 0.1 * self.rate * shift)


class Tied(nn.Module):
    """An embedding whose weights are the head's as well, around blocks of which one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH, padding_idx=0)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 20)
        self.head.weight = self.embedding.weight
        self.blocks[1].linear.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(x)))


class Late(L.LightningModule):
    """Makes its layers in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        self.model = Tied()
        self.accuracy = MulticlassAccuracy(20, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("loss", loss)
        if hasattr(self, "accuracy"):
            self.accuracy(logits, batch[1])
            self.log("accuracy", self.accuracy)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Plain(Late):
    """Layers whose own methods initialise all of them, made in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Embedding(20, WIDTH),
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(4)),
            nn.Linear(WIDTH, 20),
        )

    def configure_model(self) -> None:
        pass


class Asks(Late):
    """Asks for the meta device itself."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.device_of_layers = device

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device(self.device_of_layers):
                self.model = Unaided().model


class AsksNothing(Asks):
    """The same without."""

    def __init__(self) -> None:
        super().__init__("cpu")


class Scaled(nn.Module):
    """Draws its weights and makes its tables by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))
        self.register_buffer("shift", torch.tensor([0.5] * WIDTH) * torch.arange(WIDTH))
        self.register_buffer("unsaved", torch.randn(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift * self.unsaved


class Unaided(Plain):
    """Has weights that no method initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.model[1] = Scaled()


class Special(Plain):
    """Its constructor initialises a layer once more, as no method of a module does."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.model[1][0].weight, std=0.01)


class Resets(Unaided):
    """Initialises by itself what no layer does."""

    def reset_parameters(self) -> None:
        block = self.model[1]
        for tensor in (block.scale, block.shift, block.unsaved):
            nn.init.uniform_(tensor)


def make_data(shuffle: bool = True) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(1, 20, (48,), generator=generator)
    return DataLoader(TensorDataset(x, (x * 7) % 20), batch_size=16, shuffle=shuffle)
