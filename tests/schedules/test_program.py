"""What a rank does by a table: which messages, in which order, and how long their memory is kept."""

from __future__ import annotations

import pytest
import torch

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.schedules.program import Edge, Message, Program, program_of
from lightning_fxpipe.simulation.actions import FORWARD, ActionTable
from lightning_fxpipe.simulation.orders import gpipe, looped_breadth_first, one_forward_one_backward
from lightning_fxpipe.stages.build import TensorSpec

SPEC = TensorSpec(shape=(4,), dtype=torch.float32, requires_grad=True)
LABELS = TensorSpec(shape=(4,), dtype=torch.int64, requires_grad=False)


def chain(num_stages: int) -> list[Edge]:
    return [Edge(source=stage, target=stage + 1, spec=spec) for stage in range(num_stages - 1) for spec in (SPEC, LABELS)]


def words(message: Message) -> str:
    """A message as the action that sends it would be written, with the number of its tensors."""
    value = message.values[0]
    return f"{'B' if value.is_gradient else 'F'}{value.microbatch} x{len(message.values)}"


def starts(program: Program) -> list[list[str]]:
    return [[words(message) for message in step.starts] for step in program.steps]


def test_messages_follow_from_the_table_and_the_edges() -> None:
    """What trains comes back; a label does not."""
    first, last = (program_of(one_forward_one_backward(2, 2), chain(2), rank, ahead_bytes=0) for rank in range(2))
    assert [str(step.action) for step in first.steps] == ["0F0", "0F1", "0B0", "0B1"]
    assert [[words(m) for m in step.sends] for step in first.steps] == [["F0 x2"], ["F1 x2"], [], []]
    assert [[words(m) for m in step.receives] for step in first.steps] == [[], [], ["B0 x1"], ["B1 x1"]]
    assert [[words(m) for m in step.receives] for step in last.steps] == [["F0 x2"], [], ["F1 x2"], []]
    assert [len(step.inputs) for step in last.steps] == [2, 0, 2, 0]
    assert [len(step.outputs) for step in last.steps] == [0, 1, 0, 1]


def test_an_evaluation_runs_the_forward_actions_alone() -> None:
    program = program_of(one_forward_one_backward(2, 3), chain(2), 0, kinds={FORWARD})
    assert [str(step.action) for step in program.steps] == ["0F0", "0F1", "0F2"]
    assert len(program.leftover) == 3  # nothing comes back that would say that they have arrived


def test_stages_of_one_rank_send_nothing_to_each_other() -> None:
    program = program_of(looped_breadth_first(1, 2, stages_per_rank=3), chain(3), 0)
    assert not any(step.sends or step.receives for step in program.steps)
    assert [len(step.inputs) for step in program.steps[:6]] == [0, 0, 2, 2, 2, 2]


def test_receives_start_in_the_order_of_the_sends() -> None:
    """The second microbatch is sent first, and used last."""
    table = ActionTable.from_csv("0F1,0F0,0F2,0B0,0B1,0B2\n1F0,1B0,1F2,1B2,1F1,1B1\n")
    program = program_of(table, chain(2), 1, ahead_bytes=0)
    assert starts(program) == [["F1 x2", "F0 x2"], ["F2 x2"], [], [], [], []]


def test_a_receive_starts_one_action_before_its_turn() -> None:
    program = program_of(one_forward_one_backward(2, 4), chain(2), 1, ahead_bytes=0)
    assert starts(program) == [["F0 x2"], ["F1 x2"], [], ["F2 x2"], [], ["F3 x2"], [], []]


def test_small_messages_are_received_long_before_their_turn() -> None:
    forward = program_of(gpipe(2, 8), chain(2), 1, kinds={FORWARD})
    assert starts(forward)[0] == [f"F{index} x2" for index in range(8)]
    num_bytes = SPEC.num_bytes + LABELS.num_bytes
    assert len(starts(program_of(gpipe(2, 8), chain(2), 1, kinds={FORWARD}, ahead_bytes=3 * num_bytes))[0]) == 4


def test_no_more_buffers_than_microbatches_in_flight() -> None:
    """1F1B keeps one microbatch on the last rank, and two on the first: so no more is under way to it."""
    for rank, most in ((0, 2), (1, 1)):
        under_way = 0
        for step in program_of(one_forward_one_backward(2, 8), chain(2), rank).steps:
            under_way += len(step.starts)
            assert under_way - len(step.receives) <= most
            under_way -= len(step.receives)


def test_a_send_is_waited_for_once_the_receiver_has_answered() -> None:
    first, last = (program_of(one_forward_one_backward(2, 4), chain(2), rank) for rank in range(2))
    completes = [[words(message) for message in step.completes] for step in first.steps]
    assert [str(step.action) for step in first.steps] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"]
    assert completes == [[], [], ["F0 x2"], [], ["F1 x2"], [], ["F2 x2"], ["F3 x2"]]
    # The third forward comes after the first backward of the first rank.
    assert [[words(message) for message in step.completes] for step in last.steps][4] == ["B0 x1"]
    assert [words(message) for message in last.leftover] == ["B2 x1", "B3 x1"]


def test_a_table_whose_ranks_wait_for_each_other_is_refused() -> None:
    """Naming what each line waits for."""
    table = ActionTable.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    for rank in range(2):
        with pytest.raises(ScheduleError, match=r"(?s)wait for each other.*line 1 for 1B0, line 2 for 0F1"):
            program_of(table, chain(2), rank)


def test_ranks_are_connected_in_an_order_that_all_have() -> None:
    """A rank that waits for its neighbour, which waits for the next one, is met by it."""
    table, edges = one_forward_one_backward(3, 2), [*chain(3), Edge(source=0, target=2, spec=LABELS)]
    pairs = [program_of(table, edges, rank).pairs for rank in range(3)]
    assert pairs == [
        ((0, 1), (0, 2), (1, 0)),
        ((0, 1), (1, 0), (1, 2), (2, 1)),
        ((0, 2), (1, 2), (2, 1)),
    ]
    assert all([*each] == sorted(each) for each in pairs)
