"""What is chosen is the fastest, as simulated, that fits the memory; and all that was looked at is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe import PartitionError, PartitionPlan
from lightning_fxpipe.planner import measured_costs, planning
from lightning_fxpipe.planner.alternatives import Alternative
from lightning_fxpipe.planner.choice import Choice, Combination, Search, combinations, microbatch_counts
from lightning_fxpipe.planner.cost import Chain
from lightning_fxpipe.planner.cut_rule import CutRule
from lightning_fxpipe.planner.measured_costs import UnitSeconds
from lightning_fxpipe.planner.step_plan import make_planned
from lightning_fxpipe.planner.unit_costs import UnitCosts

WIDTH = 16
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv_zero_bubble", "v_half", "v_min")
Times = Callable[[int, int], UnitSeconds]  # by the unit and the samples of a microbatch


def search(num_samples: int = 16, memory_bytes: int | None = None, counts: tuple[int, ...] = (1, 2, 4, 8, 16)) -> Search:
    found = combinations(SCHEDULES, counts, None, 2)  # type: ignore[arg-type]
    memory = () if memory_bytes is None else (memory_bytes, memory_bytes)
    return Search(num_ranks=2, num_samples=num_samples, combinations=found, memory_bytes=memory)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Times], None]:
    """Replaces the clock."""

    def use(times: Times) -> None:
        def measured(chain: Chain, num_samples: int) -> tuple[UnitSeconds, ...]:
            return tuple(times(index, num_samples) for index in range(len(chain.units)))

        monkeypatch.setattr(measured_costs, "measured_seconds", measured)

    return use


def table_of(num_layers: int = 8, num_stages: int = 4) -> UnitCosts:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    planned = make_planned(layers, torch.randn(16, WIDTH), rule=CutRule(num_stages=num_stages), num_microbatches=4)
    assert planned.assignment is not None
    assert planned.region is not None
    return UnitCosts(chain=planned.assignment.chain, call=planned.region)


def choose(search: Search, costs: UnitCosts) -> Choice:
    """Chooses for a chain without modules that have to be in some stage."""
    return search.choose(costs, lambda num_stages: ())


def each_sample(seconds: float) -> Times:
    """As long for each sample, whatever the size of the microbatch."""
    return lambda _, samples: UnitSeconds(seconds * samples, seconds * samples, seconds * samples)


def test_where_the_host_counts_a_batch_stays_whole(clock: Callable[[Times], None]) -> None:
    clock(each_sample(1e-7))
    found = choose(search(), table_of())
    chosen = found.alternatives[0]
    assert (chosen.num_microbatches, chosen.stages_per_rank) == (1, 1)
    assert found.unit_seconds is not None
    assert {*found.unit_seconds} == {each_sample(1e-7)(0, 16)}  # of a microbatch of that size


def test_where_computing_counts_nobody_waits(clock: Callable[[Times], None]) -> None:
    clock(each_sample(1.0))
    found = choose(search(), table_of())
    assert found.alternatives[0].schedule != "gpipe"
    assert found.alternatives[0].num_microbatches == 16
    assert found.alternatives[0].idle_share < 0.05
    seconds = {(each.schedule, each.num_microbatches): each.step_seconds for each in found.alternatives}
    # GPipe's bubble, (P - 1) / (M + P - 1), of layers that take 3 * 8 * 16 seconds in all.
    assert seconds["gpipe", 4] == pytest.approx(3 * 8 * 16 / 2 * (1 + 1 / 4), rel=1e-3)
    assert seconds["gpipe", 16] == pytest.approx(3 * 8 * 16 / 2 * (1 + 1 / 16), rel=1e-3)


def test_where_small_microbatches_are_slow_there_are_few(clock: Callable[[Times], None]) -> None:
    """Each microbatch costs as much as eight samples besides."""
    clock(lambda _, samples: UnitSeconds(samples + 8.0, samples + 8.0, samples + 8.0))
    assert choose(search(), table_of()).alternatives[0].num_microbatches <= 2
    clock(lambda _, samples: UnitSeconds(samples + 0.5, samples + 0.5, samples + 0.5))
    assert choose(search(), table_of()).alternatives[0].num_microbatches == 4


def test_all_that_was_looked_at_is_told_the_chosen_first_and_then_by_seconds(clock: Callable[[Times], None]) -> None:
    clock(each_sample(1.0))
    found = choose(search(), table_of())
    told = {(each.schedule, each.stages_per_rank, each.num_microbatches) for each in found.alternatives}
    looked_at = {(one.schedule, one.stages_per_rank, one.num_microbatches) for one in search().combinations}
    assert told <= looked_at
    assert {(name, 1, count) for name in ("gpipe", "1f1b") for count in (1, 2, 4, 8, 16)} <= told
    others = [each.step_seconds for each in found.alternatives[1:]]
    assert others == sorted(others)
    assert found.alternatives[0].step_seconds <= 1.01 * others[0]


def test_what_the_optimizer_keeps_is_told_to_each_load() -> None:
    costs = table_of()
    one = replace(search(), optimizer_bytes_per_byte=0.5)
    assert {one.load(costs, combination).optimizer_bytes_per_byte for combination in one.combinations} == {0.5}
    rule, plain = (CutRule(num_stages=4, search=each) for each in (one, search()))
    assert (rule.optimizer_bytes_per_byte, plain.optimizer_bytes_per_byte) == (0.5, 2.0)


def with_fixed_cost(_: int, samples: int) -> UnitSeconds:
    """Many microbatches, which take the least memory, are slow."""
    return UnitSeconds(samples + 8.0, samples + 8.0, samples + 8.0)


@pytest.mark.parametrize("times", [each_sample(1.0), with_fixed_cost])
def test_what_does_not_fit_is_not_chosen(clock: Callable[[Times], None], times: Times) -> None:
    clock(times)
    costs = table_of()
    free = choose(search(), costs)
    peaks = sorted({each.peak_bytes for each in free.alternatives})
    for limit in (peaks[1], peaks[len(peaks) // 2], free.alternatives[0].peak_bytes - 1):
        tight = choose(search(memory_bytes=limit), costs)
        assert tight.alternatives[0].fits
        assert tight.alternatives[0].peak_bytes <= limit
        assert [each.fits for each in tight.alternatives] == [each.peak_bytes <= limit for each in tight.alternatives]
        fastest = min(each.step_seconds for each in free.alternatives if each.peak_bytes <= limit)
        assert tight.alternatives[0].step_seconds <= 1.01 * fastest
    least = min(each.peak_bytes for each in free.alternatives)
    nothing = choose(search(memory_bytes=1), costs).alternatives
    assert not nothing[0].fits
    assert nothing[0].peak_bytes == least


def test_stages_take_as_long_as_each_other(clock: Callable[[Times], None]) -> None:
    """The first layer takes as long as the seven others."""
    clock(lambda index, samples: UnitSeconds(*[samples * (7.0 if index == 0 else 1.0)] * 3))
    one = Search(num_ranks=2, num_samples=16, combinations=combinations(("1f1b",), (4,), None, 2))
    assert choose(one, table_of()).cuts == (0,)


def test_a_search_without_enough_cuts_says_so(clock: Callable[[Times], None]) -> None:
    clock(each_sample(1.0))
    with pytest.raises(PartitionError, match="Cannot form 2 stages"):
        choose(search(), table_of(num_layers=1, num_stages=1))


def test_combinations_are_those_that_a_schedule_allows() -> None:
    natural = combinations(("1f1b", "interleaved_1f1b", "zbv_zero_bubble"), (4,), None, 2)
    assert natural == (
        Combination(schedule="1f1b", stages_per_rank=1, num_microbatches=4),
        Combination(schedule="interleaved_1f1b", stages_per_rank=2, num_microbatches=4),
        Combination(schedule="zbv_zero_bubble", stages_per_rank=2, num_microbatches=4),
    )
    three = combinations(("1f1b", "interleaved_1f1b", "zbv_zero_bubble"), (4,), 3, 2)
    assert three == (Combination(schedule="interleaved_1f1b", stages_per_rank=3, num_microbatches=4),)


def test_microbatches_divide_the_batch() -> None:
    assert microbatch_counts(16, 2, 8) == (1, 2, 4, 8, 16)
    assert microbatch_counts(12, 2, 6) == (1, 2, 4, 6)
    assert microbatch_counts(1, 2, 1) == (1,)
    assert microbatch_counts(1024, 4, 16)[-1] == 32


def test_a_chosen_plan_shows_and_keeps_what_it_was_chosen_from(clock: Callable[[Times], None]) -> None:
    clock(each_sample(1.0))
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    rule = CutRule(num_stages=4, search=search())
    plan = make_planned(layers, torch.randn(16, WIDTH), rule=rule, num_microbatches=4).plan
    assert plan.chosen is plan.alternatives[0]
    assert plan.num_stages == 2 * plan.alternatives[0].stages_per_rank
    lines = str(plan).splitlines()
    assert "Candidates, fastest first; the first one is used" in lines
    assert any(line.split()[:1] == [plan.alternatives[0].schedule] for line in lines)
    assert f"{len(plan.alternatives) - 6} slower candidates are not shown" in " ".join(str(plan).split())
    assert PartitionPlan.from_dict(_as_json(plan)) == plan
    broken = _as_json(replace(plan, alternatives=(replace(plan.alternatives[0], num_microbatches=-1),)))
    with pytest.raises(PartitionError, match="plan is damaged"):
        PartitionPlan.from_dict(broken)


def _as_json(plan: PartitionPlan) -> dict[str, object]:
    import json
    from dataclasses import asdict

    found: dict[str, object] = json.loads(json.dumps(asdict(plan)))
    return found


def test_a_model_that_nobody_can_cut_by_time_is_cut_all_the_same() -> None:
    """The real clock: only what the ranks have to agree on is looked at."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

        def forward(self, value: Tensor) -> Tensor:
            for layer in self.layers:
                value = layer(value).relu()
            return value

    rule = CutRule(num_stages=4, search=search())
    plan = make_planned(Net(), torch.randn(16, WIDTH), rule=rule, num_microbatches=4).plan
    chosen = plan.chosen
    assert isinstance(chosen, Alternative)
    assert chosen.step_seconds > 0
    assert len(plan.stages) == 2 * chosen.stages_per_rank


def test_that_layers_are_timed_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds for a large model; once more with the graph that is compared would be twice as long."""
    told: list[str] = []

    @contextmanager
    def telling(what: str) -> Iterator[None]:
        told.append(what)
        yield

    monkeypatch.setattr(planning, "telling", telling)
    table_of()
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    make_planned(layers, torch.randn(16, WIDTH), rule=CutRule(num_stages=2, balance="seconds"))
    assert told == ["Timing the model's layers"]
