"""A byte-level GPT and its data, as an ordinary LightningModule and LightningDataModule: nothing here knows of pipelines."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

NUM_BYTES = 256


class Block(nn.Module):
    """Pre-norm transformer block with causal attention."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.projection = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:  # (batch, context, dim)
        batch, context, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, context, 3, self.num_heads, dim // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, context, dim / heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, context, dim))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Bytes (batch, context) to logits of the next byte (batch, context, 256)."""

    def __init__(self, dim: int, num_layers: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(NUM_BYTES, dim)
        self.position = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, NUM_BYTES, bias=False)
        self.apply(self._init)
        self.head.weight = self.token.weight

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.token(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class ByteGPT(L.LightningModule):
    """Trains the GPT to predict the next byte.

    Args:
        dim: Width of the model.
        num_layers: Number of blocks.
        num_heads: Attention heads of each block.
        context: Bytes that the model sees at most.
        learning_rate: Peak of the one-cycle schedule.
        weight_decay: For matrices; vectors are not decayed.
    """

    def __init__(
        self,
        dim: int = 256,
        num_layers: int = 7,
        num_heads: int = 4,
        context: int = 128,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT(dim, num_layers, num_heads, context)

    def _loss(self, batch: Tensor) -> Tensor:  # (batch, context + 1)
        logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The most probable next byte at each position."""
        return self.model(batch[:, :-1]).argmax(dim=-1)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.hparams["weight_decay"]},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["learning_rate"], betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.hparams["learning_rate"],
            total_steps=int(self.trainer.estimated_stepping_batches),
            pct_start=0.1,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Windows(Dataset[Tensor]):
    """Windows of ``length`` bytes, at random places (drawn from the index, so that every epoch is the same) or in order."""

    def __init__(self, data: Tensor, length: int, count: int, *, in_order: bool) -> None:
        self.data, self.length, self.count = data, length, count
        last = len(data) - length
        if in_order:
            self.starts = torch.linspace(0, last, count).long()
        else:
            self.starts = torch.randint(0, last + 1, (count,), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        start = int(self.starts[index])
        return self.data[start : start + self.length].long()


class TextData(L.LightningDataModule):
    """Bytes of text files, split by file into training and validation.

    Args:
        path: A file, or a folder whose files are used. Default: the sources of Python's standard library on this machine.
        pattern: Files taken from a folder.
        context: Bytes that the model sees; a sample has one more.
        batch_size: Samples of a batch.
        num_train_samples: Windows of the training files that make an epoch.
        num_val_samples: Windows of the validation files.
        max_bytes: Bytes read at most.
    """

    def __init__(
        self,
        path: str | None = None,
        pattern: str = "*.py",
        context: int = 128,
        batch_size: int = 16,
        num_train_samples: int = 4800,
        num_val_samples: int = 128,
        max_bytes: int = 8_000_000,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.train_bytes = self.val_bytes = torch.empty(0, dtype=torch.uint8)

    def setup(self, stage: str) -> None:
        if len(self.train_bytes):
            return
        files = self._files()
        # Every tenth file is for validation, in an order that does not depend on the machine.
        self.train_bytes = self._read([file for i, file in enumerate(files) if i % 10], self.hparams["max_bytes"])
        self.val_bytes = self._read(files[::10], self.hparams["max_bytes"] // 10)
        if min(len(self.train_bytes), len(self.val_bytes)) <= self.hparams["context"] + 1:
            raise ValueError(f"Too little text: {len(files)} files match {self.hparams['pattern']} in {self.hparams['path']}.")

    def _files(self) -> list[Path]:
        root = Path(self.hparams["path"] or sysconfig.get_paths()["stdlib"])
        if root.is_file():
            raise ValueError(f"{root} is one file; training and validation are split by file, so give a folder.")
        pattern = self.hparams["pattern"]
        found = root.rglob(pattern) if self.hparams["path"] else root.glob(pattern)
        return sorted(file for file in found if file.is_file())

    @staticmethod
    def _read(files: list[Path], max_bytes: int) -> Tensor:
        text = bytearray()
        for file in files:
            text += file.read_bytes()
            if len(text) >= max_bytes:
                break
        return torch.frombuffer(text[:max_bytes], dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)

    def bigram_loss(self) -> float:
        """Validation loss, in nats per byte, of the bigram model of the training bytes (add-one smoothing)."""
        counts = torch.ones(NUM_BYTES, NUM_BYTES, dtype=torch.float64)
        pairs = self.train_bytes[:-1].long() * NUM_BYTES + self.train_bytes[1:].long()
        counts += torch.bincount(pairs, minlength=NUM_BYTES**2).view(NUM_BYTES, NUM_BYTES)
        log_probability = (counts / counts.sum(1, keepdim=True)).log()
        return float(-log_probability[self.val_bytes[:-1].long(), self.val_bytes[1:].long()].mean())

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.train_bytes, self.hparams["num_train_samples"], training=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.val_bytes, self.hparams["num_val_samples"], training=False)

    def test_dataloader(self) -> DataLoader[Tensor]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Tensor]:
        return self.val_dataloader()

    def _loader(self, data: Tensor, count: int, *, training: bool) -> DataLoader[Tensor]:
        windows = Windows(data, self.hparams["context"] + 1, count, in_order=not training)
        return DataLoader(windows, batch_size=self.hparams["batch_size"], shuffle=training)
