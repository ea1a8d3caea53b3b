"""What is balanced, and cuts where the user wants them."""

from __future__ import annotations

import dataclasses
import json
import math
from bisect import bisect_left
from itertools import combinations, pairwise
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_fxpipe import PartitionError, PartitionPlan, TraceError, UnsupportedError, make_plan
from lightning_fxpipe.planner import measured_costs, unit_costs
from lightning_fxpipe.planner.cut_rule import BalanceName, CutRule
from lightning_fxpipe.planner.load import Load
from lightning_fxpipe.planner.measured_costs import UnitSeconds
from lightning_fxpipe.planner.partition import Weights
from lightning_fxpipe.planner.planning import Planned
from lightning_fxpipe.planner.recompute_rule import RecomputeRule
from lightning_fxpipe.planner.stage_costs import stage_work
from lightning_fxpipe.planner.step_plan import make_planned, make_rule
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.simulation.costs import StageWork
from tests.lit import LitModel
from tests.models import make_samples

WIDTH = 8


class Uneven(nn.Module):
    """A table of many parameters that computes nothing, and layers of which the last ones compute and keep most."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.wide = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.layers(self.table(x)))


def begins(plan: PartitionPlan) -> list[str]:
    return [stage.first_module for stage in plan.stages]


def plan_of(model: nn.Module | None = None, batch: Any = None, **options: Any) -> PartitionPlan:
    return make_plan(model or Uneven(), torch.arange(64) if batch is None else batch, **options)


def test_each_balance_cuts_elsewhere() -> None:
    cut = {
        balance: begins(plan_of(num_stages=2, balance=balance))[1].partition(".")[0]
        for balance in ("parameters", "flops", "memory")
    }
    assert cut["parameters"] == "layers"  # the table is more than all the rest
    assert cut["flops"] == "wide"  # 4 x 64 of each sample in the layers, 2 x 8 x 64 in the wide ones
    assert cut["memory"] == "layers"


def table_of(planned: Planned) -> UnitCosts:
    assert planned.assignment is not None
    assert planned.region is not None
    return UnitCosts(chain=planned.assignment.chain, call=planned.region)


def work_of(rule: CutRule) -> tuple[StageWork, ...]:
    planned = make_planned(Uneven(), torch.arange(64), rule=rule)
    assert planned.assignment is not None
    assert PartitionPlan.from_dict(json.loads(json.dumps(dataclasses.asdict(planned.plan)))) == planned.plan
    return planned.plan.stage_work


def test_a_plan_tells_what_its_stages_take_where_an_order_is_made_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert work_of(CutRule(num_stages=2)) == ()
    assert plan_of(num_stages=2).stage_work == ()
    points = ("layers.2",)
    first, last = work_of(CutRule(num_stages=2, split_points=points, tells_work=True))
    planned = make_planned(Uneven(), torch.arange(64), rule=CutRule(num_stages=2, split_points=points))
    assert planned.assignment is not None
    assert (first, last) == stage_work(table_of(planned), planned.assignment.cuts)
    assert first.forward < last.forward
    again = work_of(CutRule(num_stages=2, split_points=points, tells_work=True, recompute=RecomputeRule.of(["wide"])))
    assert again[1].kept_bytes < last.kept_bytes

    def failing(chain: Any) -> Any:
        raise TraceError("It does not run on tensors without data.")

    monkeypatch.setattr(unit_costs, "unit_operators", failing)
    assert work_of(CutRule(num_stages=2, split_points=points, tells_work=True)) == ()


def test_what_was_timed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(chain: Any, num_samples: int | None = None) -> tuple[UnitSeconds, ...]:
        return tuple(UnitSeconds(1.0, 2.0 if index else 0.0, 1.0 + index) for index in range(len(chain.units)))

    monkeypatch.setattr(measured_costs, "measured_seconds", measured)
    found = work_of(CutRule(num_stages=2, balance="seconds", tells_work=True))
    planned = make_planned(Uneven(), torch.arange(64), rule=CutRule(num_stages=2, balance="seconds"))
    assert planned.assignment is not None
    costs, cuts = table_of(planned), planned.assignment.cuts
    assert found == stage_work(costs, cuts, seconds=measured(costs.chain))


def test_memory_is_that_of_states_and_of_all_microbatches() -> None:
    costs = table_of(make_planned(Uneven(), torch.arange(64), rule=CutRule(num_stages=1)))
    for count in (1, 8):
        weights = CutRule(num_stages=2, balance="memory", num_microbatches=count).demands(costs).weights
        states = [4 * 4 * unit.num_parameters for unit in costs.chain.units]  # all train
        assert isinstance(weights, Weights)
        assert [*weights.own] == [state + count * kept for state, kept in zip(states, costs.kept_bytes, strict=True)]
    assert sum(states) == 4 * 4 * sum(parameter.numel() for parameter in Uneven().parameters())


@pytest.mark.parametrize("balance", ["flops", "memory"])
@pytest.mark.parametrize("name", ["gpt", "unet", "mlp"])
def test_no_stage_is_much_heavier_than_it_has_to_be(name: str, balance: BalanceName) -> None:
    """The modules that lie across the ideal cuts have been opened for this weight, too."""
    rule = CutRule(num_stages=3, balance=balance)
    planned = make_planned(LitModel(name), make_samples(name, 4), rule=rule)
    assert planned.assignment is not None
    demands = rule.demands(table_of(planned))
    weights = demands.kinds[0]
    most = max(weights.of(position, position + 1) for position in range(demands.num_units))
    assert max(demands.of_stages(planned.assignment.cuts)) <= 1.2 * max(weights.total / 3, most)


def test_what_no_call_of_the_model_uses_is_held_by_the_last_stage() -> None:
    class Ending(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
            self.unused = nn.Parameter(torch.ones(100))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).square().mean()

    rule = CutRule(num_stages=2, balance="memory")
    costs = table_of(make_planned(Ending(), torch.randn(4, WIDTH), rule=rule))
    of_unit = 4 * 4 * costs.chain.units[-1].num_parameters + costs.kept_bytes[-1]
    assert rule.demands(costs).kinds[0].own[-1] == of_unit + 4 * 100 * 4


def test_stages_begin_where_the_user_wants() -> None:
    plan = plan_of(split_points=["layers.1", "layers.3", "wide"])
    assert begins(plan)[:3] == ["table", "layers.1", "layers.3"]
    assert begins(plan)[3].startswith("wide")
    assert plan.stages[2].fqns == ("layers.3.weight", "layers.3.bias")
    assert begins(plan_of(split_points=["wide.2"]))[1] == "wide.2"
    assert begins(plan_of(split_points=["wide", "layers.1"], num_stages=3))[1] == "layers.1"


def test_a_skip_connection_crosses_the_cuts_between() -> None:
    model = LitModel("unet")
    leaves = [path for path, module in model.named_modules() if next(module.children(), None) is None and path]
    whole = make_plan(model, make_samples("unet", 4), num_stages=2)
    assert begins(whole)[1] in leaves
    again = make_plan(model, make_samples("unet", 4), split_points=[begins(whole)[1]])
    assert [stage.fqns for stage in again.stages] == [stage.fqns for stage in whole.stages]


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h) if float(h.sum()) > 0 else h


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin, self.looking = nn.Linear(WIDTH, WIDTH), Looking()

    def forward(self, x: Tensor) -> Tensor:
        return self.looking(self.begin(x))


@pytest.mark.parametrize(
    ("points", "options", "message"),
    [
        (["wide.7"], {}, "A split point does not name a module[^*]*wide.7"),
        (["attention.0"], {}, "A split point does not name a module[^*]*attention.0"),
        (["wide", "wide.0"], {}, "Two split points denote the same place"),
        (["table"], {}, "The model cannot be cut before a split point[^*]*there is no computation before it"),
        (
            ["wide"],
            {"num_stages": 3},
            "The number of split points does not match the number of stages[^*]*1 split points and 3 stages",
        ),
    ],
)
def test_points_where_none_can_be_are_refused(points: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        plan_of(split_points=points, **options)


def test_a_point_in_a_module_that_stays_whole_says_why() -> None:
    with pytest.raises(PartitionError, match="The model cannot be cut at a split point") as caught:
        plan_of(Wrapped(), torch.randn(4, WIDTH), split_points=["looking.second"])
    assert "looking cannot be split: " in str(caught.value.observed)
    with pytest.raises(PartitionError, match="do not run it"):
        plan_of(Skipping(), torch.randn(4, WIDTH), split_points=["unused"])


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_a_step_that_every_rank_runs_is_cut_by_parameters_only() -> None:
    class Manual(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.manual_backward(self.net(batch).square().mean())

    batch = torch.randn(4, WIDTH)
    assert plan_of(Manual(), batch, num_stages=2).num_stages == 2
    for options in ({"num_stages": 2, "balance": "flops"}, {"split_points": ["net.1"]}):
        with pytest.raises(UnsupportedError, match='support only balance="parameters"') as caught:
            plan_of(Manual(), batch, **options)
        assert caught.value.observed == "manual optimization"


def test_without_a_number_of_stages_there_must_be_split_points() -> None:
    with pytest.raises(TypeError, match="num_stages or split_points"):
        make_plan(Uneven(), torch.arange(4))


def test_stages_are_of_equal_flops_where_they_can_be() -> None:
    layers = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise([4, 64, 4, 64, 4, 4, 4, 4, 4])))
    plan = plan_of(layers, torch.randn(8, 4), num_stages=2, balance="flops")
    assert begins(plan)[1] == "2"


# ---------------------------------------------------------------------- devices


def layers_of(plan: PartitionPlan) -> list[int]:
    return [len({fqn.rpartition(".")[0] for fqn in stage.fqns}) for stage in plan.stages]


def equal_layers(count: int = 12) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


@pytest.mark.parametrize("balance", ["parameters", "flops"])
def test_a_device_that_is_twice_as_fast_gets_twice_as_much(balance: str) -> None:
    """By the rank: rank 0 has the last stage."""
    batch = torch.randn(8, WIDTH)
    assert layers_of(make_plan(equal_layers(), batch, num_stages=2, balance=balance, device_speeds=[2, 1])) == [4, 8]
    assert layers_of(make_plan(equal_layers(), batch, num_stages=3, balance=balance, device_speeds=[1, 1, 2])) == [6, 3, 3]
    v_shaped: dict[str, Any] = {"schedule": "zbv_zero_bubble", "num_devices": 2, "device_speeds": [1, 3]}
    assert layers_of(make_plan(equal_layers(16), batch, num_stages=4, balance=balance, **v_shaped)) == [2, 6, 6, 2]


def test_seconds_count_on_the_device_that_they_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_costs, "measured_seconds", lambda chain, _: [UnitSeconds(1.0, 1.0, 1.0)] * len(chain.units))
    batch = torch.randn(8, WIDTH)
    for speeds, layers in (([2, 1], [4, 8]), ([1, 2], [8, 4]), ((), [6, 6])):
        plan = make_plan(equal_layers(), batch, num_stages=2, balance="seconds", device_speeds=speeds, num_microbatches=4)
        assert layers_of(plan) == layers


def test_memory_goes_by_what_the_schedule_keeps() -> None:
    """1F1B keeps more microbatches the earlier a stage is, so an early stage gets fewer layers; GPipe keeps all everywhere."""
    batch = torch.randn(4096, WIDTH)
    options: dict[str, Any] = {"num_stages": 3, "num_microbatches": 8, "balance": "memory"}
    assert layers_of(make_plan(equal_layers(), batch, schedule="gpipe", **options)) == [4, 4, 4]
    early, middle, late = layers_of(make_plan(equal_layers(24), batch, schedule="1f1b", **options))
    assert early < middle < late


def needed_gib(plan: PartitionPlan, batch: Tensor, schedule: str, num_microbatches: int) -> list[float]:
    """What each stage needs, from its plan: an independent sum of states, what linear layers save, and buffers."""
    kept = {"gpipe": [num_microbatches] * plan.num_stages, "1f1b": [*range(plan.num_stages, 0, -1)]}[schedule]
    saved = len(batch) // num_microbatches * WIDTH * 4  # of each layer its input
    found = []
    for stage, count, layers in zip(plan.stages, kept, layers_of(plan), strict=True):
        states = 4 * 4 * stage.num_parameters
        found.append((states + count * (layers - (stage.index == 0)) * saved + 2 * stage.output_bytes) / 2**30)
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_fit_into_the_memory_or_are_refused(schedule: str) -> None:
    """For every limit either each stage of the plan fits, or no cut of all that there are would."""
    model, batch = equal_layers(6), torch.randn(512, WIDTH)
    options: dict[str, Any] = {"num_stages": 3, "num_microbatches": 4, "schedule": schedule}
    possible = []
    for first in range(1, 5):
        for second in range(first + 1, 6):
            plan = make_plan(model, batch, split_points=[str(first), str(second)], num_microbatches=4)
            possible.append(needed_gib(plan, batch, schedule, 4))
    limits = sorted({max(needs) for needs in possible})
    assert len(limits) > 3
    for limit in (*(limit + 1e-9 for limit in limits), limits[0] - 1e-7):
        if any(max(needs) <= limit for needs in possible):
            plan = make_plan(model, batch, device_memory_gib=limit, **options)
            assert max(needed_gib(plan, batch, schedule, 4)) <= limit
        else:
            with pytest.raises(PartitionError, match="No partition into 3 stages fits in the devices' memory") as caught:
                make_plan(model, batch, device_memory_gib=limit, **options)
            assert "KiB" in str(caught.value.observed)


@pytest.mark.parametrize("optimizer_bytes_per_byte", [0.0, 0.5, 2.0])
def test_what_the_optimizer_keeps_counts_as_it_is_told(optimizer_bytes_per_byte: float) -> None:
    model, batch = equal_layers(6), torch.randn(8, WIDTH)
    states = round((2 + optimizer_bytes_per_byte) * 4 * (WIDTH * WIDTH + WIDTH))  # of a layer
    kept, buffers = 8 * WIDTH * 4, 2 * 8 * WIDTH * 4
    needed = 3 * (states + kept) + buffers  # the first stage's input is kept by nobody: the last one needs the most
    for limit, fits in ((needed, True), (needed - buffers - 1, False)):
        rule = make_rule(
            num_stages=2,
            balance="flops",
            num_microbatches=1,
            device_memory_gib=limit / 2**30,
            optimizer_bytes_per_byte=optimizer_bytes_per_byte,
        )
        if fits:
            assert layers_of(make_planned(model, batch, rule=rule).plan) == [3, 3]
            continue
        with pytest.raises(PartitionError, match="fits in the devices' memory") as caught:
            make_planned(model, batch, rule=rule)
        told = {0.0: "0 of Adam's states", 0.5: "0.25 of Adam's states", 2.0: ", Adam's states"}[optimizer_bytes_per_byte]
        assert told in str(caught.value.observed)


def test_a_small_device_gets_what_fits_and_the_others_the_rest() -> None:
    model, batch = equal_layers(12), torch.randn(8, WIDTH)
    layer_gib = 4 * 4 * (WIDTH * WIDTH + WIDTH) / 2**30
    activations_gib = 5 * 8 * WIDTH * 4 / 2**30
    plan = make_plan(model, batch, num_stages=3, device_memory_gib=[1, 2 * layer_gib + activations_gib, 1])
    assert layers_of(plan) == [5, 2, 5]


def test_more_numbers_than_devices_are_refused() -> None:
    with pytest.raises(PartitionError, match="The number of entries in device_speeds differs from the number of devices"):
        make_plan(equal_layers(), torch.randn(8, WIDTH), num_stages=2, device_speeds=[1, 2, 3])
    with pytest.raises(PartitionError, match="3 stages and 2 devices"):
        make_plan(equal_layers(), torch.randn(8, WIDTH), num_stages=3, num_devices=2)
    with pytest.raises(PartitionError, match="split_points determines all cuts"):
        make_plan(equal_layers(), torch.randn(8, WIDTH), split_points=["3"], device_memory_gib=1)


class TiedEnds(nn.Module):
    """Its head is its embedding, which is larger than the layers between."""

    def __init__(self, num_layers: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


def held_by(plan: PartitionPlan) -> list[int]:
    return [sum(math.prod(plan.parameter_shapes[fqn]) for fqn in stage.fqns) for stage in plan.stages]


def test_a_weight_that_two_stages_hold_counts_in_both() -> None:
    """The last stage was given the most layers, as if the head weighed nothing."""
    plan = make_plan(TiedEnds(), torch.arange(16), num_stages=2)
    assert held_by(plan) == [40 * WIDTH + 4 * WIDTH * WIDTH] * 2
    assert make_plan(TiedEnds(), torch.arange(16), num_stages=2, balance="memory").stages[1].first_module.startswith("layers.4")
    assert max(held_by(make_plan(TiedEnds(12), torch.arange(16), num_stages=4))) <= 1.05 * (40 * WIDTH + 2 * WIDTH * WIDTH)


# ---------------------------------------------------------------------- every weight and constraint by brute force


@pytest.fixture(scope="module")
def tied() -> UnitCosts:
    rule = CutRule(num_stages=1, opened=frozenset(["layers"]))
    costs = table_of(make_planned(TiedEnds(), torch.arange(16), rule=rule))
    assert len(costs.chain.units) == 10
    return costs


def weights_of_stages(costs: UnitCosts, kept: list[int], cuts: tuple[int, ...], measure: str) -> list[float]:
    """By the parameters of each stage, each once, and sums over its units."""
    parameters = dict(costs.chain.traced.root.named_parameters())
    found = []
    for stage, (start, end) in enumerate(pairwise((0, *(cut + 1 for cut in cuts), len(costs.chain.units)))):
        fqns = {fqn for unit in costs.chain.units[start:end] for fqn in unit.tensor_fqns}
        held = sum(parameters[fqn].numel() for fqn in fqns)
        flops = sum(unit.flops for unit in costs.operators[start:end])
        memory = 4 * 4 * held + kept[stage] * sum(costs.kept_bytes[start:end])
        found.append({"parameters": held, "flops": flops, "memory": memory}[measure])
    return found


@given(
    num_stages=st.integers(1, 4),
    balance=st.sampled_from(["parameters", "flops", "memory"]),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    speeds=st.just([]) | st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=4, max_size=4),
    pins=st.dictionaries(st.integers(0, 7), st.integers(0, 3), max_size=2),
    memory=st.none() | st.integers(6_000, 25_000),
)
@settings(max_examples=150, deadline=None)
def test_every_weight_and_constraint_equals_brute_force(tied: UnitCosts, **drawn: Any) -> None:
    num_stages, memory, speeds = drawn["num_stages"], drawn["memory"], tuple(drawn["speeds"][: drawn["num_stages"]])
    pins = {layer: stage for layer, stage in drawn["pins"].items() if stage < num_stages}
    memory_bytes = () if memory is None else (memory,) * num_stages
    load = Load(schedule=drawn["schedule"], num_ranks=num_stages, num_microbatches=4, speeds=speeds, memory_bytes=memory_bytes)
    stage_of = tuple((f"layers.{layer}", stage) for layer, stage in pins.items())
    must_fit = memory is not None
    rule = CutRule(num_stages=num_stages, balance=drawn["balance"], stage_of=stage_of, load=load, must_fit=must_fit)
    shares = [1.0] * num_stages
    if speeds and rule.balance != "memory":
        shares = [speed / max(speeds) for speed in reversed(speeds)]  # rank 0 has the last stage
    kept = [4 if load.schedule == "gpipe" else num_stages - stage for stage in range(num_stages)]
    legal = [position for position, cost in enumerate(tied.cut_costs) if cost is not None]
    possible = {}
    for cuts in combinations(legal, num_stages - 1):
        if any(bisect_left(cuts, layer + 1) != stage for layer, stage in pins.items()):
            continue  # the embedding is the unit before the first layer
        needs = weights_of_stages(tied, kept, cuts, "memory")
        buffers = [*(2 * tied.chain.sites[cut].num_bytes for cut in cuts), 0]
        if memory is None or all(need + buffer <= memory for need, buffer in zip(needs, buffers, strict=True)):
            weights = weights_of_stages(tied, kept, cuts, rule.balance)
            possible[cuts] = max(math.ceil(weight / share) for weight, share in zip(weights, shares, strict=True))
    if not possible:
        with pytest.raises(PartitionError):
            rule.cuts(tied)
        return
    found = rule.cuts(tied)
    assert found in possible
    assert possible[found] <= min(possible.values()) + 1  # shares of whole numbers
