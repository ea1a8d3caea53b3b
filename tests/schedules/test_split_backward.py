"""Schedules that compute gradients of weights later than those of inputs: never others than one device's.

Autograd runs twice for it, and begins the second time inside the graph. Each kind of step here is one for which that was wrong
in some version of torch's schedules, or would be. All stages are in one process, where a schedule does the same as on several.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy
from lightning_fxpipe.runtime.region_pass import RegionPass
from lightning_fxpipe.schedules import stage_graph
from lightning_fxpipe.schedules.split_backward import HookWatch, input_gradients
from lightning_fxpipe.schedules.stage_graph import StageGraph

WIDTH = 8
SCHEDULES = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev", "v_half")


class Layer(nn.Module):
    """Two products, and what a kind of step does between them."""

    def __init__(self, calls: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self._calls = calls

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self._calls(self, self.first(x)))).unsqueeze(1).squeeze(1)


class Doubled(torch.autograd.Function):
    """An operation of Python, which counts how often its backward runs."""

    num_backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        Doubled.num_backwards += 1
        x, weight = ctx.saved_tensors
        return 2 * gradient @ weight.T, 2 * x.T @ gradient


def chunked(layer: Layer, h: Tensor) -> Tensor:
    first, second = (h @ layer.weight).chunk(2, dim=1)
    return torch.cat([second * first.sigmoid(), first], dim=1)


SEEN: list[int] = []


def hooked(layer: Layer, h: Tensor) -> Tensor:
    def triple(gradient: Tensor) -> Tensor:
        SEEN.append(1)
        return 3 * gradient

    h = h @ layer.weight
    if h.requires_grad:
        h.register_hook(triple)
    return h


def in_checkpoint(layer: Layer, h: Tensor, *, use_reentrant: bool) -> Tensor:
    found: Tensor = checkpoint(lambda x: torch.relu(x @ layer.weight), h, use_reentrant=use_reentrant)
    return found


def normed(layer: Layer, h: Tensor) -> Tensor:
    weight = layer.weight / layer.weight.norm()
    return torch.relu(h @ weight) @ weight


def of_shape(layer: Layer, h: Tensor) -> Tensor:
    return (h @ layer.weight) * h.shape[0] / len(h) + h.shape[1]


CALLS: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "a product": lambda layer, h: h @ layer.weight,
    "results that are views of one": chunked,
    "a weight used twice": lambda layer, h: h @ layer.weight @ layer.weight,
    "a weight that is added": lambda layer, h: h + layer.weight[: len(h)].sum(0) + layer.first.bias,
    "an operation of Python": lambda layer, h: Doubled.apply(h, layer.weight),  # type: ignore[no-untyped-call]
    "a hook on a result": hooked,
    "checkpointing": lambda layer, h: in_checkpoint(layer, h, use_reentrant=False),
    "checkpointing that calls backward": lambda layer, h: in_checkpoint(layer, h, use_reentrant=True),
    "a result that is a view": lambda layer, h: (h @ layer.weight).unflatten(1, (2, -1)).flatten(1),
    "sizes": of_shape,
    "weights made once and used twice": normed,
    "a layer used twice": lambda layer, h: layer.first(torch.relu(layer.first(h @ layer.weight))),
}


def scale_gradients(module: Net) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: 2 * gradient)


def count_accumulations(module: Net) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: SEEN.append(1))


def hook_layers(module: Net) -> None:
    for layer in module.layers:
        layer.register_full_backward_hook(lambda _, inputs, outputs: tuple(None if g is None else 2 * g for g in inputs))


def freeze(module: Net, *which: int) -> None:
    for index in which:
        module.layers[index].requires_grad_(False)


def tie(module: Net) -> None:
    module.layers[3].weight = module.layers[0].weight


CHANGES: dict[str, Callable[[Net], None]] = {
    "hooks on parameters": scale_gradients,
    "hooks after accumulation": count_accumulations,
    "hooks of layers": hook_layers,
    "the first layer frozen": lambda module: freeze(module, 0),
    "the first layers frozen": lambda module: freeze(module, 0, 1),
    "a layer in the middle frozen": lambda module: freeze(module, 2),
    "the last layers frozen": lambda module: freeze(module, 2, 3),
    "tied weights": tie,
}


class Net(LightningModule):
    def __init__(self, calls: str = "a product", change: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(*(Layer(CALLS[calls]) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 1)
        if change is not None:
            CHANGES[change](self)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = (self.head(self.layers(batch[0])) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-2)


def fitted(module: Net, strategy: FxPipeStrategy | str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    data = TensorDataset(torch.randn(24, WIDTH, generator=generator), torch.randn(24, 1, generator=generator))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=8))
    assert trainer.global_step == 3
    return {fqn: value.clone() for fqn, value in module.state_dict().items()}


def in_stages(schedule: str) -> FxPipeStrategy:
    return FxPipeStrategy(
        schedule=schedule,  # type: ignore[arg-type]
        num_stages=4 if schedule == "interleaved_zero_bubble" else 2,
        num_microbatches=4,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("calls", "change"), [*((calls, None) for calls in CALLS), *(("a product", c) for c in CHANGES)])
def test_gradients_are_those_of_one_device(calls: str, change: str | None, schedule: str) -> None:
    expected = fitted(Net(calls, change), "auto")
    found = fitted(Net(calls, change), in_stages(schedule))
    assert found.keys() == expected.keys()
    for fqn, value in found.items():
        torch.testing.assert_close(value, expected[fqn], rtol=1e-5, atol=1e-6, msg=lambda text, fqn=fqn: f"{fqn}: {text}")


class Skipping(Net):
    """A stage in the middle sends on what one of its own layers has saved, and what it has only received."""

    def skipped(self, first: Tensor) -> Tensor:
        return first

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        first = self.layers[0](batch[0])
        second = self.layers[1](first)
        third = self.layers[2](second)
        loss = (self.head(self.layers[3](third) * second + self.skipped(first)) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize(
    "split_points", [["layers.1", "layers.3"], ["layers.1", "layers.2", "layers.3"], ["layers.1", "layers.2"]]
)
def test_what_is_sent_may_be_needed_for_weights(split_points: list[str]) -> None:
    """The first half of the backward pass must leave it as it is."""
    expected = fitted(Skipping(), "auto")
    strategy = FxPipeStrategy(schedule="interleaved_zero_bubble", split_points=split_points, num_microbatches=4)
    found = fitted(Skipping(), strategy)
    for fqn, value in found.items():
        torch.testing.assert_close(value, expected[fqn], rtol=1e-5, atol=1e-6, msg=lambda text, fqn=fqn: f"{fqn}: {text}")


class TwoTowers(Net):
    """A second tower begins in the middle, from the batch, and meets the first one later: a decoder does so."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        first = self.layers[1](self.layers[0](batch[0]))
        second = self.layers[2](batch[0].flip(1))
        loss = (self.head(self.layers[3](second) * first) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("split_points", [["layers.1", "layers.3"], ["layers.1", "layers.3", "head"]])
def test_a_tower_that_begins_in_a_stage_gets_its_gradients(split_points: list[str]) -> None:
    """What it gives hangs on none of the stage's inputs, from which a search for weights may begin."""
    expected = fitted(TwoTowers(), "auto")
    strategy = FxPipeStrategy(schedule="interleaved_zero_bubble", split_points=split_points, num_microbatches=4)
    found = fitted(TwoTowers(), strategy)
    for fqn, value in found.items():
        torch.testing.assert_close(value, expected[fqn], rtol=1e-5, atol=1e-6, msg=lambda text, fqn=fqn: f"{fqn}: {text}")


class Detaching(Skipping):
    """What is sent could train, and does not."""

    def skipped(self, first: Tensor) -> Tensor:
        return first.detach()


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs"])
def test_what_is_sent_may_get_no_gradient(schedule: str) -> None:
    """The stage that sent it waits for its gradient all the same: zeros."""
    expected = fitted(Detaching(), "auto")
    found = fitted(Detaching(), FxPipeStrategy(schedule=schedule, num_stages=4, num_microbatches=4))  # type: ignore[arg-type]
    for fqn, value in found.items():
        torch.testing.assert_close(value, expected[fqn], rtol=1e-5, atol=1e-6, msg=lambda text, fqn=fqn: f"{fqn}: {text}")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_go_back_before_all_have_come_forward(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the schedule would be right, and none: GPipe in its place."""
    assert not hasattr(RegionPass, "interleaved")
    monkeypatch.setattr(RegionPass, "backward", None)
    fitted(Net(), in_stages(schedule))


WHOLE = ("an operation of Python", "a hook on a result", "checkpointing that calls backward")


@pytest.mark.parametrize("calls", [calls for calls in CALLS if calls != "a weight that is added"])  # which cannot be divided
def test_what_bears_it_is_split(calls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bubble filled a zero-bubble schedule is a slow one."""
    found: list[bool] = []

    def noted(*args: Any) -> Any:
        split = input_gradients(*args)
        found.append(split is not None)
        return split

    monkeypatch.setattr(stage_graph, "input_gradients", noted)
    fitted(Net(calls), in_stages("zbv_zero_bubble"))
    assert any(found) == (calls not in WHOLE)


def test_backwards_of_python_run_once_for_each_microbatch() -> None:
    Doubled.num_backwards = 0
    fitted(Net("an operation of Python"), in_stages("zbv_zero_bubble"))
    assert Doubled.num_backwards == 4 * 4 * 3


@pytest.mark.parametrize(("calls", "change"), [("a hook on a result", None), ("a product", "hooks after accumulation")])
def test_hooks_run_as_often_as_without_a_split(calls: str, change: str | None) -> None:
    found = []
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        strategy = FxPipeStrategy(schedule=schedule, num_stages=4, num_microbatches=4)  # type: ignore[arg-type]
        SEEN.clear()
        fitted(Net(calls, change), strategy)
        found.append(len(SEEN))
    assert found[0] == found[1] > 0


# ------------------------------------------------------------------ graphs by chance


class Graph:
    """A stage of random products, sums and functions of its inputs and weights; it may give these themselves as well."""

    def __init__(self, numbers: random.Random) -> None:
        self.inputs = [torch.randn(3, requires_grad=numbers.random() < 0.9) for _ in range(numbers.randint(0, 3))]
        self.weights = [nn.Parameter(torch.randn(3)) for _ in range(numbers.randint(1, 4))]
        made: list[Tensor] = [*self.inputs, *self.weights]
        for _ in range(numbers.randint(1, 9)):
            one, other = numbers.choice(made), numbers.choice(made)
            made.append(numbers.choice([one * other, one + other, one.tanh(), one.exp()]))
        self.outputs = [*dict.fromkeys(numbers.choice(made) for _ in range(numbers.randint(1, 3)))]
        self.gradients = [torch.randn(3) for _ in self.outputs]
        self.targets = [tensor for tensor in (*self.inputs, *self.weights) if tensor.requires_grad]
        self.num_hooks = [0] * len(self.weights)
        for index, weight in enumerate(self.weights):
            weight.register_hook(partial(self._count, index))

    def _count(self, index: int, gradient: Tensor) -> None:
        self.num_hooks[index] += 1

    def in_one_piece(self) -> list[Tensor | None]:
        trained = [(o, g) for o, g in zip(self.outputs, self.gradients, strict=True) if o.requires_grad]
        if not trained:
            return [None for _ in self.targets]
        outputs, gradients = zip(*trained, strict=True)
        found = torch.autograd.grad(outputs, self.targets, gradients, retain_graph=True, allow_unused=True)
        self.num_hooks = [0] * len(self.weights)
        return [*found]

    def in_halves(self) -> list[Tensor | None]:
        of_inputs, left = StageGraph.of(self.inputs, self.outputs).input_backward(self.gradients)
        assert all(weight.grad is None for weight in self.weights)
        assert left is not None
        left.compute()
        return [*of_inputs, *(weight.grad for weight in self.weights)]


def test_both_halves_together_are_the_backward_pass() -> None:
    """Weights used twice, made of others, behind an output alone; inputs sent on. Hooks of weights run once."""
    for seed in range(1500):
        torch.manual_seed(seed)
        graph = Graph(random.Random(seed))
        expected = graph.in_one_piece()
        for found, other, target in zip(graph.in_halves(), expected, graph.targets, strict=True):
            if other is None:
                is_weight = any(target is weight for weight in graph.weights)
                assert found is None if is_weight else not found.any(), f"seed {seed}"
            else:
                torch.testing.assert_close(found, other, msg=f"seed {seed}")
        assert graph.num_hooks == [0 if weight.grad is None else 1 for weight in graph.weights], f"seed {seed}"


def test_an_operation_of_python_runs_once_and_as_a_whole() -> None:
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2, requires_grad=True)
    output = Doubled.apply(x, weight)  # type: ignore[no-untyped-call]
    (gradient,), left = StageGraph.of([x], [output]).input_backward([torch.ones(1, 2)])
    assert left is None
    assert gradient.tolist() == [[4, 4]]
    assert weight.grad is not None


def test_a_hook_is_noted_in_its_block_only() -> None:
    watch, x = HookWatch(), torch.ones(2, requires_grad=True)
    register = Tensor.register_hook
    with watch.watching():
        pass
    assert not watch.has_seen_any
    with watch.watching():
        (x * 2).register_hook(lambda gradient: gradient)
    assert watch.has_seen_any
    with watch.watching():
        pass
    assert not watch.has_seen_any
    assert Tensor.register_hook is register
