"""Tensors that code leaves for a whole module in an object that both know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.errors import FxPipeError, TraceError, UnsupportedError
from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.cost import build_chain
from lightning_fxpipe.tracing.trace import TracedRegion, trace_region
from tests.staging import WIDTH, assert_stages_equal_whole, batch, call_of


class Block(nn.Module):
    """Does what it is told, and may set ``left`` on the last block."""

    left: Tensor | None = None
    number = 0.0

    def __init__(self, does: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(WIDTH, WIDTH), does
        self.known: list[Block] = []  # no module of its own

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


class Blocks(nn.Module):
    def __init__(self, *does: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(each) for each in does)
        for block in self.blocks:
            block.known.append(self.blocks[-1])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def leaves(block: Block, x: Tensor) -> Tensor:
    y = block.linear(x)
    block.known[0].left = y.sigmoid()
    return y


def leaves_what_it_gets(block: Block, x: Tensor) -> Tensor:
    block.known[0].left = x
    return block.linear(x)


def leaves_its_result(block: Block, x: Tensor) -> Tensor:
    block.known[0].left = y = block.linear(x)
    return y


def leaves_what_follows_from_weights(block: Block, x: Tensor) -> Tensor:
    block.known[0].left = block.linear.weight.sum(0)
    return block.linear(x)


def leaves_a_table(block: Block, x: Tensor) -> Tensor:
    block.known[0].left = torch.arange(x.shape[1], dtype=x.dtype).cos()
    return block.linear(x)


def only_computes(block: Block, x: Tensor) -> Tensor:
    return block.linear(x)


def reads(block: Block, x: Tensor) -> Tensor:
    assert block.left is not None
    return block.linear(x) * block.left


def keeps_what_it_gets(block: Block, x: Tensor) -> Tensor:
    block.left = x
    return block.linear(x)


def reads_its_own(block: Block, x: Tensor) -> Tensor:
    block.left = block.linear(x)
    return torch.tanh(block.left)


def recorded(model: nn.Module) -> TracedRegion:
    return trace_region(model, call_of(batch()), opened=())


@pytest.mark.parametrize("left", [leaves_what_it_gets, leaves_its_result])
def test_a_tensor_that_the_graph_has_goes_to_who_uses_it(left: Any) -> None:
    """Each block may be in a stage of its own, where what is left for the reader is never seen."""
    check_brings_it(Blocks(left, only_computes, reads))


def test_what_is_left_and_an_argument_as_well_may_be_used_as_either() -> None:
    check_brings_it(Blocks(only_computes, leaves_its_result, reads))


def check_brings_it(model: Blocks) -> None:
    """And opens nothing, so that modules with hooks get it, too."""
    traced = recorded(model)
    assert traced.opened == ()
    assert model.blocks[2].left is None
    assert_stages_equal_whole(Assignment(chain=build_chain(traced), cuts=(0, 1)), batch())


@pytest.mark.parametrize("left", [leaves, leaves_what_follows_from_weights])
def test_what_a_module_would_have_to_be_opened_for_while_it_changes_others_is_refused(left: Any) -> None:
    """In a step, whose code runs on the last stage, it is not: ``gates_the_next_block`` of the zoo."""
    with pytest.raises(TraceError, match="The forward of Blocks cannot be traced") as raised:
        recorded(Blocks(left, only_computes, reads))
    assert raised.value.observed == "its forward changes self.blocks.2.left"


def test_a_module_that_keeps_what_it_is_called_with_may_be_called_with_it_again() -> None:
    class CallsTwice(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            y = self.blocks[0](x)
            return self.blocks[1](y) + self.blocks[1](y)

    assert recorded(CallsTwice(only_computes, keeps_what_it_gets)).opened == ()


@pytest.mark.parametrize("opened", [["blocks"], ["blocks", "blocks.0"]], ids=len)
def test_tensors_in_a_list_are_refused(opened: list[str]) -> None:
    """Where one block is in a stage and the other is in another, the list only grows in the one, and is empty in the other."""
    skips: list[Tensor] = []

    def puts(block: Block, x: Tensor) -> Tensor:
        skips.append(x)
        return block.linear(x)

    def takes(block: Block, x: Tensor) -> Tensor:
        return block.linear(x) + skips.pop()

    model = nn.ModuleDict({"blocks": nn.Sequential(Block(puts), Block(takes))})
    call = replace(call_of(batch()), path="blocks")
    with pytest.raises(UnsupportedError, match=r"exchange tensors through a list, a dict or another object\.") as raised:
        trace_region(model, call, opened=opened)
    assert str(raised.value.where).startswith("blocks.1, ")
    assert skips == []


@pytest.mark.parametrize("blocks", [(leaves_a_table, reads), (reads_its_own, reads_its_own)], ids=["table", "its own"])
def test_what_each_stage_has_by_itself_opens_nothing(blocks: Any) -> None:
    assert recorded(Blocks(*blocks)).opened == ()


def test_a_module_that_leaves_a_tensor_and_cannot_be_opened_is_refused() -> None:
    model = Blocks(leaves, only_computes, reads)
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(TraceError, match="The forward of Blocks cannot be traced") as raised:
        recorded(model)
    assert raised.value.observed == "blocks.2 uses a tensor that blocks.0 stored for it instead of passing it as an argument"
    assert "test_state_reads.py:" in str(raised.value.where)


def sets_a_number(block: Block, x: Tensor) -> Tensor:
    block.number = x.shape[0]
    return block.linear(x)


def sets_a_value(block: Block, x: Tensor) -> Tensor:
    block.number = x.sum().item()
    return block.linear(x)


@pytest.mark.parametrize("sets", [sets_a_number, sets_a_value])
def test_numbers_that_a_block_leaves_on_itself_are_refused_where_others_read_them(sets: Any) -> None:
    """In a stage without the block its number is the one of the beginning."""

    class Reads(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.blocks[0].number

    model = Reads(sets, only_computes)
    model.blocks[0].number = 1.0
    with pytest.raises(FxPipeError, match="reads values that the forward of a submodule sets: blocks.0.number") as raised:
        recorded(model)
    assert type(raised.value) is FxPipeError  # no other way to run the step is tried: none would be right


@pytest.mark.parametrize("sets", [sets_a_number, sets_a_value])
def test_numbers_that_nobody_else_reads_are_nobodys_business(sets: Any) -> None:
    assert recorded(Blocks(sets, only_computes)).opened == ()
