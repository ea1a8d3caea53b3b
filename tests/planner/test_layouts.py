"""Stages and replicas on a number of devices: the fastest that fits, of all that there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe import FxPipeStrategy, PartitionError, UnsupportedError, compare_layouts, simulate_plan
from lightning_fxpipe.microbatch.split import default_num_microbatches
from lightning_fxpipe.planner import recorded_step
from lightning_fxpipe.planner.layouts import Layout
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.planning import open_regions
from lightning_fxpipe.planner.simulated_plan import SCHEDULES
from lightning_fxpipe.simulation import Link, StageCosts, simulate
from lightning_fxpipe.simulation.devices import Device
from tests.lit import LitModel, make_loader, make_trainer

WIDTH = 64
NUM_SAMPLES = 16
SLOW = Device(flops_per_second=1e9, bytes_per_second=1e9)
# A layer's parameter, gradient and Adam's states.
LAYER_BYTES = WIDTH * WIDTH * 4 * 4


def layers(num_layers: int = 8) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))


def batch() -> Tensor:
    return torch.randn(NUM_SAMPLES, WIDTH)


def compared(num_devices: int, device: Device = SLOW, model: nn.Module | None = None, **options: Any) -> Any:
    return compare_layouts(model or layers(), batch(), num_devices=num_devices, device=device, **options)


# ------------------------------------------------------------------ the average of replicas' gradients


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_a_ring_sends_each_part_to_all_ranks_twice(num_ranks: int) -> None:
    """Reduce-scatter and all-gather, step by step, each rank sending one part of the whole at a time."""
    link = Link(latency_seconds=3.0, bytes_per_second=10.0)
    num_bytes, seconds = 240.0, 0.0
    for _ in ("reduce-scatter", "all-gather"):
        for _ in range(num_ranks - 1):
            seconds += 3.0 + (num_bytes / num_ranks) / 10.0
    assert link.reduce_seconds(num_bytes, num_ranks) == pytest.approx(seconds)


def test_a_rank_averages_as_soon_as_its_own_stages_are_done() -> None:
    """In GPipe the last stage is done first, and has the time until the first one is for nothing."""
    stage = StageCosts(forward_seconds=1.0, input_backward_seconds=1.0, weight_backward_seconds=1.0)
    link = Link(bytes_per_second=1.0)
    alone = simulate([stage, stage], num_microbatches=2, schedule="gpipe")
    first_is_done, last_is_done = (events[-1].end_seconds for events in alone.ranks)
    slack = first_is_done - last_is_done
    assert slack == 2.0
    for gradients, longer in (((0.0, 0.0), 0.0), ((0.0, slack), 0.0), ((0.0, slack + 1), 1.0), ((1.5, slack), 1.5)):
        costs = [replace(stage, gradient_bytes=each) for each in gradients]
        simulation = simulate(costs, num_microbatches=2, schedule="gpipe")
        # Two ranks: two hops with half of the bytes each.
        assert simulation.seconds_of_replicas(2, link) == simulation.seconds + longer
        assert simulation.seconds_of_replicas(1, link) == simulation.seconds


# ------------------------------------------------------------------ the comparison


def test_each_layout_is_the_fastest_of_all_schedules_and_microbatches() -> None:
    link = Link(bytes_per_second=1e9)
    found = compared(4, replica_link=link)
    assert {(layout.num_ranks, layout.num_replicas) for layout in found.layouts} == {(1, 4), (2, 2), (4, 1)}
    for layout in found.layouts:
        every = {
            (schedule, count): simulation.seconds_of_replicas(layout.num_replicas, link)
            for count in (1, 2, 4, 8, 16)
            for schedule, simulation in simulate_plan(
                layers(), batch(), num_stages=layout.num_ranks, num_microbatches=count, device=SLOW, balance="flops"
            ).simulations.items()
            if count <= 8 * layout.num_ranks
        }
        chosen = layout.chosen
        assert every[chosen.schedule, chosen.num_microbatches] == pytest.approx(chosen.step_seconds)
        assert chosen.step_seconds == pytest.approx(min(every.values()))
        assert layout.samples_per_second == pytest.approx(layout.num_replicas * NUM_SAMPLES / chosen.step_seconds)
    speeds = [layout.samples_per_second for layout in found.layouts]
    assert speeds == sorted(speeds, reverse=True)


def test_replicas_win_where_gradients_travel_fast_and_stages_where_they_do_not() -> None:
    fast, slow = compared(4, replica_link=Link()), compared(4, replica_link=Link(bytes_per_second=1e5))
    assert [layout.num_ranks for layout in fast.layouts] == [1, 2, 4]
    assert fast.layouts[0].reduce_seconds == 0.0
    assert [layout.num_ranks for layout in slow.layouts] == [4, 2, 1]
    gradient_bytes = 8 * WIDTH * WIDTH * 4
    assert slow.layouts[-1].reduce_seconds == pytest.approx(2 * 3 / 4 * gradient_bytes / 1e5)


def test_the_fastest_fits_the_memory_even_where_others_are_faster() -> None:
    memory = 3.2 * LAYER_BYTES  # two layers and their activations, and not four
    found = compared(8, replace(SLOW, memory_bytes=memory), replica_link=Link())
    assert {layout.num_ranks: layout.chosen.fits for layout in found.layouts} == {4: True, 8: True, 1: False, 2: False}
    assert found.layouts[0].num_ranks == 4
    rows = [line.split() for line in str(found).splitlines() if line.split()[-1:] in (["fastest"], ["KiB"], ["large"])]
    assert [(row[0], row[-1]) for row in rows[-4:]] == [("4", "fastest"), ("8", "KiB"), ("1", "large"), ("2", "large")]
    assert found.plan.num_stages == 4 * found.layouts[0].chosen.stages_per_rank


def test_replicas_that_share_out_the_optimizer_fit_where_others_do_not_and_send_half_as_much_again() -> None:
    link = Link(bytes_per_second=1e6)
    whole, shared = (
        {layout.num_ranks: layout for layout in compared(2, replica_link=link, shard_optimizer_state=shards).layouts}
        for shards in (False, True)
    )
    assert shared[2].chosen == whole[2].chosen
    assert shared[1].reduce_seconds == pytest.approx(1.5 * whole[1].reduce_seconds)
    assert whole[1].chosen.peak_bytes - shared[1].chosen.peak_bytes == 8 * LAYER_BYTES // 4  # half of Adam's
    device = replace(SLOW, memory_bytes=(whole[1].chosen.peak_bytes + shared[1].chosen.peak_bytes) / 2)
    for shards, fits in ((False, False), (True, True)):
        (one,) = (layout for layout in compared(2, device, shard_optimizer_state=shards).layouts if layout.num_ranks == 1)
        assert one.chosen.fits is fits


def test_the_plan_for_replicas_that_share_out_the_optimizer_is_the_one_that_was_simulated() -> None:
    """By memory: with fewer states another cut is as even as can be."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1024, WIDTH)
            self.layers = layers(8)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.layers(self.embed(tokens))

    tokens = torch.zeros(NUM_SAMPLES, 32, dtype=torch.long)
    held = []
    for shares_out, kept in ((False, 2.0), (True, 1.0)):
        options: dict[str, Any] = {"device": SLOW, "schedules": ["gpipe"], "balance": "memory", "num_microbatches": 1}
        expected = simulate_plan(Net(), tokens, num_stages=2, optimizer_bytes_per_byte=kept, **options)
        given = expected.plan  # so that pipelines of two devices are the fastest
        found = compare_layouts(
            Net(),
            tokens,
            num_devices=4,
            shard_optimizer_state=shares_out,
            replica_link=Link(bytes_per_second=1e4),
            plan=given,
            **options,
        )
        layout = next(layout for layout in found.layouts if layout.num_ranks == 2)
        assert layout.chosen.peak_bytes == max(expected.simulations["gpipe"].peak_bytes)
        assert found.plan.stages == expected.plan.stages
        held.append((found.plan.num_held(0) - 1024 * WIDTH) / WIDTH**2)
    assert held == [1, 2]  # layers beside the embedding


def test_what_is_frozen_is_not_averaged() -> None:
    model = layers(4)
    model[:3].requires_grad_(False)
    (whole,) = (one for one in compared(2, model=model, replica_link=Link(bytes_per_second=1e6)).layouts if one.num_ranks == 1)
    assert whole.reduce_seconds == pytest.approx(WIDTH * WIDTH * 4 / 1e6)


def test_memory_is_balanced_where_nothing_fits_otherwise() -> None:
    """The first layer has most parameters and the others most flops: by flops the first stage has too much."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4096, WIDTH)
            self.layers = layers(8)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.layers(self.embed(tokens))

    tokens = torch.zeros(NUM_SAMPLES, 8, dtype=torch.long)
    embed_bytes = 4096 * WIDTH * 4 * 4
    device = replace(SLOW, memory_bytes=embed_bytes + 1.5 * LAYER_BYTES + 2**17)
    (two,) = (
        one
        for one in compare_layouts(Net(), tokens, num_devices=2, device=device, schedules=["1f1b"]).layouts
        if one.num_ranks == 2
    )
    assert (two.balance, two.chosen.fits) == ("memory", True)


def test_a_number_of_stages_that_the_model_has_not_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(4, model=layers(2))
    assert [num_ranks for num_ranks, _ in found.refused] == [4]
    assert "Cannot form 4 stages" in found.refused[0][1]
    assert found.refused[0][1] in " ".join(str(found).split())


def test_microbatches_are_those_of_the_default_where_batch_norm_normalises_over_one() -> None:
    model = nn.Sequential(*layers(4), nn.BatchNorm1d(WIDTH), *layers(4))
    default = {layout.num_ranks: layout.chosen.num_microbatches for layout in compared(2, model=model).layouts}
    assert default == {1: default_num_microbatches(NUM_SAMPLES, 1), 2: default_num_microbatches(NUM_SAMPLES, 2)}
    assert default != {layout.num_ranks: layout.chosen.num_microbatches for layout in compared(2).layouts}


def test_a_step_that_every_rank_runs_is_refused_with_the_reason() -> None:
    module = LitModel("mlp")
    module.automatic_optimization = False
    with pytest.raises(UnsupportedError, match=r"(?s)Steps that run on every rank cannot be simulated.*manual optimization"):
        compare_layouts(module, next(iter(make_loader("mlp"))), num_devices=2, device=SLOW)


def test_where_no_schedule_is_made_for_it_there_is_an_error() -> None:
    with pytest.raises(PartitionError, match=r"(?s)No schedule supports this number of devices.*1 devices, 1 microbatches"):
        compared(1, schedules=["dualpipev"], num_microbatches=1)


def test_the_step_is_traced_once_for_all_layouts_and_sizes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    traced = []

    def opened(*args: Any, **kwargs: Any) -> Any:
        traced.append(kwargs["rule"].num_stages)
        return open_regions(*args, **kwargs)

    monkeypatch.setattr(recorded_step, "open_regions", opened)
    with caplog.at_level("DEBUG", logger="lightning_fxpipe"):
        found = compared(4)
    assert any(
        text.startswith("Simulating all combinations of stages and replicas: ") for text in caplog.messages
    )  # and the seconds
    assert len({layout.num_ranks for layout in found.layouts}) == 3
    assert traced == [8]  # the most stages: two on each of four devices


def test_a_graph_that_depends_on_the_size_is_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x) if len(x) > 4 else self.layers[0](self.layers(x))

    found = {count: compared(1, model=Net(), num_microbatches=count).layouts[0] for count in (1, 2, 4)}
    every = compared(1, model=Net()).layouts[0]
    assert every.chosen == min((one.chosen for one in found.values()), key=lambda one: one.step_seconds)
    per_microbatch = [found[count].chosen.step_seconds / count for count in (1, 2, 4)]
    assert per_microbatch[2] > 0.6 * per_microbatch[1]  # half of the samples, in five layers in place of four


def test_a_number_of_stages_that_the_devices_cannot_share_is_refused() -> None:
    with pytest.raises(PartitionError, match="No parallel layout has the requested number of stages"):
        compared(4, split_points=["1", "3"])


def test_cuts_are_those_that_are_asked_for() -> None:
    found = compared(4, split_points=["3"], schedules=["1f1b"])
    assert [layout.num_ranks for layout in found.layouts] == [2]
    assert [stage.first_module for stage in found.plan.stages] == ["0", "3"]
    pinned = compared(2, stage_of={"2": -1}, schedules=["1f1b"], replica_link=Link(bytes_per_second=1e4)).plan
    assert pinned.stages[1].first_module == "2"


# ------------------------------------------------------------------ the plan


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
def test_the_strategy_makes_the_replicas_of_the_plan(schedule: Any, tmp_path: Path) -> None:
    found = compared(8, replace(SLOW, memory_bytes=5.5 * LAYER_BYTES + 2**16), schedules=[schedule], num_microbatches=4)
    layout: Layout = found.layouts[0]
    assert layout.num_ranks == 2
    found.plan.save(tmp_path / "plan.json")
    plan = PartitionPlan.load(tmp_path / "plan.json")
    assert plan.chosen == layout.chosen
    strategy = FxPipeStrategy(plan=tmp_path / "plan.json")
    make_trainer(strategy=strategy, devices=8)
    placement = strategy._plans.options.placement(8)
    assert (placement.num_ranks, placement.num_stages) == (2, plan.num_stages)
    assert placement.is_v == (schedule == "zbv_zero_bubble")


def test_one_device_has_nothing_to_choose_but_microbatches() -> None:
    (only,) = compared(1).layouts
    assert (only.num_ranks, only.num_replicas, only.chosen.stages_per_rank) == (1, 1, 1)
    assert only.chosen.schedule in SCHEDULES
    assert only.chosen.num_microbatches == 1  # weights are read once for all samples
