"""From a module and an example batch to a plan."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.errors import BatchError, PartitionError, TraceError
from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.cost import Chain, build_chain, canonical_fqns
from lightning_fxpipe.planner.granularity import GOOD_ENOUGH
from lightning_fxpipe.planner.partition import Demands, Weights, cheapest_cuts, lightest_maximum
from lightning_fxpipe.planner.plan import BoundaryTensor, PartitionPlan
from lightning_fxpipe.planner.planning import plan_region
from lightning_fxpipe.planner.step_plan import make_plan
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.reporting.table import human_bytes
from lightning_fxpipe.tracing import trace as trace_module
from lightning_fxpipe.tracing.recordable import RegionCall
from lightning_fxpipe.tracing.region import StepCall, find_region
from lightning_fxpipe.tracing.trace import trace_region
from tests.lit import LitModel
from tests.models import ResNet18, SkipMLP, make_model, make_samples

MODELS = ("mlp", "gpt", "resnet", "unet")
STAGES = (2, 3, 4)
BATCH = 4


@cache
def plan_of(name: str, num_stages: int) -> PartitionPlan:
    return make_plan(make_model(name), make_samples(name, BATCH)[0], num_stages=num_stages)


def call_of(x: Tensor, path: str = "") -> RegionCall:
    return RegionCall(path=path, args=(x,), kwargs={}, batch_size=x.shape[0])


def fqns_of_stages(assignment: Assignment) -> list[set[str]]:
    """Names of what each stage's units use."""
    used: list[set[str]] = [set() for _ in range(assignment.num_stages)]
    for position, unit in enumerate(assignment.chain.units):
        used[assignment.stage_of(position)] |= unit.tensor_fqns
    return used


# ------------------------------------------------------------------------------------------------------------ balance


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_stages", STAGES)
def test_plan_has_exactly_the_stages_asked_for_and_every_parameter(name: str, num_stages: int) -> None:
    model, plan = make_model(name), plan_of(name, num_stages)
    assert plan.num_stages == num_stages
    assert [stage.index for stage in plan.stages] == list(range(num_stages))
    assert plan.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert {fqn for stage in plan.stages for fqn in stage.fqns} == set(canonical_fqns(model).values())
    assert all(stage.num_parameters > 0 for stage in plan.stages)


@cache
def finest(name: str) -> tuple[Chain, Weights]:
    call = call_of(make_samples(name, BATCH)[0])
    chain = build_chain(trace_region(make_model(name), call, opened=None))
    return chain, UnitCosts(chain=chain, call=call).parameters


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_stages", STAGES)
def test_heaviest_stage_is_near_the_best_of_any_granularity(name: str, num_stages: int) -> None:
    chain, weights = finest(name)
    costs = [None if site.obstacle else site.num_bytes for site in chain.sites[:-1]]
    best = lightest_maximum(Demands(weights, costs, num_stages))
    plan = plan_of(name, num_stages)
    heaviest = max(sum(math.prod(plan.parameter_shapes.get(fqn, (0,))) for fqn in stage.fqns) for stage in plan.stages)
    assert best <= heaviest <= GOOD_ENOUGH * best
    assert GOOD_ENOUGH == 1.05


def planned(name: str, num_stages: int) -> Assignment:
    """The assignment that the plan describes."""
    call = call_of(make_samples(name, BATCH)[0])
    chain = build_chain(trace_region(make_model(name), call, opened=plan_of(name, num_stages).opened))
    costs = [None if site.obstacle else site.num_bytes for site in chain.sites[:-1]]
    return Assignment(chain=chain, cuts=cheapest_cuts(Demands(UnitCosts(chain=chain, call=call).parameters, costs, num_stages)))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_stages", STAGES)
def test_only_modules_that_a_cut_falls_into_are_opened(name: str, num_stages: int) -> None:
    assignment = planned(name, num_stages)
    for path in plan_of(name, num_stages).opened:
        stages = {
            assignment.stage_of(position)
            for position, unit in enumerate(assignment.chain.units)
            if unit.path == path or unit.path.startswith(f"{path}.")
        }
        assert len(stages) > 1, path


def test_shared_parameter_is_in_both_stages_that_use_it_and_counted_once() -> None:
    for num_stages in STAGES:
        plan = plan_of("gpt", num_stages)
        assert plan.stages_of("tok.weight") == (0, num_stages - 1)
        assert not any("head.weight" in stage.fqns for stage in plan.stages)
        assert plan.num_parameters == sum(parameter.numel() for parameter in make_model("gpt").parameters())


def test_same_module_and_batch_give_the_same_plan() -> None:
    again = make_plan(make_model("gpt"), make_samples("gpt", BATCH)[0], num_stages=3)
    assert again == plan_of("gpt", 3)


def test_single_stage_holds_everything_and_sends_nothing() -> None:
    plan = make_plan(make_model("mlp"), make_samples("mlp", BATCH)[0], num_stages=1)
    assert plan.num_stages == 1
    assert plan.stages[0].outputs == ()
    assert plan.opened == ()
    assert set(plan.stages[0].fqns) == {name for name, _ in make_model("mlp").named_parameters()}


class Uneven(nn.Module):
    """All weight in one block of three layers: it has to be opened."""

    def __init__(self) -> None:
        super().__init__()
        self.light = nn.Linear(4, 4)
        self.heavy = nn.Sequential(nn.Linear(4, 64), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.heavy(self.light(x))


def test_heavy_module_is_opened_down_to_where_the_cut_must_fall() -> None:
    plan = make_plan(Uneven(), torch.randn(BATCH, 4), num_stages=2)
    assert plan.opened == ("heavy", "heavy.1")
    assert [(stage.first_module, stage.last_module) for stage in plan.stages] == [
        ("light", "heavy.1.0"),
        ("heavy.1.1", "heavy.2"),
    ]


def test_a_module_is_recorded_no_more_often_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to see how it is balanced, which its parameters tell as far as modules heavier than a stage are concerned, and once
    more to compare."""
    recorded = []

    def record(*args: Any, **kwargs: Any) -> Any:
        recorded.append(1)
        return record_once(*args, **kwargs)

    record_once = trace_module._record
    monkeypatch.setattr(trace_module, "_record", record)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6)))
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(8, 8), blocks), nn.Linear(8, 8)))
    plan = plan_region(model, call_of(torch.randn(BATCH, 8)), num_stages=4)
    assert plan.opened == ("0", "0.0", "0.0.1")
    assert [stage.num_parameters for stage in plan.stages] == [144] * 4
    assert len(recorded) == 2


def test_module_with_hooks_is_not_opened_and_the_plan_says_why() -> None:
    model = Uneven()
    model.heavy[1].register_forward_hook(lambda *_: None)
    plan = make_plan(model, torch.randn(BATCH, 4), num_stages=2)
    assert plan.opened == ("heavy",)
    assert plan.kept_whole == {"heavy.1": "hooks run around its forward"}
    assert "Not split: heavy.1 (hooks run around its forward)" in str(plan)


# --------------------------------------------------------------------------------------------------------- boundaries


class Skipping(nn.Module):
    """``skip`` goes from the first layer past the second and third to the last; so does a value without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skip = self.a(x)
        ranks = x.argsort(dim=1)[:, 0]  # sorting is not cheap
        return self.d(self.c(self.b(skip)) + skip), ranks


def test_boundaries_of_a_hand_computable_model() -> None:
    plan = make_plan(Skipping(), torch.randn(BATCH, 6), num_stages=4)
    assert [(stage.first_module, stage.last_module, stage.fqns) for stage in plan.stages] == [
        ("a", "a", ("a.weight", "a.bias")),
        ("b", "b", ("b.weight", "b.bias")),  # sorts first
        ("c", "c", ("c.weight", "c.bias")),
        ("d", "d", ("d.weight", "d.bias")),
    ]
    sent = [{tensor.name: tensor for tensor in stage.outputs} for stage in plan.stages]
    assert [list(outputs) for outputs in sent] == [["a"], ["getitem", "a", "b"], ["add"], []]
    assert sent[0]["a"] == BoundaryTensor(
        name="a",
        module="a",
        shape=(BATCH, 6),
        dtype="float32",
        requires_grad=True,
        producer_stage=0,
        consumer_stages=(1, 2),
        num_bytes=BATCH * 6 * 4,
        receiver_stage=1,
    )
    assert sent[1]["a"] == replace(sent[0]["a"], receiver_stage=2)
    assert sent[1]["getitem"] == BoundaryTensor(
        name="getitem",
        module="",
        shape=(BATCH,),
        dtype="int64",
        requires_grad=False,
        producer_stage=1,
        consumer_stages=(3,),  # it is part of the result
        num_bytes=BATCH * 8,
        receiver_stage=3,  # past stage 2
    )
    assert [stage.output_bytes for stage in plan.stages] == [96, 96 + 32 + 96, 96, 0]
    assert [stage.skipping_bytes for stage in plan.stages] == [0, 32, 0, 0]


def test_tensor_that_the_next_stage_does_not_use_is_shown_as_a_skip() -> None:
    plan = plan_of("unet", 3)
    skips = [tensor for tensor in plan.stages[0].outputs if tensor.receiver_stage != 1]
    assert skips
    assert {(tensor.producer_stage, tensor.consumer_stages, tensor.receiver_stage) for tensor in skips} == {(0, (2,), 2)}
    assert not {tensor.name for tensor in skips} & {tensor.name for tensor in plan.stages[1].outputs}
    assert plan.stages[0].skipping_bytes == sum(tensor.num_bytes for tensor in skips)
    said = f"{human_bytes(plan.stages[0].skipping_bytes)} from stage 0 to 2 ({len(skips)} tensor"
    assert f"Included in these sizes, sent past stages that do not use it: {said}" in " ".join(str(plan).split())


def test_shapes_are_those_of_one_microbatch() -> None:
    model, x = make_model("mlp"), make_samples("mlp", 12)[0]
    whole = make_plan(model, x, num_stages=2)
    quarter = make_plan(model, x, num_stages=2, num_microbatches=4)
    assert (whole.microbatch_size, quarter.microbatch_size) == (12, 3)
    assert {tensor.shape[0] for tensor in quarter.stages[0].outputs} == {3}
    assert quarter.stages[0].output_bytes * 4 == whole.stages[0].output_bytes
    assert [stage.fqns for stage in quarter.stages] == [stage.fqns for stage in whole.stages]


# ------------------------------------------------------------------------------------- what is planned, and its table


def test_call_inside_a_training_step_is_what_is_planned() -> None:
    module = LitModel("mlp")
    plan = make_plan(module, make_samples("mlp", BATCH), num_stages=2)
    assert plan.region == "model"
    assert [fqn for stage in plan.stages for fqn in stage.fqns] == [name for name, _ in module.named_parameters()]
    assert all(stage.first_module.startswith("model") for stage in plan.stages)
    plain = plan_of("mlp", 2)
    assert [stage.num_parameters for stage in plan.stages] == [stage.num_parameters for stage in plain.stages]


class Distilled(L.LightningModule):
    """A frozen teacher before the pipelined call, a trained temperature after it, and a parameter nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 6)
        self.student = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.temperature = nn.Parameter(torch.ones(7))
        self.unused = nn.Linear(3, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch)
        return ((self.student(batch) - target) ** 2).mean() * self.temperature.mean()


def plan_of_first_call(module: L.LightningModule) -> PartitionPlan:
    """The plan where only the first call that trains is pipelined: what is left for a step that cannot run on fakes."""
    call = find_region(module, StepCall.of_training(module, torch.randn(BATCH, 6)), batch_size=BATCH)
    return plan_region(module, call, num_stages=2)


def test_parameters_before_and_after_the_pipelined_call_have_places_of_their_own() -> None:
    plan = plan_of_first_call(Distilled())
    assert plan.region == "student"
    assert plan.prelude_fqns == ("teacher.weight", "teacher.bias")
    assert plan.outside_fqns == ("temperature", "unused.weight", "unused.bias")
    assert plan.stages_of("teacher.weight") == ()
    assert plan.stages_of("temperature") == plan.stages_of("unused.bias") == (1,)
    assert [stage.fqns for stage in plan.stages] == [
        ("student.0.weight", "student.0.bias"),
        ("student.1.weight", "student.1.bias"),
    ]


def test_parameters_after_the_call_weigh_on_the_last_stage() -> None:
    class HeavyLoss(Distilled):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
            self.temperature = nn.Parameter(torch.ones(3 * 42))

    plan = plan_of_first_call(HeavyLoss())
    # 4 * 42 in the layers and 126 + 12 outside: only with all but the last layer in the first stage is it balanced.
    assert plan.stages[0].num_parameters == 3 * 42


def test_all_calls_of_a_step_that_use_parameters_are_planned() -> None:
    plan = make_plan(Distilled(), torch.randn(BATCH, 6), num_stages=3)
    assert plan.region == "several calls of training_step"
    assert plan.prelude_fqns == ()
    assert plan.outside_fqns == ("unused.weight", "unused.bias")
    assert [stage.fqns for stage in plan.stages] == [
        ("teacher.weight", "teacher.bias"),
        ("student.0.weight", "student.0.bias"),
        ("temperature", "student.1.weight", "student.1.bias"),
    ]


def test_parameter_that_the_call_returns_is_held_by_the_last_stage() -> None:
    class WithCodebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.last(self.first(x)), self.first.weight  # for a penalty in the loss

    plan = make_plan(WithCodebook(), torch.randn(BATCH, 6), num_stages=2)
    assert plan.stages_of("first.weight") == (0, 1)
    assert plan.stages_of("first.bias") == (0,)


def test_plain_module_takes_its_arguments_from_a_tuple_or_a_dict() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.last(self.first(x) + y.sum(1, keepdim=True))

    x, y = torch.randn(BATCH, 6), torch.randn(BATCH, 3)
    for batch in ((x, y), [x, y], {"y": y, "x": x}):
        plan = make_plan(Two(), batch, num_stages=2)
        assert [stage.fqns for stage in plan.stages] == [("first.weight", "first.bias"), ("last.weight", "last.bias")]


@pytest.mark.parametrize("name", MODELS)
def test_table_shows_every_stage_with_its_share(name: str) -> None:
    plan = plan_of(name, 3)
    lines = [line.split() for line in str(plan).splitlines()[3:]]
    rows = [line for line in lines if "%" in line]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    for stage, row in zip(plan.stages, rows, strict=True):
        assert row[1] == (stage.first_module or "(root)")
        if stage.last_module != stage.first_module:
            assert row[2:4] == ["to", stage.last_module or "(root)"]
        held = sum(math.prod(plan.parameter_shapes.get(fqn, (0,))) for fqn in stage.fqns)
        share = 100 * held / plan.num_parameters
        assert row[row.index("%") - 1] == f"{share:.1f}"


@pytest.mark.parametrize("name", MODELS)
def test_saved_plan_loads_equal_and_fits(name: str, tmp_path: Path) -> None:
    plan = plan_of(name, 3)
    plan.save(tmp_path / "plan.json")
    loaded = PartitionPlan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert str(loaded) == str(plan)
    loaded.check_fits({fqn: tuple(parameter.shape) for fqn, parameter in make_model(name).named_parameters()})


def test_plan_does_not_fit_a_model_of_another_width() -> None:
    other = SkipMLP(width=25)
    with pytest.raises(PartitionError, match="made for a different model") as caught:
        plan_of("mlp", 2).check_fits({fqn: tuple(parameter.shape) for fqn, parameter in other.named_parameters()})
    assert "layers.0.bias: plan (24,), model (25,)" in str(caught.value)


def test_planning_leaves_module_and_generators_alone() -> None:
    model = make_model("resnet").train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    identities = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    generators = random.getstate(), torch.get_rng_state()
    make_plan(model, make_samples("resnet", BATCH)[0], num_stages=2)
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == identities
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert random.getstate() == generators[0]
    assert torch.equal(torch.get_rng_state(), generators[1])


def test_full_size_resnet_is_planned_without_its_data() -> None:
    # Parameters and activations are fakes, so planning needs the memory of neither.
    with torch.device("meta"):
        model = ResNet18()
    plan = make_plan(model, torch.randn(2, 3, 64, 64), num_stages=4)
    assert plan.num_parameters == 11_689_512  # torchvision's
    assert max(stage.num_parameters for stage in plan.stages) <= 0.32 * plan.num_parameters


# ------------------------------------------------------------------------------------------------------------- errors


def test_more_stages_than_legal_cuts_is_an_error_with_counts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(PartitionError, match="Cannot form 5 stages") as caught:
        make_plan(model, torch.randn(BATCH, 4), num_stages=5)
    assert caught.value.observed == "2 places for a cut, so at most 3 stages"
    assert "at most 3 devices" in (caught.value.todo or "")


def test_a_model_of_one_layer_is_told_so() -> None:
    class OneLayer(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(4, 4)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.model(batch).sum()

    with pytest.raises(PartitionError) as caught:
        make_plan(OneLayer(), torch.randn(BATCH, 4), num_stages=2)
    assert caught.value.what == "The model has one layer with parameters (`model`), so it cannot be split into 2 stages."
    assert caught.value.todo == "Use devices=1, or FxPipeStrategy(num_stages=1) for data parallelism."


def test_everything_that_can_be_opened_is_opened_before_giving_up() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))
    plan = make_plan(model, torch.randn(BATCH, 4), num_stages=3)
    assert [stage.first_module for stage in plan.stages] == ["0.0", "0.1.0", "0.1.1"]
    with pytest.raises(PartitionError, match="Cannot form 4 stages"):
        make_plan(model, torch.randn(BATCH, 4), num_stages=4)


def test_illegal_cuts_are_not_counted() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            base = self.first(x)
            view = base[:, :2]
            base.add_(1)
            return self.last(base) + view.sum()

    with pytest.raises(PartitionError, match="4 places for a cut, so at most 5 stages"):
        make_plan(InPlace(), torch.randn(BATCH, 4), num_stages=7)


@pytest.mark.parametrize("num_stages", [0, -3])
def test_no_stages_is_an_error(num_stages: int) -> None:
    with pytest.raises(PartitionError, match=f"Cannot form {num_stages} stages"):
        make_plan(make_model("mlp"), make_samples("mlp", BATCH)[0], num_stages=num_stages)


def test_batch_without_batch_dimension_is_an_error() -> None:
    with pytest.raises(BatchError):
        make_plan(make_model("mlp"), {"x": 3}, num_stages=2, num_microbatches=2)


def test_step_that_never_calls_the_model_is_an_error() -> None:
    class NoCall(Distilled):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return batch.sum()

    with pytest.raises(TraceError, match="never calls a model"):
        make_plan(NoCall(), torch.randn(BATCH, 6), num_stages=2)
