"""A plan with what a step would take: the numbers are those of its parts, and the table says what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe import ScheduleError, UnsupportedError, make_plan
from lightning_fxpipe.planner.simulated_plan import SCHEDULES, simulate_plan
from lightning_fxpipe.simulation import StageCosts, simulate
from lightning_fxpipe.simulation.by_name import stages_of_ranks, table_of
from lightning_fxpipe.simulation.devices import DEVICES, Device

WIDTH = 64
SLOW = Device(flops_per_second=1e9, bytes_per_second=1e9)


def layers(num_layers: int = 6) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))


def test_each_schedule_is_simulated_with_the_costs_of_the_plans_stages() -> None:
    batch = torch.randn(16, WIDTH)
    found = simulate_plan(layers(), batch, num_stages=3, num_microbatches=4, device=SLOW)
    assert found.plan == make_plan(layers(), batch, num_stages=3, num_microbatches=4)
    assert [*found.simulations, *found.refused] == [*SCHEDULES]
    costs = found.simulations["1f1b"].costs
    # Two layers of 64 x 64 and four samples: reading and writing weights and samples takes longer than 2 * 4 * 64 * 64 flops.
    layer = (WIDTH * WIDTH + 2 * 4 * WIDTH) * 4 / 1e9
    assert [stage.forward_seconds for stage in costs] == pytest.approx([2 * max(layer, 2 * 4 * WIDTH**2 / 1e9)] * 3)
    assert [stage.state_bytes for stage in costs] == [2 * WIDTH * WIDTH * 4 * 4] * 3
    assert [stage.output_bytes for stage in costs] == [4 * WIDTH * 4, 4 * WIDTH * 4, 0]
    half = found.simulations["v_half"].costs  # each device has two stages of one layer
    assert [stage.state_bytes for stage in half] == [WIDTH * WIDTH * 4 * 4] * 6
    for schedule, simulation in found.simulations.items():
        each = len(stages_of_ranks(schedule, 3)[0])
        again = simulate(
            half if each == 2 else costs,
            num_microbatches=4,
            schedule=schedule,
            stages_per_rank=each,
            memory_bytes=[float("inf")] * 3,
        )
        assert simulation.seconds == again.seconds


def test_the_cuts_are_those_of_the_balance_or_the_split_points() -> None:
    model = nn.Sequential(nn.Embedding(1000, WIDTH), *layers(4))
    batch = torch.zeros(8, dtype=torch.long)
    by_flops = simulate_plan(model, batch, num_stages=2, device=SLOW, balance="flops", schedules=["1f1b", "interleaved_1f1b"])
    assert by_flops.plan == make_plan(model, batch, num_stages=2, balance="flops")
    assert by_flops.plan != make_plan(model, batch, num_stages=2)
    finer = simulate_plan(model, batch, num_stages=4, device=SLOW, balance="flops", schedules=["1f1b"])
    assert by_flops.simulations["interleaved_1f1b"].costs == finer.simulations["1f1b"].costs
    pointed = simulate_plan(model, batch, num_stages=2, device=SLOW, split_points=["4"], schedules=["1f1b"])
    assert pointed.plan == make_plan(model, batch, split_points=["4"])


def test_the_table_has_a_line_for_each_schedule_and_says_what_does_not_fit() -> None:
    states = 2 * WIDTH * WIDTH * 4 * 4
    activations = 2 * 4 * WIDTH * 4  # of one microbatch in two layers
    tight = Device(flops_per_second=1e9, bytes_per_second=1e9, memory_bytes=states + 3 * activations)
    found = simulate_plan(layers(), torch.randn(32, WIDTH), num_stages=3, num_microbatches=8, device=tight)
    lines = str(found).splitlines()
    assert "Simulated step with 8 microbatches on 3 x device" in lines
    table = {line.split()[0]: line for line in lines if line.split() and line.split()[0] in SCHEDULES}
    assert [*table] == found.by_time()
    assert "too large" in table["gpipe"]
    assert "too large" not in table["1f1b"]
    assert [name for name, line in table.items() if line.endswith("fastest")] == [found.fastest]
    assert max(found.simulations["zero_bubble"].peak_bytes) <= tight.memory_bytes


def test_the_rank_with_the_most_memory_has_the_number_that_it_has_in_training() -> None:
    """Rank 0 has the last stage, but with stages in a V, which come back to it."""
    model = nn.Sequential(nn.Embedding(1000, WIDTH), *layers(6))  # the first stage holds the most
    batch = torch.zeros(32, dtype=torch.long)
    found = simulate_plan(model, batch, num_stages=3, num_microbatches=8, device=SLOW)
    ranks = {each["schedule"]: each["peak_rank"] for each in found.as_dict()["schedules"]}
    places = {name: one.peak_bytes.index(max(one.peak_bytes)) for name, one in found.simulations.items()}
    assert {*places.values()} & {0, 2}  # where the numbers differ
    for name, place in places.items():
        assert ranks[name] == (place if name in ("zbv_zero_bubble", "v_half", "v_min") else 2 - place)


def test_microbatches_of_one_sample_are_simulated_as_such() -> None:
    one, two = (
        simulate_plan(layers(), torch.randn(size, WIDTH), num_stages=2, num_microbatches=8, device=SLOW, schedules=["1f1b"])
        for size in (8, 16)
    )
    sent = [found.simulations["1f1b"].costs[0].output_bytes for found in (one, two)]
    assert sent == [WIDTH * 4, 2 * WIDTH * 4]


def test_a_schedule_that_cannot_be_made_in_the_memory_says_why() -> None:
    tiny = Device(flops_per_second=1e9, bytes_per_second=1e9, memory_bytes=1)
    found = simulate_plan(layers(), torch.randn(8, WIDTH), num_stages=2, num_microbatches=2, device=tiny)
    assert found.refused == {"zero_bubble": "A rank does not have enough memory for one microbatch."}
    assert "not have enough memory for one microbatch" in " ".join(str(found).split())


def test_a_table_in_a_file_is_simulated_beside_the_names(tmp_path: Path) -> None:
    costs = [StageCosts(forward_seconds=1, input_backward_seconds=1)]
    for name, table in (("1f1b", table_of("1f1b", costs * 2, 4)), ("v", table_of("v_half", costs * 4, 4))):
        (tmp_path / f"{name}.csv").write_text(table.to_csv())
    (tmp_path / "three.csv").write_text(table_of("1f1b", costs * 3, 4).to_csv())
    files = [tmp_path / f"{name}.csv" for name in ("1f1b", "v", "three")]
    options: Any = {"num_stages": 2, "device": SLOW, "schedules": ["v_half", "1f1b", *files]}
    found = simulate_plan(layers(), torch.randn(16, WIDTH), num_microbatches=4, **options)
    own = [found.simulations[str(path)] for path in files[:2]]
    assert [one.ranks for one in own] == [found.simulations[name].ranks for name in ("1f1b", "v_half")]
    assert found.refused == {
        str(files[2]): "The schedule table is for a different number of ranks or stages. (1 stages; 1 stages; 1 stages)"
    }
    other = simulate_plan(layers(), torch.randn(16, WIDTH), num_microbatches=2, **options)
    assert other.refused[str(files[0])] == "The schedule table is for a different number of microbatches. (4)"
    with pytest.raises(ScheduleError, match="Cannot read the schedule table"):
        simulate_plan(layers(), torch.randn(16, WIDTH), num_stages=2, device=SLOW, schedules=["absent.csv"])


def test_schedules_may_be_spelled_as_torch_does() -> None:
    options: Any = {"num_stages": 2, "device": SLOW, "num_microbatches": 2}
    found = simulate_plan(layers(), torch.randn(16, WIDTH), schedules=["1F1B", "GPipe"], **options)
    assert [*found.simulations] == ["1f1b", "gpipe"]
    with pytest.raises(ScheduleError, match="The schedule does not exist"):
        simulate_plan(layers(), torch.randn(16, WIDTH), schedules=["2f1b"], **options)


def test_a_lightning_module_is_simulated_by_its_step() -> None:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers()

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.net(batch).square().mean()

    found = simulate_plan(Module(), torch.randn(16, WIDTH), num_stages=2, device=DEVICES["h100"])
    assert found.plan.region == "net"
    assert found.simulations["gpipe"].seconds > 0


def test_a_step_that_every_rank_runs_is_refused() -> None:
    class Manual(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = layers()

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.manual_backward(self.net(batch).square().mean())

    with pytest.raises(UnsupportedError, match="Steps that run on every rank cannot be simulated") as refused:
        simulate_plan(Manual(), torch.randn(16, WIDTH), num_stages=2, device=SLOW)
    assert refused.value.observed == "manual optimization"
