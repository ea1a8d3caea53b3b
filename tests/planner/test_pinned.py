"""Modules are in the stages that the user chooses, and what lies between them goes by the balance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe import PartitionError, PartitionPlan, make_plan
from lightning_fxpipe.planner.pinned import pinned_firsts, pinned_modules

WIDTH = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(8)))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


def plan_of(stage_of: dict[str, int], num_stages: int = 3, **options: Any) -> PartitionPlan:
    return make_plan(Net(), torch.randn(8, WIDTH), num_stages=num_stages, stage_of=stage_of, **options)


def modules_of(plan: PartitionPlan) -> list[list[str]]:
    return [sorted({fqn.rpartition(".")[0] for fqn in stage.fqns if "unused" not in fqn}) for stage in plan.stages]


def test_modules_are_where_the_user_wants_and_the_others_balanced() -> None:
    free = modules_of(plan_of({}))
    assert free[0] == ["embed", "layers.0.0", "layers.1.0"]  # the last stage has the unused layer, too
    early = modules_of(plan_of({"layers.[0-5]": 0}))
    assert early[0] == ["embed", *(f"layers.{index}.0" for index in range(6))]
    assert {len(early[1]), len(early[2])} == {1, 2}
    last = modules_of(plan_of({"layers.1.*": -1}, num_stages=2))
    assert last == [["embed", "layers.0.0"], ["head", *(f"layers.{index}.0" for index in range(1, 8))]]
    between = modules_of(plan_of({"layers.4": 1, "layers.5": 1, "layers.6": 2}))
    assert {"layers.4.0", "layers.5.0"} <= {*between[1]}
    assert "layers.6.0" in between[2]


def test_a_later_pattern_and_an_inner_module_go_before() -> None:
    assert modules_of(plan_of({"layers.*": 0, "layers.7*": 1, "head": 2}))[1] == ["layers.7.0"]
    inner = plan_of({"layers": 0, "layers.7": 1}, num_stages=2)
    assert modules_of(inner)[1] == ["head", "layers.7.0"]


@pytest.mark.parametrize("balance", ["flops", "memory", "seconds"])
def test_with_any_balance(balance: str) -> None:
    found = modules_of(plan_of({"layers.5": 0, "layers.6": 1, "head": 2}, balance=balance))
    assert "layers.5.0" in found[0]
    assert "layers.6.0" in found[1]
    assert "head" in found[2]


def test_on_several_stages_of_a_device() -> None:
    plan = plan_of({"layers.1": 1, "layers.2": 2}, num_stages=4, num_devices=2, schedule="zbv_zero_bubble")
    assert "layers.1.0" in modules_of(plan)[1]
    assert "layers.2.0" in modules_of(plan)[2]


@pytest.mark.parametrize(
    ("stage_of", "message"),
    [
        ({"layer.*": 0}, r"A pattern in stage_of matches no module[^*]*layer\.\*"),
        ({"embed": 3}, "a stage that does not exist[^*]*stage 3 of 3"),
        ({"embed": -4}, "a stage that does not exist[^*]*stage -4 of 3"),
        ({"unused": 0}, "The model cannot be cut at a module in stage_of[^*]*unused[^*]*do not run it"),
        (
            {"layers.5": 1, "layers.2": 2},
            r"stages assigned by stage_of are impossible[^*]*layers.2\S* in stage 2, and layers.5\S*, which runs",
        ),
        ({"embed": 1}, "stages assigned by stage_of are impossible[^*]*no legal cuts"),
    ],
)
def test_what_cannot_be_is_refused(stage_of: dict[str, int], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        plan_of(stage_of)


def test_a_module_in_one_that_stays_whole_says_why() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.second(h) if float(h.sum()) > 0 else h

    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Looking())
    with pytest.raises(PartitionError, match="The model cannot be cut at a module in stage_of") as caught:
        make_plan(net, torch.randn(4, WIDTH), num_stages=2, stage_of={"1.second": 1})
    assert "1 cannot be split: " in str(caught.value.observed)


def test_paths_and_stages_by_themselves() -> None:
    assert pinned_modules(Net(), [("layers.?", 0), ("head", -1)], 4) == {f"layers.{i}": 0 for i in range(8)} | {"head": 3}
    # What is inside of a module in the same stage may stay whole.
    assert pinned_modules(Net(), [("layers*", 0), ("layers.7.0", 1), ("layers.6*", 0)], 4) == {"layers": 0, "layers.7.0": 1}
    assert pinned_firsts([0, None, 1, None], 2) == [[0, 0, 3, 3], [1, 1, 1, 1]]
