"""Replicas on a page, in a figure and as text: what is shown is where ranks are, and what a simulated step says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fxpipe import compare_layouts, make_plan
from lightning_fxpipe.distributed.topology import Placement, Replicas, Topology
from lightning_fxpipe.pictures.chrome_trace import trace_of
from lightning_fxpipe.pictures.figure import save_figure
from lightning_fxpipe.pictures.page import page_of_layouts, page_of_timelines, timelines_of_layouts
from lightning_fxpipe.pictures.page_data import data_of
from lightning_fxpipe.pictures.replica_grid import ReplicaGrid, gradient_bytes
from lightning_fxpipe.planner.layouts import LayoutComparison
from lightning_fxpipe.planner.simulated_plan import placement_of
from lightning_fxpipe.reporting.table import human_bytes
from lightning_fxpipe.simulation import Link
from lightning_fxpipe.simulation.devices import Device
from lightning_fxpipe.simulation.timeline import OTHERS_STEP, Span, Timeline
from tests.lit import LitModel
from tests.models import make_samples
from tests.pictures.examples import plan_of, timeline

DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "replicas.md"
WIDTH = 64
LAYER_BYTES = WIDTH * WIDTH * 4
SLOW = Device(flops_per_second=1e9, bytes_per_second=1e9)
SLOW_LINK = Link(latency_seconds=1e-4, bytes_per_second=1e7)
PLACEMENTS = (
    Placement(num_ranks=1),
    Placement(num_ranks=2),
    Placement(num_ranks=3, stages_per_rank=2),
    Placement(num_ranks=2, stages_per_rank=2, is_v=True),
)


def compared(**options: Any) -> LayoutComparison:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))
    batch = torch.randn(16, WIDTH)
    defaults: dict[str, Any] = {"num_devices": 4, "device": SLOW, "replica_link": SLOW_LINK, "num_microbatches": 4}
    return compare_layouts(layers, batch, **(defaults | options))


def topology(placement: Placement, rank: int, num_replicas: int, replica: int) -> Topology:
    replicas = Replicas(count=num_replicas, index=replica)
    device = torch.device("cpu")
    return Topology(group=None, control_group=None, rank=rank, placement=placement, device=device, replicas=replicas)


# ------------------------------------------------------------------ where ranks are


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_grid_has_the_ranks_of_the_topology(placement: Placement) -> None:
    grid = ReplicaGrid(num_replicas=3, placement=placement)
    for replica, ranks in enumerate(grid.ranks):
        for place, rank in enumerate(ranks):
            here = topology(placement, place, 3, replica)
            assert rank == here.global_rank(place)
            assert all(here.rank_of(stage) == rank for stage in placement.stages_of(place))
    assert sorted(rank for ranks in grid.ranks for rank in ranks) == [*range(3 * placement.num_ranks)]


def test_machines_have_their_ranks_one_after_the_other() -> None:
    def machines(each: int | None) -> tuple[tuple[int, ...], ...]:
        return ReplicaGrid(num_replicas=4, placement=Placement(num_ranks=2), ranks_per_machine=each).machines

    assert machines(2) == ((0,), (1,), (2,), (3,))
    assert machines(4) == ((0,), (0,), (1,), (1,))
    assert machines(1) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert machines(8) == machines(None) == ()


def test_the_text_says_who_has_what_and_averages_with_whom() -> None:
    grid = ReplicaGrid(num_replicas=4, placement=Placement(num_ranks=2), ranks_per_machine=4, gradient_bytes=(2048.0, 512.0))
    text = str(grid)
    assert text.startswith("4 replicas of this pipeline\n")
    rows = [line.split("  ") for line in text.splitlines() if line.lstrip()[:1] in ("0", "1")]
    assert [[cell.strip() for cell in row if cell.strip()] for row in rows] == [
        ["0", "1, 3, 5, 7", "2.0 KiB"],
        ["1", "0, 2, 4, 6", "512 B"],
    ]
    words = " ".join(text.split())
    assert "the ranks of a row average their gradients once per optimizer step" in words
    assert "Each machine has 4 ranks; no replica spans several machines." in words
    split = ReplicaGrid(num_replicas=2, placement=Placement(num_ranks=2), ranks_per_machine=1)
    assert "Each machine has 1 ranks; some replicas span several machines." in " ".join(str(split).split())
    many = str(ReplicaGrid(num_replicas=100, placement=Placement(num_ranks=1)))
    assert "0, 1, 2, 3, 4, 5, ..., 99" in many
    assert "Gradients" not in many
    assert "machine" not in many


def test_gradients_are_those_of_what_trains_once_on_each_rank() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, WIDTH)
            self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
            self.head = nn.Linear(WIDTH, 10, bias=False)
            self.head.weight = self.embed.weight
            self.layers[1].requires_grad_(False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers(self.embed(tokens)))

    model, embed = Tied(), 10 * WIDTH * 4
    plan = make_plan(model, torch.arange(8), split_points=["layers.1", "layers.2", "layers.3"])
    assert gradient_bytes(plan, model, Placement(num_ranks=4)) == (embed + LAYER_BYTES, 0, LAYER_BYTES, embed + LAYER_BYTES)
    # In a V the first rank has both ends, and the embedding once.
    in_v = Placement(num_ranks=2, stages_per_rank=2, is_v=True)
    assert gradient_bytes(plan, model, in_v) == (embed + 2 * LAYER_BYTES, LAYER_BYTES)


def test_the_page_about_replicas_shows_this_text() -> None:
    (shown,) = re.findall(r"```text\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    module, placement = LitModel("gpt"), Placement(num_ranks=2)
    plan = make_plan(module, make_samples("gpt", 4), num_stages=2)
    held = gradient_bytes(plan, module, placement)
    assert shown.strip() == str(ReplicaGrid(num_replicas=4, placement=placement, ranks_per_machine=4, gradient_bytes=held))


# ------------------------------------------------------------------ when they average


@pytest.mark.parametrize("shards", [False, True])
def test_a_step_ends_with_the_average_that_layouts_count(shards: bool) -> None:
    found = compared(shard_optimizer_state=shards)
    for layout, shown in zip(found.layouts, timelines_of_layouts(found), strict=True):
        alone = Timeline.of_simulation(shown.label, layout.simulation)
        assert f"{layout.samples_per_second:,.1f} samples/s" in shown.label
        assert shown.seconds == pytest.approx(layout.chosen.step_seconds)
        assert shown.kept_bytes == alone.kept_bytes
        if layout.num_replicas == 1:
            assert shown == alone
            continue
        num_bytes = 8 // layout.num_ranks * LAYER_BYTES
        seconds = SLOW_LINK.reduce_seconds(num_bytes, layout.num_replicas)
        for spans, own in zip(shown.ranks, alone.ranks, strict=True):
            assert spans[: len(own)] == own
            end = own[-1].end_seconds
            expected = [Span(f"average of {human_bytes(num_bytes)}", end, end + seconds)]
            if shards:
                expected.append(Span(OTHERS_STEP, end + seconds, end + 1.5 * seconds))
            assert [span.work for span in spans[len(own) :]] == [span.work for span in expected]
            for span, other in zip(spans[len(own) :], expected, strict=True):
                assert (span.start_seconds, span.end_seconds) == pytest.approx((other.start_seconds, other.end_seconds))


def test_what_takes_no_time_is_not_shown() -> None:
    found = compared(replica_link=Link())
    for layout, shown in zip(found.layouts, timelines_of_layouts(found), strict=True):
        assert shown == Timeline.of_simulation(shown.label, layout.simulation)


# ------------------------------------------------------------------ the page


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
def test_the_page_of_layouts_has_the_replicas_of_its_plan(schedule: Any) -> None:
    device = Device(flops_per_second=1e9, bytes_per_second=1e9, memory_bytes=5.5 * 4 * LAYER_BYTES)
    found = compared(device=device, replica_link=Link(bytes_per_second=1e9), schedules=[schedule])
    best = found.layouts[0]
    assert (best.num_ranks, best.num_replicas) == (2, 2)
    page = page_of_layouts(found)
    assert page.plan == found.plan
    data = data_of(page)
    placement = Placement(num_ranks=2, stages_per_rank=best.chosen.stages_per_rank, is_v=schedule == "zbv_zero_bubble")
    assert placement_of(best.simulation) == placement
    assert data["replicas"] == {
        "stages": [[*placement.stages_of(place)] for place in range(2)],
        "ranks": [[topology(placement, place, 2, replica).global_rank(place) for place in range(2)] for replica in range(2)],
        "machines": [],
        "gradientBytes": [4 * LAYER_BYTES] * 2,
    }
    assert [each["name"] for each in data["alternatives"]] == [
        f"{one.num_ranks} x {one.num_replicas}, {schedule}" for one in found.layouts
    ]
    for each, one in zip(data["alternatives"], found.layouts, strict=True):
        assert each["timelines"][0]["seconds"] == pytest.approx(one.chosen.step_seconds)
    assert data["memoryLimitBytes"] == device.memory_bytes
    assert any("average" in note for note in data["notes"])


def test_where_one_pipeline_is_best_there_are_no_replicas_and_what_is_refused_says_why() -> None:
    page = page_of_layouts(compared(replica_link=Link(bytes_per_second=1e3)))
    assert page.alternatives[0].name.startswith("4 x 1, ")
    assert page.replicas is None
    assert data_of(page)["replicas"] is None
    found = compared(num_devices=16)
    page = page_of_layouts(found)
    assert [(each.name, each.refused) for each in page.alternatives if not each.timelines] == [
        (f"{count} x {16 // count}", reason) for count, reason in found.refused
    ]
    assert found.refused
    alone = page_of_layouts(compared(num_devices=1))
    assert not any("average" in note for note in alone.notes)


def test_a_figure_and_a_trace_have_the_averages(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = compared()
    shown = timelines_of_layouts(found)
    save_figure(shown, tmp_path / "replicas.svg")
    words = [str(span.work) for each in shown for spans in each.ranks for span in spans if isinstance(span.work, str)]
    assert len(words) == sum(layout.num_ranks for layout in found.layouts if layout.num_replicas > 1)
    events = [event for event in trace_of(shown)["traceEvents"] if event["ph"] == "X" and event["cat"] == "other work"]
    assert [event["name"] for event in events] == words
    assert json.dumps(events).count("average of") == len(words)


def test_machines_are_in_the_data() -> None:
    grid = ReplicaGrid(num_replicas=2, placement=Placement(num_ranks=2), ranks_per_machine=2)
    page = page_of_timelines("Recorded", {"1f1b": [timeline()]}, plan=plan_of(2), replicas=grid)
    expected = {"stages": [[0], [1]], "ranks": [[1, 0], [3, 2]], "machines": [[0], [1]], "gradientBytes": []}
    assert data_of(page)["replicas"] == expected
