"""Blocks are the entries of the outermost list of modules; those that change something are left out, and as few are taken as
the memory needs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe import PartitionError, PartitionPlan, UnsupportedError, make_plan
from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.cut_rule import CutRule
from lightning_fxpipe.planner.recompute_rule import Load, RecomputeRule, blocks_of
from lightning_fxpipe.planner.step_plan import make_planned
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.simulation.by_name import table_of
from lightning_fxpipe.simulation.costs import StageCosts
from lightning_fxpipe.stages.build import build_stage
from lightning_fxpipe.stages.memory import SavedBytes
from tests.traces import call_of

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * width), nn.Linear(4 * width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks or [Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


BATCH = torch.randn(6, WIDTH)


def assignment_of(net: nn.Module, num_stages: int = 2) -> Assignment:
    planned = make_planned(net, BATCH, rule=CutRule(num_stages=num_stages))
    assert planned.assignment is not None
    return planned.assignment


def recomputed(net: nn.Module, value: Any, load: Load | None = None) -> tuple[str, ...]:
    assignment = assignment_of(net)
    return RecomputeRule.of(value).modules(costs_of(assignment), assignment.cuts, load)


def costs_of(assignment: Assignment) -> UnitCosts:
    return UnitCosts(chain=assignment.chain, call=call_of(BATCH))


def test_all_blocks_are_the_entries_of_lists_and_what_the_graph_calls_as_a_whole() -> None:
    assert recomputed(Net(), False) == ()
    assert recomputed(Net(), True) == ("stem", *(f"blocks.{index}" for index in range(4)), "head")
    # Also where a cut falls inside of one.
    heavy = Net(Block(), Block(width=64), Block())
    assert recomputed(heavy, True) == ("stem", "blocks.0", "blocks.1", "blocks.2", "head")
    assert [block.path for block in blocks_of(assignment_of(nn.Sequential(nn.Sequential(Block()), Block())).chain)] == [
        "0",
        "1",
    ]


def test_patterns_name_modules_by_their_paths() -> None:
    assert recomputed(Net(), ["blocks.*"]) == tuple(f"blocks.{index}" for index in range(4))
    assert recomputed(Net(), ["blocks.[12]", "head"]) == ("blocks.1", "blocks.2", "head")
    assert recomputed(Net(), ["*.up"]) == tuple(f"blocks.{index}.up" for index in range(4))
    assert recomputed(Net(), "blocks.*") == recomputed(Net(), ("blocks.*",)) == recomputed(Net(), ["blocks.*"])
    with pytest.raises(PartitionError, match="activation_checkpointing matches no module of the model") as caught:
        recomputed(Net(), ["layers.*"])
    assert caught.value.observed == "layers.*"


def test_classes_name_the_outermost_modules_of_them() -> None:
    blocks = tuple(f"blocks.{index}" for index in range(4))
    assert recomputed(Net(), Block) == recomputed(Net(), [Block]) == recomputed(Net(), {Block}) == blocks
    assert recomputed(Net(), [nn.Linear, Block]) == ("stem", *blocks, "head")
    assert recomputed(Net(), ["head", Block]) == (*blocks, "head")
    with pytest.raises(PartitionError, match="activation_checkpointing matches no module of the model") as caught:
        recomputed(Net(), nn.Conv2d)
    assert caught.value.observed == "torch.nn.modules.conv.Conv2d"


def test_what_changes_something_is_not_run_twice() -> None:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    class InPlace(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.relu_(self.down(self.up(x))))

    net = Net(Block(), Normed(), InPlace())
    assert recomputed(net, True) == ("stem", "blocks.0", "blocks.2", "head")
    with pytest.raises(PartitionError, match="recomputation would repeat a change in place") as caught:
        recomputed(net, ["blocks.*"])
    assert caught.value.where == "blocks.1"


def load(memory_bytes: int, schedule: Any = "gpipe") -> Load:
    return Load(schedule=schedule, num_ranks=2, num_microbatches=4, memory_bytes=(memory_bytes, memory_bytes))


def test_as_few_are_taken_as_the_memory_needs() -> None:
    wide = Net(Block(width=2 * WIDTH), Block(), Block(), Block(width=2 * WIDTH))
    assignment = assignment_of(wide)
    states = max(sum(4 * p.numel() * 4 for p in wide.parameters() if p.numel()) // 2, 1)
    assert recomputed(wide, "auto", load(10**9)) == ()
    assert recomputed(wide, "auto", None) == ()  # nobody knows what there is
    everything = recomputed(wide, "auto", load(1))
    assert set(everything) == set(recomputed(wide, True))
    costs, middle = costs_of(assignment), assignment.cuts[0] + 1
    # A little less than what GPipe keeps: one block is enough, on the stage that keeps the most.
    parts = [slice(None, middle), slice(middle, None)]
    parameter_bytes = [sum(4 * unit.num_parameters for unit in costs.chain.units[part]) for part in parts]
    needs = [4 * own + 4 * sum(costs.kept_bytes[part]) for own, part in zip(parameter_bytes, parts, strict=True)]
    one = recomputed(wide, "auto", load(max(needs) - 1))
    assert 1 <= len(one) <= 2
    assert states > 0
    # 1F1B keeps one microbatch less on the second stage, so less is taken.
    assert len(recomputed(wide, "auto", load(max(needs) - 1, "1f1b"))) <= len(one)
    table = table_of("1f1b", [StageCosts(forward_seconds=1, input_backward_seconds=1)] * 2, 4)
    for limit in (1, max(needs) - 1, max(needs)):
        assert recomputed(wide, "auto", load(limit, table)) == recomputed(wide, "auto", load(limit, "1f1b"))
    # Where the optimizer keeps less, so much less memory is needed.
    shared_out = max(need - own for need, own in zip(needs, parameter_bytes, strict=True))
    assert recomputed(wide, "auto", replace(load(shared_out), optimizer_bytes_per_byte=1.0)) == ()
    assert recomputed(wide, "auto", replace(load(shared_out - 1), optimizer_bytes_per_byte=1.0)) != ()
    assert recomputed(wide, "auto", load(shared_out)) != ()
    sizes = [len(recomputed(wide, "auto", load(limit))) for limit in range(1, max(needs) + 2, max(needs) // 12)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("value", [True, Block, ["blocks.*"], ["*.up"], ["blocks.1"]])
def test_a_stage_that_recomputes_gives_the_same_and_keeps_less(value: Any) -> None:
    net = Net()
    assignment = assignment_of(net)
    paths = RecomputeRule.of(value).modules(costs_of(assignment), assignment.cuts, None)
    found: list[tuple[Tensor, dict[str, Tensor], int]] = []
    for marked in ((), paths):
        net.zero_grad()
        values: tuple[Tensor, ...] = (BATCH.clone().requires_grad_(),)
        counted = SavedBytes(net.parameters())
        for index in range(2):
            with counted.counting():
                values = build_stage(assignment, index, marked).module(*values)
        values[0].square().sum().backward()
        gradients = {name: parameter.grad.clone() for name, parameter in net.named_parameters() if parameter.grad is not None}
        found.append((values[0].detach(), gradients, counted.num_bytes))
    (plain, gradients, kept), (again, same, less) = found
    assert torch.equal(plain, again)
    assert gradients.keys() == same.keys() == dict(net.named_parameters()).keys()
    assert all(torch.equal(gradient, same[name]) for name, gradient in gradients.items())
    assert less < kept if value != ["*.up"] else less == kept  # a linear layer keeps its input in any case


def test_calls_of_one_module_are_recomputed_each_by_itself() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.between = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.shared(self.between(self.shared(x)))
            return result

    net = Twice()
    assignment = assignment_of(net, num_stages=1)
    stage = build_stage(assignment, 0, ("shared",))
    names = [node.name for node in stage.module.graph.nodes if node.op == "call_function" and "checkpointed" in node.name]
    assert len(names) == 2
    x = BATCH.clone().requires_grad_()
    torch.testing.assert_close(stage.module(x)[0], net(x), rtol=0, atol=0)


def test_the_plan_tells_what_is_recomputed_and_keeps_it(tmp_path: Any) -> None:
    plan = make_plan(Net(), BATCH, num_stages=2, activation_checkpointing="blocks.*")
    assert plan.checkpointed_modules == tuple(f"blocks.{index}" for index in range(4))
    assert "Activation checkpointing: blocks.0, blocks.1, blocks.2, blocks.3" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert PartitionPlan.load(tmp_path / "plan.json") == plan


def test_a_step_that_every_rank_runs_recomputes_nothing() -> None:
    import lightning as L

    class ByHand(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.manual_backward(self.net(batch).sum())

    with pytest.raises(UnsupportedError, match='"parameters", without activation checkpointing'):
        make_plan(ByHand(), BATCH, num_stages=2, activation_checkpointing=True)
