"""The generated order has the published bubble rates, and keeps to its memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.simulation.costs import Link, StageCosts
from lightning_fxpipe.simulation.orders import one_forward_one_backward
from lightning_fxpipe.simulation.simulator import run_table
from lightning_fxpipe.simulation.zero_bubble import zero_bubble
from tests.simulation.published import ROWS, Row, tolerance


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.slow if row.num_microbatches > 100 else (), id=name) for name, row in ROWS.items()],
)
@pytest.mark.parametrize("times_memory", [1, 2])
def test_it_has_the_published_bubble_rate(row: Row, times_memory: int) -> None:
    limit = times_memory * row.num_ranks * row.activation_bytes
    table = zero_bubble(row.costs(), row.num_microbatches, memory_bytes=[limit] * row.num_ranks, link=row.link)
    found = run_table(table, row.costs(), link=row.link)
    assert row.rate(found) == pytest.approx(row.rates[3 + times_memory], abs=tolerance(row) if times_memory == 1 else 0.00005)
    assert max(found.peak_activation_bytes) <= limit


seconds = st.floats(0.1, 4)
stages = st.lists(
    st.builds(
        lambda forward, inputs, weights, kept, share: StageCosts(
            forward_seconds=forward,
            input_backward_seconds=inputs,
            weight_backward_seconds=weights,
            activation_bytes=kept,
            weight_bytes=kept * share,
        ),
        *(seconds, seconds, seconds, st.integers(1, 5), st.sampled_from([0.25, 0.5, 1.0])),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(stages, st.integers(1, 12), st.sampled_from([1.0, 1.5, 3.0]), st.floats(0, 0.5))
def test_any_costs_give_an_order_that_can_be_run_in_the_memory(
    costs: list[StageCosts], count: int, factor: float, latency: float
) -> None:
    num_ranks = len(costs)
    limits = [factor * num_ranks * cost.activation_bytes for cost in costs]
    link = Link(latency_seconds=latency)
    found = run_table(zero_bubble(costs, count, memory_bytes=limits, link=link), costs, link=link)
    assert found.table.num_microbatches == count
    assert all(peak <= limit + 1e-9 for peak, limit in zip(found.peak_activation_bytes, limits, strict=True))


def test_without_a_limit_it_is_no_slower_than_1f1b() -> None:
    costs = [StageCosts(forward_seconds=f, input_backward_seconds=f, weight_backward_seconds=f) for f in (1, 2, 1, 3)]
    found = run_table(zero_bubble(costs, 10), costs)
    assert found.pipeline_seconds < run_table(one_forward_one_backward(4, 10), costs).pipeline_seconds


def test_memory_for_less_than_a_microbatch_is_refused() -> None:
    cost = StageCosts(forward_seconds=1, input_backward_seconds=1, weight_backward_seconds=1, activation_bytes=8)
    with pytest.raises(ScheduleError, match="not have enough memory for one microbatch[^*]*stage 1") as refused:
        zero_bubble([cost] * 3, 4, memory_bytes=[100, 7, 100])
    assert refused.value.expected == "at least 8 B"


def test_an_order_that_does_not_fit_is_refused() -> None:
    """One microbatch fits, and the walk takes the first forward of the second before its gradients are made."""
    cost = StageCosts(
        forward_seconds=1, input_backward_seconds=1, weight_backward_seconds=1, activation_bytes=8, weight_bytes=9
    )
    with pytest.raises(ScheduleError, match="A rank does not have enough memory for this order"):
        zero_bubble([cost] * 3, 4, memory_bytes=[8, 8, 8])
