"""From a plan to the cuts of the module's other graphs."""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.errors import PartitionError
from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.follow_plan import divided_modules, follow_plan, trace_for_plan
from lightning_fxpipe.planner.planning import describe_plan, plan_region
from lightning_fxpipe.planner.step_plan import make_plan
from lightning_fxpipe.tracing.trace import trace_region
from tests.models import make_model, make_samples
from tests.planner.test_planning import BATCH, MODELS, STAGES, Distilled, call_of, fqns_of_stages, plan_of, plan_of_first_call


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize(
    ("training", "batch_size"),
    [
        (True, BATCH),
        pytest.param(False, BATCH, marks=pytest.mark.slow),
        pytest.param(True, 7, marks=pytest.mark.slow),
        (False, 3),
    ],
)
def test_every_graph_of_the_model_gives_each_parameter_its_owner(
    name: str, num_stages: int, training: bool, batch_size: int
) -> None:
    plan = plan_of(name, num_stages)
    model = make_model(name).train(training)
    traced = trace_region(model, call_of(make_samples(name, batch_size)[0]), opened=plan.opened)
    assignment = follow_plan(plan, traced)
    assert fqns_of_stages(assignment) == [set(stage.fqns) for stage in plan.stages]
    again = describe_plan(assignment, call_of(make_samples(name, batch_size)[0]))
    assert [stage.num_parameters for stage in again.stages] == [stage.num_parameters for stage in plan.stages]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_stages", STAGES)
def test_plan_followed_on_the_graph_that_it_was_made_from_is_the_plan(name: str, num_stages: int) -> None:
    # What runs is what the table has shown, also where two cuts would be equally good.
    plan, call = plan_of(name, num_stages), call_of(make_samples(name, BATCH)[0])
    assignment = follow_plan(plan, trace_region(make_model(name), call, opened=plan.opened))
    assert describe_plan(assignment, call) == plan


@pytest.mark.parametrize("name", ["mlp", "gpt", "unet"])
def test_followed_cuts_send_the_fewest_bytes_of_all_that_fit_the_plan(name: str) -> None:
    plan = plan_of(name, 3)
    traced = trace_region(make_model(name).eval(), call_of(make_samples(name, BATCH)[0]), opened=plan.opened)
    found = follow_plan(plan, traced)
    chain = found.chain

    def num_bytes(cuts: tuple[int, ...]) -> int:
        return sum(chain.site(cut).num_bytes for cut in cuts)

    def fits(assignment: Assignment) -> bool:
        legal = all(chain.site(cut).obstacle is None for cut in assignment.cuts)
        pairs = zip(fqns_of_stages(assignment), plan.stages, strict=True)
        return legal and all(used <= set(stage.fqns) for used, stage in pairs)

    candidates = (Assignment(chain=chain, cuts=cuts) for cuts in combinations_with_replacement(range(-1, len(chain.units)), 2))
    best = min(num_bytes(candidate.cuts) for candidate in candidates if fits(candidate))
    assert fits(found)
    assert num_bytes(found.cuts) == best


class Parts(nn.Module):
    """Called in several ways, as a validation step may call a model otherwise than training does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.order = "abc"

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = torch.relu(self.get_submodule(name)(x))
        return x


def follow_in_order(order: str) -> Assignment:
    model = Parts()
    plan = make_plan(model, torch.randn(BATCH, 6), num_stages=3)
    assert [stage.fqns[0] for stage in plan.stages] == ["a.weight", "b.weight", "c.weight"]
    model.order = order
    return follow_plan(plan, trace_region(model, call_of(torch.randn(BATCH, 6))))


@pytest.mark.parametrize("order", ["abc", "aabbcc", "ab", "bc", "ac", "a", "b", "c", ""])
def test_part_of_the_model_runs_where_its_parameters_are(order: str) -> None:
    assignment = follow_in_order(order)
    assert assignment.num_stages == 3
    used = fqns_of_stages(assignment)
    assert used == [{f"{name}.weight", f"{name}.bias"} if name in order else set() for name in "abc"]


def test_stages_before_the_first_use_receive_nothing_and_those_after_the_last_relay_the_result() -> None:
    assignment = follow_in_order("b")
    assert assignment.boundary(0) == ()  # every rank has the region's inputs
    assert [node.name for node in assignment.boundary(1)] == ["relu"]
    assert assignment.nodes(2) == []


class Outer(nn.Module):
    """Around the module that a plan is made from."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).softmax(-1)


def nested() -> Outer:
    towers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    return Outer(Outer(towers))


PATHS = ("", "inner", "inner.inner")


@pytest.mark.parametrize("planned", PATHS)
@pytest.mark.parametrize("called", PATHS)
def test_cuts_are_found_again_in_a_call_around_or_inside_the_planned_one(planned: str, called: str) -> None:
    model = nested()
    x = torch.randn(BATCH, 6)
    plan = plan_region(model, call_of(x, planned), num_stages=2)
    traced = trace_for_plan(model, call_of(x, called), plan)
    assert fqns_of_stages(follow_plan(plan, traced)) == [set(stage.fqns) for stage in plan.stages]
    assert {node.target for node in traced.graph.nodes if node.op == "call_module"} == {f"inner.inner.{i}" for i in range(4)}


def test_modules_are_opened_where_no_stage_has_all_their_tensors() -> None:
    model = nested()
    plan = plan_region(model, call_of(torch.randn(BATCH, 6)), num_stages=2)
    assert divided_modules(plan, model) == {"", "inner", "inner.inner"}


def test_divided_module_that_must_stay_whole_is_an_error_that_fits_a_screen() -> None:
    model = nested()
    x = torch.randn(BATCH, 6)
    plan = plan_region(model, call_of(x, "inner.inner"), num_stages=2)
    model.inner.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(PartitionError, match="cannot split a module that the plan divides among stages") as caught:
        follow_plan(plan, trace_for_plan(model, call_of(x), plan))
    assert "4 tensors of inner.inner such as inner.inner.0.0.bias, inner.inner.0.0.weight (stage 0)" in str(caught.value)
    assert "hooks run around its forward" in str(caught.value)
    assert len(str(caught.value)) < 800


def test_use_of_the_stages_in_another_order_is_an_error_that_names_them() -> None:
    with pytest.raises(PartitionError, match="in an order that the plan's stages cannot follow") as caught:
        follow_in_order("acb")
    assert (caught.value.where or "").startswith("b, ")
    assert "tests/planner/test_follow_plan.py" in (caught.value.where or "")
    assert "b.bias, b.weight (stage 1)" in (caught.value.observed or "")


def test_loop_back_to_an_earlier_stage_is_an_error() -> None:
    with pytest.raises(PartitionError, match="cannot follow"):
        follow_in_order("abca")


def test_unit_with_a_shared_parameter_may_run_in_any_stage_that_holds_it() -> None:
    plan = plan_of("gpt", 3)
    model = make_model("gpt")

    class HeadOnly(nn.Module):
        """What a generation step may do: no embedding, only blocks and head."""

        def __init__(self) -> None:
            super().__init__()
            for name, module in model.named_children():
                setattr(self, name, module)
            self.pos = model.pos

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.tok(ids))

    traced = trace_region(HeadOnly(), call_of(make_samples("gpt", BATCH)[0]))
    assignment = follow_plan(plan, traced)
    # Both in one stage, and in the last, which saves sending logits through the pipeline.
    assert assignment.cuts == (-1, -1)


def test_parameters_that_every_rank_keeps_may_be_used_anywhere() -> None:
    model = Distilled()
    plan = plan_of_first_call(model)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = model.teacher, model.student

        def forward(self, x: Tensor) -> Any:
            return self.teacher(self.student(self.teacher(x)))

    assignment = follow_plan(plan, trace_region(Both(), call_of(torch.randn(BATCH, 6)), opened=("student",)))
    used = fqns_of_stages(assignment)
    assert "student.0.weight" in used[0]
    assert "student.1.weight" in used[1]
    assert "student.1.weight" not in used[0]


class Chosen(nn.Module):
    """In evaluation it ends in its first half, with a result whose size nobody knows beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h) if self.training else self.a(h[h[:, 0] > 0])


def test_a_result_that_cannot_get_to_the_last_stage_is_an_error() -> None:
    """No cut may fall after the last call, which belongs to the first stage: there is no way, not one that costs nothing."""
    model, call = Chosen(), call_of(torch.randn(BATCH, 6))
    plan = plan_region(model, call, num_stages=2)
    model.eval()
    with pytest.raises(PartitionError, match="cannot follow"):
        follow_plan(plan, trace_for_plan(model, call, plan))


class ReturnsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        result = self.b(self.a(x))
        return result if self.training else (result, self.a.weight)


def test_what_a_call_returns_as_it_is_is_held_by_the_last_stage() -> None:
    model, call = ReturnsWeight(), call_of(torch.randn(BATCH, 6))
    plan = plan_region(model, call, num_stages=2)
    model.eval()
    with pytest.raises(PartitionError, match="returns parameters or buffers that the last stage does not hold"):
        follow_plan(plan, trace_for_plan(model, call, plan))
