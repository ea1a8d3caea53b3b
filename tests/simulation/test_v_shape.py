"""V-Half and V-Min have the published bubble rates, and exactly the memory that they promise."""

from __future__ import annotations

import pytest

from lightning_fxpipe.simulation.costs import StageCosts
from lightning_fxpipe.simulation.simulator import run_table
from lightning_fxpipe.simulation.v_shape import v_half, v_min
from tests.simulation.published import ROWS

UNIT = StageCosts(
    forward_seconds=1, input_backward_seconds=1, weight_backward_seconds=1, activation_bytes=0.5, weight_bytes=0.5
)
# Bubble rates of a whole step, by ranks and microbatches: V-Half, V-Min.
RATES = {(4, 8): (0.0943, 0.1864), (4, 16): (0.0495, 0.1028), (8, 16): (0.1504, 0.2195), (8, 32): (0.0813, 0.1233)}
RATES[16, 64] = (0.0965, 0.1332)
WITH_TIMES = {
    "1.5B 24": (0.1702, 0.3353),
    "1.5B 64": (0.0737, 0.2758),
    "6.2B 24": (0.1447, 0.2721),
    "6.2B 64": (0.0607, 0.2013),
    "14.6B 48": (0.1682, 0.2927),
    "14.6B 64": (0.1318, 0.2615),
}


@pytest.mark.parametrize(("num_ranks", "count"), RATES)
def test_rates_and_peaks_are_the_published_ones(num_ranks: int, count: int) -> None:
    for make, rate, peak in zip(
        (v_half, v_min), RATES[num_ranks, count], ((num_ranks + 2) // 2, (num_ranks + 4) // 3), strict=True
    ):
        found = run_table(make(num_ranks, count), [UNIT] * (2 * num_ranks))
        assert found.bubble_fraction == pytest.approx(rate, abs=0.00005)
        assert max(found.peak_activation_bytes) == peak


@pytest.mark.parametrize("name", WITH_TIMES)
def test_rates_with_measured_times_are_those_of_the_authors_scheduler(name: str) -> None:
    """V-Min is worse than 1F1B here, which formulas for equal parts do not show."""
    row = ROWS[name]
    for make, rate in zip((v_half, v_min), WITH_TIMES[name], strict=True):
        found = run_table(make(row.num_ranks, row.num_microbatches), row.costs(2), link=row.link)
        assert row.rate(found) == pytest.approx(rate, abs=0.00005)


@pytest.mark.parametrize("num_ranks", range(1, 8))
@pytest.mark.parametrize("count", [1, 2, 5, 13])
def test_any_counts_give_an_order_that_can_be_run(num_ranks: int, count: int) -> None:
    for make in (v_half, v_min):
        found = run_table(make(num_ranks, count), [UNIT] * (2 * num_ranks))
        assert (found.table.num_ranks, found.table.num_stages, found.table.num_microbatches) == (
            num_ranks,
            2 * num_ranks,
            count,
        )
        assert [found.table.stages_of(rank) for rank in range(num_ranks)] == [
            (rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)
        ]
