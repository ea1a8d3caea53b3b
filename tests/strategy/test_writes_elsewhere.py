"""A module's forward that changes parameters or buffers of another module, by a reference of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy, make_plan
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.tracing.trace import trace_region
from tests.lit import make_trainer
from tests.traces import call_of

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale


class Writes(Block):
    """Changes the ``target``, which is no submodule of it."""

    def __init__(self, target: Block, change: Callable[[Block], Any]) -> None:
        super().__init__()
        self.target, self.change = [target], change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.target[0])
        return super().forward(x)


class Model(L.LightningModule):
    def __init__(self, change: Callable[[Block], Any]) -> None:
        super().__init__()
        torch.manual_seed(4)
        changed = Block()
        writing = [Writes(changed, change) for _ in range(5)]
        *first, last = writing
        self.model = nn.Sequential(*first, changed, *(Block() for _ in range(6)), last, nn.Linear(WIDTH, WIDTH))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.model(batch[0]) - batch[1]).square().mean()

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(change: Callable[[Block], Any], **options: Any) -> dict[str, Any]:
    module = Model(change)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(16, WIDTH, generator=generator), torch.randn(16, WIDTH, generator=generator))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(max_epochs=1, **options).fit(module, DataLoader(data, 4))
    return {"losses": module.losses, "state": {fqn: tensor.clone() for fqn, tensor in module.state_dict().items()}}


CHANGES: dict[str, Callable[[Block], Any]] = {
    "parameter": lambda block: block.layer.bias.data.mul_(1.05),
    "buffer": lambda block: block.scale.data.mul_(1.05),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_shares_a_stage_with_the_module_that_it_changes(change: Callable[[Block], Any]) -> None:
    """On another rank the change would be lost: that has the module, too, and does not run it."""
    plan = make_plan(Model(change), (torch.randn(4, WIDTH), torch.randn(4, WIDTH)), num_stages=2)
    assert {plan.stages_of(f"model.{number}.layer.weight") for number in range(5)} == {(0,)}
    there = _fit(change, strategy=FxPipeStrategy(plan=plan, num_microbatches=1))
    torch.testing.assert_close(there, _fit(change), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_of_several_modules_alike_changes_it(change: Callable[[Block], Any]) -> None:
    """From the third call on, calls of modules alike are answered from earlier ones, if these change nothing."""
    traced = trace_region(Model(change).model, call_of(torch.randn(4, WIDTH)), opened=())
    changing = [node.target for node in traced.graph.nodes if node.meta.get("mutated_storages")]
    assert changing == ["0", "1", "2", "3", "11"]


def test_freezing_another_modules_parameter_is_refused() -> None:
    model = Model(lambda block: block.layer.weight.requires_grad_(False)).model
    with pytest.raises(UnsupportedError, match="forward freezes or unfreezes a parameter of another module"):
        trace_region(model, call_of(torch.randn(4, WIDTH)), opened=())
