"""Gradients of every step where those of weights come later, by name, against one device: what torch or others once had wrong.

With ``zb_h1`` on two ranks, with ``zbv_zero_bubble`` in one process. More kinds of steps are in
``tests/schedules/test_split_backward.py``, by the weights that they train.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy
from lightning_fxpipe.schedules import stage_graph
from lightning_fxpipe.schedules.split_backward import input_gradients
from tests.ranks.pool import RankPool
from tests.schedules.test_split_backward import CALLS, SEEN, WIDTH, Layer, Net

NUM_STEPS, NUM_MICROBATCHES, NUM_LAYERS = 3, 4, 4
Gradients = list[dict[str, Tensor]]


class Carrying(Net):
    """Layers give each other numbers, words, nothing, and a tensor that has no gradient."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        state: Any = (batch[0], 0, None, "sum", batch[0] > 0)
        for layer in self.layers:
            state = self.passed(layer, *state)
        return (self.head(state[0] + state[1]) - batch[1]).square().mean()

    @staticmethod
    def passed(layer: nn.Module, h: Tensor, depth: int, mask: None, word: str, positive: Tensor) -> tuple[Any, ...]:
        assert mask is None
        assert word == "sum"
        found = layer(h) + h * positive * depth
        return found, depth + 1, mask, word, found > h.mean(dim=1, keepdim=True)


class HookedLayer(Layer):
    """Has hooks on what it gets and on what it gives, which are the very tensors that go from stage to stage."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(doubled)
        found = super().forward(x)
        if found.requires_grad:
            found.register_hook(doubled)
        return found


def doubled(gradient: Tensor) -> Tensor:
    SEEN.append(1)
    return 2 * gradient


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(*(HookedLayer(CALLS["a product"]) for _ in range(NUM_LAYERS)))


class Recomputing(Net):
    """Whole layers are computed again, so that what is sent is the result of one and the argument of another."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=self.use_reentrant)
        found: Tensor = self.head(h)
        return found

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()


STEPS: dict[str, Callable[[], Net]] = {
    "results that are views of one (pytorch 170277)": lambda: Net("results that are views of one"),
    "a weight used twice (pytorch 180952)": lambda: Net("a weight used twice"),
    "inputs of stages that are no tensors (torchtitan)": Carrying,
    "hooks on what is sent (pytorch 185331)": Hooked,
    "checkpointing in a layer": lambda: Net("checkpointing"),
    "checkpointing in a layer that calls backward (NeMo AutoModel 3257)": lambda: Net("checkpointing that calls backward"),
    "checkpointing of layers": lambda: Recomputing(use_reentrant=False),
    "checkpointing of layers that calls backward": lambda: Recomputing(use_reentrant=True),
}
SPLIT = {name for name in STEPS if "hooks" not in name and "calls backward" not in name}
SPLIT.add("checkpointing of layers that calls backward")  # as on one device no layer trains then, and the head is split


class Recording(Callback):
    """Notes the gradients of each step, and how often hooks have run."""

    def __init__(self) -> None:
        self.gradients: Gradients = []
        self.num_hooks: list[int] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.num_hooks.append(len(SEEN))
        SEEN.clear()
        named = ((fqn, parameter.grad) for fqn, parameter in module.named_parameters())
        self.gradients.append({fqn: gradient.detach().clone() for fqn, gradient in named if gradient is not None})


def recorded(step: str, schedule: str | None, devices: int = 1) -> tuple[Gradients, list[int], bool]:
    """Runs on every rank: the gradients of each step, how often hooks ran in it here, and whether a backward pass was split."""
    strategy: Any = "auto"
    if schedule is not None:
        strategy = FxPipeStrategy(schedule=schedule, num_stages=2, num_microbatches=NUM_MICROBATCHES)  # type: ignore[arg-type]
    generator, recording, splits = torch.Generator().manual_seed(4), Recording(), []
    data = TensorDataset(torch.randn(24, WIDTH, generator=generator), torch.randn(24, 1, generator=generator))

    def noted(*args: Any) -> Any:
        split = input_gradients(*args)
        splits.append(bool(args[0]) and split is not None)  # a first layer without inputs that train has no graph
        return split

    SEEN.clear()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=devices, max_epochs=1, callbacks=[recording], **quiet)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_graph, "input_gradients", noted)
        trainer.fit(STEPS[step](), DataLoader(data, batch_size=24 // NUM_STEPS))
    assert trainer.global_step == NUM_STEPS
    return recording.gradients, recording.num_hooks, any(splits)


@cache
def on_one_device(step: str) -> Gradients:
    return recorded(step, None)[0]


def assert_same_gradients(found: Gradients, step: str) -> None:
    expected = on_one_device(step)
    assert len(found) == len(expected) == NUM_STEPS
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine.keys() == theirs.keys()
        for fqn, gradient in mine.items():
            message = f"step {index}, {fqn}: {{}}"
            torch.testing.assert_close(gradient, theirs[fqn], rtol=1e-5, atol=1e-6, msg=message.format)


@pytest.mark.parametrize("step", STEPS)
def test_gradients_of_two_ranks_are_those_of_one_device(ranks: Callable[[int], RankPool], step: str) -> None:
    results = ranks(2).run(recorded, step, "zb_h1", 2)
    for gradients, num_hooks, _ in results:
        assert_same_gradients(gradients, step)
        assert len(set(num_hooks)) == 1  # as often in each step: none pile up
    assert any(has_split for *_, has_split in results) == (step in SPLIT)


@pytest.mark.parametrize("step", STEPS)
def test_gradients_of_a_v_in_one_process_are_those_of_one_device(step: str) -> None:
    gradients, num_hooks, has_split = recorded(step, "zbv_zero_bubble")
    assert_same_gradients(gradients, step)
    of_hooks = (2 * NUM_LAYERS - 1) * NUM_MICROBATCHES if "hooks" in step else 0
    assert num_hooks == [of_hooks] * NUM_STEPS
    assert has_split == (step in SPLIT)
