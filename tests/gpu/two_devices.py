"""Runs on two devices, and the same ones by plain Lightning: ``test_two_devices.py`` starts it and compares.

    python tests/gpu/two_devices.py gpu alone FILE
    python -m torch.distributed.run --nproc-per-node=2 tests/gpu/two_devices.py gpu fxpipe FILE     # or ddp

writes into the file what each run ends with, and into files beside it, by run and rank, what the host has waited for. With
``shared_gpu`` in place of ``gpu`` all ranks are on one GPU: NCCL refuses that, but for ranks of different hosts, and so each
rank says that it is a host. They send over a socket then, not through the GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy
from tests.gpu.waits import noting

# By name: options of the strategy, and of the Trainer. In low precision one microbatch: sums of rounded gradients are others
# with more.
STAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpipe": ({"schedule": "gpipe"}, {}),
    "1f1b": ({"schedule": "1f1b"}, {}),
    "looped_bfs": ({"schedule": "looped_bfs"}, {}),
    "interleaved_1f1b": ({"schedule": "interleaved_1f1b"}, {}),
    "zbv_zero_bubble": ({"schedule": "zbv_zero_bubble"}, {}),
    "accumulated and clipped": ({"schedule": "1f1b"}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "fp16": ({"schedule": "gpipe", "num_microbatches": 1}, {"precision": "16-mixed"}),
    "bf16": ({"schedule": "gpipe", "num_microbatches": 1}, {"precision": "bf16-mixed"}),
}
REPLICAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "replicas": ({"num_stages": 1}, {}),
    "replicas accumulated": ({"num_stages": 1}, {"accumulate_grad_batches": 2}),
}


class Lit(L.LightningModule):
    """A weight that the first and the last stage use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(self.embed(tokens)))
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        tokens = torch.randint(0, 16, (44,), generator=torch.Generator().manual_seed(2))  # the last batch has four
        return DataLoader(TensorDataset(tokens, tokens.roll(1)), batch_size=8)


class SharedGpu(CUDAAccelerator):
    """As many devices as are asked for, which are all the first GPU."""

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", 0) for _ in devices]


def fitted(accelerator: str, way: str, strategy: dict[str, Any], options: dict[str, Any], waits: Path) -> dict[str, Any]:
    """What a fit ends with; what its host waits for comes into a file."""
    L.seed_everything(1, verbose=False)
    place: dict[str, Any] = {"devices": 1} if way == "alone" else {"devices": 2, "strategy": "ddp"}
    if way == "fxpipe":
        place["strategy"] = FxPipeStrategy(**strategy)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator=SharedGpu() if accelerator == "shared_gpu" else accelerator,
            max_epochs=3,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[] if accelerator == "cpu" else [noting(waits)],
            **place,
            **options,
        )
        module = Lit()
        trainer.fit(module)
    return {
        "state": {fqn: value.detach().cpu().clone() for fqn, value in module.state_dict().items()},
        "loss": trainer.callback_metrics["loss"].cpu(),
        "steps": trainer.global_step,
        "is_first": trainer.is_global_zero,
    }


def main(accelerator: str, way: str, path: str) -> None:
    """Runs all that there is to run in this way."""
    torch.backends.cuda.matmul.allow_tf32 = False
    if accelerator == "shared_gpu":
        os.environ["NCCL_HOSTID"] = f"host of rank {os.environ.get('RANK', 0)}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    runs = {"alone": STAGES, "ddp": REPLICAS}.get(way, {**STAGES, **REPLICAS})
    waits = {name: Path(f"{path}.{name.replace(' ', '_')}.{os.environ.get('RANK', 0)}") for name in runs}
    found = {name: fitted(accelerator, way, *options, waits[name]) for name, options in runs.items()}
    if all(run.pop("is_first") for run in found.values()):
        torch.save(found, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
