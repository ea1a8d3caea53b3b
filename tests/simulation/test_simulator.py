"""Times of a simulation against those that follow from its definition, and what is read off them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.simulation.actions import Action, ActionTable, Kind
from lightning_fxpipe.simulation.costs import Link, Overhead, StageCosts
from lightning_fxpipe.simulation.orders import (
    gpipe,
    hand_made_zero_bubble,
    interleaved,
    looped_breadth_first,
    one_forward_one_backward,
)
from lightning_fxpipe.simulation.simulator import Simulation, run_table

TABLES = [
    gpipe(3, 4),
    one_forward_one_backward(4, 6),
    interleaved(2, 4, stages_per_rank=3),
    looped_breadth_first(3, 2, stages_per_rank=2),
    hand_made_zero_bubble(3, 5, times_memory=2),
]


def ends_by_definition(table: ActionTable, costs: list[StageCosts], latency: float, fixed: float) -> dict[Action, float]:
    """An action begins when the one before it on its rank is over, and what it needs has arrived."""
    before = {action: earlier for actions in table.ranks for earlier, action in pairwise(actions)}
    last = table.num_stages - 1

    def needed(action: Action) -> Action | None:
        if action.kind is Kind.FORWARD:
            return Action(action.stage - 1, Kind.FORWARD, action.microbatch) if action.stage else None
        if action.kind is Kind.WEIGHT_BACKWARD or action.stage == last:
            return None
        return Action(action.stage + 1, action.kind, action.microbatch)

    @cache
    def end(action: Action) -> float:
        begin, other = 0.0, needed(action)
        if action in before:
            begin = end(before[action])
        if other is not None:
            is_sent = table.rank_of_stage[other.stage] != table.rank_of_stage[action.stage]
            begin = max(begin, end(other) + latency * is_sent)
        return begin + costs[action.stage].seconds(action.kind) + fixed

    return {action: end(action) for action in table}


def ends(simulation: Simulation) -> dict[Action, float]:
    return {event.action: event.end_seconds for events in simulation.ranks for event in events}


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(TABLES), st.data(), st.floats(0, 2), st.floats(0, 1))
def test_times_are_those_that_follow_from_the_definition(
    table: ActionTable, data: st.DataObject, latency: float, fixed: float
) -> None:
    seconds = st.floats(0, 5)
    costs = [
        StageCosts(
            forward_seconds=data.draw(seconds),
            input_backward_seconds=data.draw(seconds),
            weight_backward_seconds=data.draw(seconds),
        )
        for _ in range(table.num_stages)
    ]
    found = run_table(table, costs, link=Link(latency_seconds=latency), overhead=Overhead(action_seconds=fixed))
    assert ends(found) == pytest.approx(ends_by_definition(table, costs, latency, fixed))
    assert found.pipeline_seconds == pytest.approx(max(ends(found).values()))
    path = found.critical_path
    assert path[0].decided_by is None
    assert path[-1].end_seconds == found.pipeline_seconds
    waits = sum(after.start_seconds - earlier.end_seconds for earlier, after in pairwise(path))
    assert 0 <= waits <= latency * len(path) + 1e-9  # nothing lies between two of them but a transfer


PLAIN = [StageCosts(forward_seconds=1, input_backward_seconds=1, weight_backward_seconds=1)] * 2


def test_a_step_by_hand() -> None:
    found = run_table(gpipe(2, 1), PLAIN, overhead=Overhead(step_seconds=0.5))
    starts = {str(event.action): event.start_seconds for events in found.ranks for event in events}
    assert starts == {"0F0": 0, "1F0": 1, "1B0": 2, "0B0": 4}
    assert [str(event.action) for event in found.critical_path] == ["0F0", "1F0", "1B0", "0B0"]
    assert (found.pipeline_seconds, found.seconds, found.longest_rank_seconds) == (6, 6.5, 6)
    assert found.busy_seconds == (3, 3)
    assert found.bubble_fraction == 0.5


def test_transfers_in_one_direction_follow_each_other() -> None:
    """Two forwards of a second; each sends for three. The second message begins when the first is through."""
    cost = StageCosts(forward_seconds=1, input_backward_seconds=1, output_bytes=3)
    found = run_table(gpipe(2, 2), [cost] * 2, link=Link(latency_seconds=0.5, bytes_per_second=1))
    starts = {str(event.action): event.start_seconds for events in found.ranks for event in events}
    assert (starts["1F0"], starts["1F1"]) == (1 + 3.5, 1 + 3 + 3 + 0.5)
    # Back, as many bytes, on another way: 1B0 ends at 9.5, 1B1 at 10.5.
    assert (starts["0B0"], starts["0B1"]) == (9.5 + 3.5, 9.5 + 3 + 3 + 0.5)


def test_skip_is_sent_once_past_the_stages_between() -> None:
    """Stage 0 computes for a second, and sends 4 bytes past stage 1, which gets 2; stage 2 begins when both are there."""
    cost = StageCosts(forward_seconds=1, input_backward_seconds=1, output_bytes=2)
    skipping = replace(cost, skips=((2, 4.0),))
    found = run_table(gpipe(3, 1), [skipping, cost, cost], link=Link(latency_seconds=0.5, bytes_per_second=1))
    starts = {str(event.action): event.start_seconds for events in found.ranks for event in events}
    assert (starts["1F0"], starts["2F0"]) == (1 + 2.5, 3.5 + 1 + 2.5)  # the skip is there at 5.5
    # 2B0 ends at 9: the gradients for stages 1 and 0 are there at 11.5 and 13.5, and 1B0's at 15.
    assert (starts["1B0"], starts["0B0"]) == (11.5, 15)
    found = run_table(gpipe(3, 1), [replace(cost, skips=((2, 9.0),)), cost, cost], link=Link(bytes_per_second=1))
    starts = {str(event.action): event.start_seconds for events in found.ranks for event in events}
    assert (starts["2F0"], starts["0B0"]) == (1 + 9, 12 + 9)
    assert {str(event.action): str(event.decided_by) for events in found.ranks for event in events}["0B0"] == "2B0"


def test_skips_are_received_one_after_the_other_where_that_does_not_overlap() -> None:
    cost = StageCosts(forward_seconds=1, input_backward_seconds=1, output_bytes=2)
    link = Link(latency_seconds=0.5, bytes_per_second=1, overlaps=False)
    found = run_table(gpipe(3, 1), [replace(cost, skips=((2, 4.0),)), cost, cost], link=link)
    starts = {str(event.action): event.start_seconds for events in found.ranks for event in events}
    assert starts["2F0"] == 1 + 4.5 + 2.5  # while stage 1 receives and computes, the skip comes
    # Within a rank nothing is sent.
    table = looped_breadth_first(1, 1, stages_per_rank=3)
    assert run_table(table, [replace(cost, skips=((2, 4.0),)), cost, cost], link=link).pipeline_seconds == 6


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(TABLES), st.data(), st.booleans())
def test_past_stages_takes_no_longer_than_from_stage_to_stage(table: ActionTable, data: st.DataObject, overlaps: bool) -> None:
    """With as fast a link between all ranks: that is why skips are always sent so. (Where receiving does not overlap, what goes
    from stage to stage counts as one message here, so that it has the latency once.)"""
    seconds, last = st.floats(0, 5), table.num_stages - 1
    costs = [
        StageCosts(
            forward_seconds=data.draw(seconds),
            input_backward_seconds=data.draw(seconds),
            weight_backward_seconds=data.draw(seconds),
            output_bytes=data.draw(st.floats(0, 9)),
        )
        for _ in range(table.num_stages)
    ]
    source = data.draw(st.integers(0, last - 2))
    destination, num_bytes = data.draw(st.integers(source + 2, last)), data.draw(st.floats(0, 9))
    latency = data.draw(st.floats(0, 2)) if overlaps else 0.0
    link = Link(latency_seconds=latency, bytes_per_second=data.draw(st.floats(0.5, 9)), overlaps=overlaps)
    relayed = [
        replace(cost, output_bytes=cost.output_bytes + num_bytes * (source <= stage < destination))
        for stage, cost in enumerate(costs)
    ]
    direct = [replace(cost, skips=((destination, num_bytes),) * (stage == source)) for stage, cost in enumerate(costs)]
    before, now = (run_table(table, each, link=link).pipeline_seconds for each in (relayed, direct))
    assert now <= before * (1 + 1e-9)


def test_where_receiving_does_not_overlap_a_transfer_begins_when_the_receiver_is_free() -> None:
    cost = StageCosts(forward_seconds=1, input_backward_seconds=1, output_bytes=3)
    found = run_table(gpipe(2, 2), [cost] * 2, link=Link(latency_seconds=0.5, bytes_per_second=1, overlaps=False))
    starts = {str(event.action): event.start_seconds for events in found.ranks for event in events}
    assert (starts["1F0"], starts["1F1"]) == (1 + 3.5, 5.5 + 3.5)


def test_stages_of_one_rank_send_nothing() -> None:
    cost = StageCosts(forward_seconds=1, input_backward_seconds=1, output_bytes=3)
    found = run_table(
        looped_breadth_first(1, 2, stages_per_rank=2), [cost] * 2, link=Link(latency_seconds=9, bytes_per_second=1)
    )
    assert (found.pipeline_seconds, found.bubble_fraction) == (8, 0)


def test_what_is_kept_between_the_two_parts_of_a_backward_counts() -> None:
    cost = StageCosts(
        forward_seconds=1, input_backward_seconds=1, weight_backward_seconds=1, activation_bytes=10, weight_bytes=4
    )
    table = ActionTable.from_csv("0F0,0F1,0I0,0I1,0F2,0W0,0W1,0I2,0W2")
    found = run_table(table, [cost])
    assert found.peak_activation_bytes == (20,)
    assert found.peak_microbatches == (3,)
    assert run_table(ActionTable.from_csv("0F0,0I0,0F1,0I1,0F2,0W0,0W1,0I2,0W2"), [cost]).peak_activation_bytes == (18,)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    table = ActionTable.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0")
    with pytest.raises(ScheduleError, match="schedule deadlocks: its ranks wait for each other") as refused:
        run_table(table, PLAIN)
    assert refused.value.observed == "line 1 for 1B0, line 2 for 0F1"


def test_costs_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match="number of costs differs from the number of stages"):
        run_table(gpipe(3, 2), PLAIN)


def test_a_fixed_cost_fitted_on_two_published_speeds_gives_the_others() -> None:
    """Tokens per second of 1F1B on two nodes with 4 to 64 microbatches of one size (unsloth, PR 10280)."""
    published = {4: 1073, 8: 1197, 16: 1337, 32: 1438, 64: 1462}

    def speed(count: int, fixed: float) -> float:
        found = run_table(one_forward_one_backward(2, count), PLAIN, overhead=Overhead(step_seconds=fixed))
        return count / found.seconds

    low, high = 0.0, 10.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        is_too_steep = speed(4, middle) / speed(64, middle) < published[4] / published[64]
        low, high = (low, middle) if is_too_steep else (middle, high)
    for count, expected in published.items():
        assert speed(count, low) / speed(64, low) == pytest.approx(expected / published[64], rel=0.05)


@pytest.mark.parametrize("fixed", [0, 0.5, 20])
def test_a_fixed_cost_of_each_action_cannot_give_those_speeds(fixed: float) -> None:
    """With equal stages the shares stay those of M / (M + 1): .813 of the speed at 64 microbatches with four, not .734."""

    def speed(count: int) -> float:
        found = run_table(one_forward_one_backward(2, count), PLAIN, overhead=Overhead(action_seconds=fixed))
        return count / found.seconds

    for count in (4, 8, 16, 32):
        assert speed(count) / speed(64) == pytest.approx(count / (count + 1) / (64 / 65))
