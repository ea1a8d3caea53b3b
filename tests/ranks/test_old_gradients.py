"""Gradients of the batch before: given up before the next batch runs where nobody looks, and there where somebody does.

With 1F1B, those of the batch: there from the step on where nobody looks before the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go


class Decayed(Net):
    """A parameter with a gradient of zeros decays, and one with none does not."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5)


class Skips(Decayed):
    """The batches in the middle train nothing, whatever gradients there were."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (1, 2) else loss


class SkipsByValue(Decayed):
    """As above, and nothing in the step's code tells batches from each other."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return None if loss > 1.6 else loss


class Zeros(Decayed):
    """The gradients of a part that only some batches use are zeros, which AdamW decays."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x) + (self.unused(x) if self.current_epoch else 0))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class OfBackbone(Decayed):
    """What no optimizer has is never set to zero."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.backbone.parameters(), lr=0.05)


class Tied(Decayed):
    def __init__(self) -> None:
        super().__init__()
        self.head[2] = nn.Linear(12, 12, bias=False)
        self.head[2].weight = self.backbone[0][0].weight


class LooksBefore(L.Callback):
    """Logs the norm of the gradients that are about to be set to zero."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        self.norms.append(float(nn.utils.get_total_norm(gradients)))
        module.log("norm", self.norms[-1])


class LooksAfter(L.Callback):
    """Which parameters have gradients, and the norm, when the backward pass begins and ends, and after the batch."""

    def __init__(self) -> None:
        self.norms: list[Any] = []

    def _look(self, module: Any) -> None:
        gradients = [p.grad for p in module.parameters()]
        there = [g for g in gradients if g is not None]
        self.norms.append(([g is None for g in gradients], float(nn.utils.get_total_norm(there))))

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self._look(module)

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self._look(module)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self._look(module)


class LooksAtEnd(LooksAfter):
    """As above, but not before the backward pass: until then 1F1B's new gradients may be there."""

    on_before_backward = L.Callback.on_before_backward


def norms(trainer: Any, module: Any, folder: Path) -> Any:
    return [callback.norms for callback in trainer.callbacks if isinstance(callback, (LooksBefore, LooksAfter))]


LOOKS: dict[str, Callable[[Path], Any]] = {
    "before": lambda folder: [LooksBefore()],
    "after": lambda folder: [LooksAfter()],
    "end": lambda folder: [LooksAtEnd()],
    "nobody": lambda folder: (),
}
KINDS: dict[str, Any] = {each.__name__: each for each in (Skips, SkipsByValue, Zeros, OfBackbone, Tied, Decayed)}
# Module, who looks, batches that are accumulated, schedule.
FEW = (
    *("Zeros after 1 1f1b", "SkipsByValue after 1 1f1b", "OfBackbone after 1 1f1b", "Decayed before 1 gpipe"),
    *("SkipsByValue nobody 2 1f1b", "Tied nobody 2 1f1b", "Decayed before 2 1f1b", "Skips end 1 1f1b", "OfBackbone end 2 1f1b"),
)
MORE = (
    *("Zeros after 1 gpipe", "Skips after 1 gpipe", "Tied after 1 1f1b", "OfBackbone after 1 gpipe", "Decayed before 1 1f1b"),
    *("Decayed after 2 1f1b", "OfBackbone nobody 2 1f1b", "Skips nobody 2 1f1b", "Zeros nobody 2 1f1b"),
    *("Decayed end 1 1f1b", "Decayed end 2 1f1b", "SkipsByValue end 1 1f1b", "Tied end 1 1f1b", "Zeros end 1 1f1b"),
)


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    """Runs on one device, or on every rank."""
    kind, look, count, schedule = name.split()
    # Five or six batches an epoch: the last one may be half of what is accumulated.
    run = Run(
        module=KINDS[kind],
        callbacks=LOOKS[look],
        options={"accumulate_grad_batches": int(count), "gradient_clip_val": 0.3, "limit_train_batches": 5},
        strategy={"num_microbatches": 4, "schedule": schedule},
        look=norms,
    )
    path = Path(folder) / f"{name} {stages}"
    path.mkdir(exist_ok=True)
    return go(run, path, stages)


@pytest.mark.parametrize("names", [FEW, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"])
def test_gradients_are_those_of_one_device(ranks: Callable[[int], RankPool], names: tuple[str, ...], tmp_path: Path) -> None:
    """Skipped batches, accumulation, hooks that look, decay, weights that no optimizer has or two stages have."""
    compare(ranks, do, names, tmp_path, 2)
