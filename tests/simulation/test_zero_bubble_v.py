"""The generated V has the published bubble rates in the memory of 1F1B."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.simulation.costs import Link, StageCosts
from lightning_fxpipe.simulation.simulator import run_table
from lightning_fxpipe.simulation.zero_bubble_v import zero_bubble_v
from tests.simulation.published import ROWS

UNIT = StageCosts(
    forward_seconds=1, input_backward_seconds=1, weight_backward_seconds=1, activation_bytes=199.75, weight_bytes=32
)
RATES = {"1.5B 24": 0.0703, "1.5B 64": 0.0298, "6.2B 24": 0.0403, "6.2B 64": 0.0166, "14.6B 48": 0.0498, "14.6B 64": 0.0381}


@pytest.mark.parametrize("name", RATES)
def test_it_has_the_rate_that_the_authors_scheduler_gives(name: str) -> None:
    row = ROWS[name]
    found = run_table(zero_bubble_v(row.costs(2), row.num_microbatches, link=row.link), row.costs(2), link=row.link)
    assert row.rate(found) == pytest.approx(RATES[name], abs=0.00005)
    assert max(found.peak_activation_bytes) == pytest.approx(row.num_ranks * row.activation_bytes)


@pytest.mark.parametrize(("num_ranks", "count"), [(4, 8), (4, 16), (8, 16), (8, 32), (16, 64)])
def test_with_equal_parts_no_rank_waits_once_it_has_begun(num_ranks: int, count: int) -> None:
    costs = [UNIT] * (2 * num_ranks)
    found = run_table(zero_bubble_v(costs, count), costs)
    assert found.longest_rank_seconds == pytest.approx(6 * count)
    assert max(found.peak_activation_bytes) == pytest.approx(2 * num_ranks * UNIT.activation_bytes)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 6), st.floats(0, 2), st.data())
def test_any_costs_give_an_order_that_can_be_run_in_the_memory(
    num_ranks: int, more: int, latency: float, data: st.DataObject
) -> None:
    seconds = st.floats(0.2, 3)
    costs = [
        StageCosts(
            forward_seconds=data.draw(seconds),
            input_backward_seconds=data.draw(seconds),
            weight_backward_seconds=data.draw(seconds),
            activation_bytes=4,
            weight_bytes=data.draw(st.sampled_from([1, 2, 4])),
        )
        for _ in range(2 * num_ranks)
    ]
    count, link = 2 * num_ranks + more, Link(latency_seconds=latency)
    found = run_table(zero_bubble_v(costs, count, link=link), costs, link=link)
    assert max(found.peak_activation_bytes) <= 8 * num_ranks
    assert found.table.num_microbatches == count


def test_memory_in_which_no_order_is_found_is_refused() -> None:
    with pytest.raises(ScheduleError, match="No V-shaped schedule fits in this memory") as refused:
        zero_bubble_v([UNIT] * 4, 8, memory_bytes=[1e6, 300])
    assert refused.value.observed == "976.6 KiB, 300 B for the ranks' activations"
    assert refused.value.expected == "more than 399.5 B, 399.5 B"


@pytest.mark.parametrize(("num_stages", "count"), [(3, 8), (8, 7)])
def test_what_cannot_be_filled_is_refused(num_stages: int, count: int) -> None:
    with pytest.raises(ScheduleError, match="too few microbatches or stages for a V-shaped schedule"):
        zero_bubble_v([UNIT] * num_stages, count)
