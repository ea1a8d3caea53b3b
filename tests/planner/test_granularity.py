"""How far a model is opened for a plan: at once as far as its cuts need, as the tree of its modules tells."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.planning import plan_region
from lightning_fxpipe.tracing import trace
from lightning_fxpipe.tracing.fake_run import fake_run
from lightning_fxpipe.tracing.recordable import RegionCall
from tests.zoo.models import ENTRIES

WIDTH = 12


def nested(depth: int) -> nn.Module:
    """A sequence of sequences of two layers each."""
    if depth == 0:
        return nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(nested(depth - 1), nested(depth - 1))


def plan_of(module: nn.Module, num_stages: int) -> PartitionPlan:
    return plan_region(
        module, RegionCall(path="", args=(torch.ones(4, WIDTH),), kwargs={}, batch_size=4), num_stages=num_stages
    )


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_two_recordings_make_a_plan_of_modules_that_run_in_order(num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(trace, "fake_run", lambda *args, **kwargs: made.append(1) or fake_run(*args, **kwargs))
    plan = plan_of(nested(4), num_stages)
    layers = [stage.num_parameters // (WIDTH * (WIDTH + 1)) for stage in plan.stages]
    assert max(layers) == -(-16 // num_stages)
    assert len(made) == 2  # one, and one that is compared with it


class Backwards(nn.Module):
    """Runs its parts in another order than that in which they were registered."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nested(1), nested(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]


def test_modules_that_run_in_another_order_are_cut_as_well() -> None:
    plan = plan_of(Backwards(), 2)
    assert [stage.num_parameters for stage in plan.stages] == [5 * WIDTH * (WIDTH + 1)] * 2


def test_opening_more_does_not_make_a_plan_worse() -> None:
    """In the finest trace of this model most cuts are illegal; the stages had 0, 0, 8328 and 1787 parameters."""
    entry = next(each for each in ENTRIES if each.name == "deberta_v2")
    torch.manual_seed(0)
    call = RegionCall(path="", args=(), kwargs=entry.make_batch(4, 4), batch_size=4)
    plan = plan_region(entry.make_module().train(), call, num_stages=4)
    assert max(stage.num_parameters for stage in plan.stages) < 3100
