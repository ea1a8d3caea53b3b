"""A page has the stages of a plan, and each alternative with its timelines or the reason why there are none."""

from __future__ import annotations

import math
from dataclasses import replace

from lightning_fxpipe.pictures.page import page_of_simulated_plan, page_of_timelines
from lightning_fxpipe.simulation.timeline import Timeline
from tests.pictures.examples import MEMORY_BYTES, measured, plan_of, simulated_plan, timeline


def test_the_page_of_a_simulated_plan_has_all_of_it() -> None:
    simulated = simulated_plan(3, 6, "v_half", "1f1b")
    page = page_of_simulated_plan(simulated)
    assert page.title == "Pipeline of net"
    assert page.plan == simulated.plan
    assert page.memory_limit_bytes == MEMORY_BYTES
    assert [each.name for each in page.alternatives] == [*simulated.by_time(), "dualpipev"]
    assert page.alternatives[simulated.by_time().index("1f1b")].timelines == (
        Timeline.of_simulation("1f1b, simulated", simulated.simulations["1f1b"]),
    )
    assert page.alternatives[2].timelines == ()
    assert page.alternatives[2].refused == "There are too few microbatches."


def test_costs_are_those_of_the_plans_own_stages() -> None:
    """With ``v_half`` the same model is cut into six."""
    simulated = simulated_plan(3, 6, "v_half", "1f1b")
    assert page_of_simulated_plan(simulated).stage_costs == simulated.simulations["1f1b"].costs
    assert page_of_simulated_plan(simulated_plan(3, 6, "v_half")).stage_costs == ()


def test_a_device_without_a_limit_gives_a_page_without_one() -> None:
    simulated = simulated_plan(2, 2, "gpipe")
    unlimited = replace(simulated, device=replace(simulated.device, memory_bytes=math.inf))
    assert page_of_simulated_plan(unlimited, title="Mine").memory_limit_bytes is None
    assert page_of_simulated_plan(unlimited, title="Mine").title == "Mine"


def test_timelines_of_one_alternative_stay_together() -> None:
    found = timeline()
    page = page_of_timelines("Both", {"1f1b": [found, measured(found)]}, plan=plan_of(2), memory_limit_bytes=5.0, notes=["So."])
    assert [[each.label for each in one.timelines] for one in page.alternatives] == [["1f1b, simulated", "measured"]]
    assert (page.title, page.plan, page.memory_limit_bytes, page.notes) == ("Both", plan_of(2), 5.0, ("So.",))
