"""Stages run one after another equal the whole module bit for bit: outputs, gradients by FQN, buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.cost import canonical_fqns
from lightning_fxpipe.planner.follow_plan import follow_plan
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.step_plan import make_plan
from lightning_fxpipe.stages.build import TensorSpec, boundary_specs, build_stages
from lightning_fxpipe.tracing.trace import trace_region
from tests.models import make_model, make_samples
from tests.staging import (
    BATCH,
    WIDTH,
    Layers,
    assert_equal,
    assert_exact_at_every_cut,
    assert_stages_equal_whole,
    batch,
    call_of,
    chain_of,
    position_of,
    run_staged,
    run_whole,
)

MODELS = ("mlp", "gpt", "resnet", "unet")


@cache
def plan_of(name: str, num_stages: int) -> PartitionPlan:
    return make_plan(make_model(name), make_samples(name, BATCH)[0], num_stages=num_stages)


@cache
def assignment_of(name: str, num_stages: int, training: bool) -> Assignment:
    plan = plan_of(name, num_stages)
    model = make_model(name).train(training)
    return follow_plan(plan, trace_region(model, call_of(make_samples(name, BATCH)[0]), opened=plan.opened))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("batch_size", [BATCH, 7])
def test_stages_equal_the_whole_model(name: str, num_stages: int, training: bool, batch_size: int) -> None:
    assignment = assignment_of(name, num_stages, training)
    x = make_samples(name, batch_size)[0]
    whole = run_whole(assignment.chain.traced.root, [x])
    staged = run_staged(assignment, [x])
    assert_equal(staged, whole)
    assert staged.buffers.keys() == whole.buffers.keys()
    assert whole.gradients.keys() == {fqn for fqn, _ in make_model(name).named_parameters()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_every_legal_cut_of_the_finest_graph_is_exact(name: str, training: bool) -> None:
    model = make_model(name).train(training)
    x = make_samples(name, 3)[0]
    chain = chain_of(model, x)
    legal = [site.position for site in chain.sites[:-1] if site.obstacle is None]
    assert len(legal) == len(chain.units) - 1
    # One cut after the other costs one run for each; as many cuts at once as there are sites cost one run for all.
    assert_stages_equal_whole(Assignment(chain=chain, cuts=tuple(legal)), x)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_a_stage_are_the_models_own_under_their_own_names(name: str) -> None:
    assignment = assignment_of(name, 3, True)
    root = assignment.chain.traced.root
    own = dict(root.named_parameters(remove_duplicate=False))
    canonical = canonical_fqns(root)
    seen: set[str] = set()
    for stage in build_stages(assignment):
        found = dict(stage.module.named_parameters())
        assert all(parameter is own[fqn] for fqn, parameter in found.items())
        units = [u for position, u in enumerate(assignment.chain.units) if assignment.stage_of(position) == stage.index]
        used = {fqn for unit in units for fqn in unit.tensor_fqns} & {canonical[fqn] for fqn in own}
        assert {canonical[fqn] for fqn in found} == used
        buffers = dict(root.named_buffers())
        assert all(buffer is buffers[fqn] for fqn, buffer in stage.module.named_buffers())
        seen |= used
    assert seen == {fqn for fqn, _ in root.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_building_stages_leaves_the_model_as_it_was(name: str) -> None:
    assignment = assignment_of(name, 3, True)
    root = assignment.chain.traced.root
    before = [(path, id(module), dict(vars(module)), list(module.state_dict())) for path, module in root.named_modules()]
    build_stages(assignment)
    after = [(path, id(module), dict(vars(module)), list(module.state_dict())) for path, module in root.named_modules()]
    assert before == after


@pytest.mark.parametrize("name", MODELS)
def test_under_no_grad_the_stages_equal_the_whole_model(name: str) -> None:
    model = make_model(name).eval()
    x = make_samples(name, BATCH)[0]
    plan = plan_of(name, 3)
    with torch.no_grad():
        assignment = follow_plan(plan, trace_region(model, call_of(x), opened=plan.opened))
        nodes = [node for stage in range(2) for node in assignment.boundary(stage)]
        assert not any(node.meta["val"].requires_grad for node in nodes)
        other = make_samples(name, 6)[0]
        assert_equal(run_staged(assignment, [other]), run_whole(model, [other]))


def test_stage_can_be_built_where_other_stages_parameters_have_no_data() -> None:
    with torch.device("meta"):
        model = make_model("gpt")
    ids = make_samples("gpt", BATCH)[0]
    plan = plan_of("gpt", 3)
    assignment = follow_plan(plan, trace_region(model, call_of(ids), opened=plan.opened))
    assert [set(dict(stage.module.named_parameters())) for stage in build_stages(assignment)] == [
        set(dict(stage.module.named_parameters())) for stage in build_stages(assignment_of("gpt", 3, True))
    ]


# ------------------------------------------------------------------------------------ sizes, relays, inputs and results


def test_sizes_are_taken_from_tensors_and_never_cross_a_cut() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        b, w = x.shape
        h = m.b(m.a(x)).reshape(b * 2, w // 2)
        h = m.c(h.reshape(b, w)) + torch.arange(b)[:, None]
        return m.d(h[: b // 2]) * (b // 3) + torch.zeros(b // 2, w).fill_(b + 1)

    chain = assert_exact_at_every_cut(Layers(run), sizes=(BATCH, 6, 10))
    assert all(isinstance(node.meta["val"], Tensor) for site in chain.sites for node in site.crossing)
    legal = tuple(site.position for site in chain.sites[:-1] if site.obstacle is None)
    for stage in build_stages(Assignment(chain=chain, cuts=legal)):
        for node in stage.module.graph.nodes:
            # Every integer comes from a tensor of the same stage.
            if node.op == "call_method" and node.target == "size":
                assert node.args[0].op != "get_attr"
    # Some stage gets a region input only to learn its size: the reshaped tensor has 2b rows.
    cut = position_of(chain, "reshape")
    _, second = build_stages(Assignment(chain=chain, cuts=(cut,)))
    assert second.region_inputs == (0,)


@pytest.mark.parametrize(
    "use",
    [
        lambda h, b: h * (1 / b),
        lambda h, b: h * b**0.5,
        lambda h, b: h * (-b // 3),
        lambda h, b: h * (b % 3),
        lambda h, b: h * (b / 3),
        lambda h, b: h.flatten() / h.numel(),
        lambda h, b: h * round(b / 3),
        lambda h, b: h.unflatten(0, (b, 1)).squeeze(1)[: b - 1],
        lambda h, b: torch.eye(b) @ h,
        lambda h, b: h[:1].expand(b, WIDTH) + h,
        lambda h, b: h[:1].repeat(b, 1) + h,
        lambda h, b: F.pad(h, (0, 0, 0, b)),
    ],
    ids=["inverse", "root", "floordiv", "mod", "truediv", "numel", "round", "unflatten", "eye", "expand", "repeat", "pad"],
)
def test_arithmetic_with_sizes_is_exact_at_other_batch_sizes(use: Callable[[Tensor, Any], Tensor]) -> None:
    assert_exact_at_every_cut(Layers(lambda m, x: use(m.b(m.a(x)), x.shape[0])), sizes=(BATCH, 5))


def test_size_that_is_fixed_after_it_was_used_as_a_symbol() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        h = m.a(x) + torch.arange(x.shape[0])[:, None]
        return m.b(h) * int(x.shape[0])

    assert_exact_at_every_cut(Layers(run), sizes=(BATCH,))


def test_relay_is_passed_on_as_it_is() -> None:
    model = Layers(lambda m, x: m.d(m.c(m.b(skip := m.a(x)))) + skip)
    chain = chain_of(model, batch())
    cuts = tuple(position_of(chain, name) for name in "abc")
    stages = build_stages(Assignment(chain=chain, cuts=cuts))
    assert [[node.name for node in stage.boundary_in] for stage in stages] == [[], ["a"], ["a", "b"], ["a", "c"]]
    h, skip = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    outputs = stages[2].module(skip, h)
    assert outputs[0] is skip
    assert stages[2].module.graph.find_nodes(op="call_module", target="c")
    assert_stages_equal_whole(Assignment(chain=chain, cuts=cuts), batch(9))


def test_stage_that_computes_nothing_relays_everything() -> None:
    chain = chain_of(Layers(lambda m, x: m.d(m.a(x)) + x), batch())
    for cuts in [(0, 0), (-1, 0), (0, 2), (2, 2), (-1, -1), (-1, 2)]:
        assert_stages_equal_whole(Assignment(chain=chain, cuts=cuts), batch(5))


def test_inputs_are_given_to_the_stages_that_use_them_only() -> None:
    class Three(Layers):
        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Any:
            return self.b(self.a(x) + z) + z

    x, y, z = batch(), batch() + 1, batch() + 2
    chain = chain_of(Three(lambda m, x: x), x, y, z)
    assignment = Assignment(chain=chain, cuts=(0, 1))
    assert [stage.region_inputs for stage in build_stages(assignment)] == [(0,), (2,), (2,)]
    assert_stages_equal_whole(assignment, x, y, z)


def test_result_of_an_early_stage_an_input_and_a_parameter_may_be_returned() -> None:
    def run(m: Layers, x: Tensor) -> Any:
        early = m.a(x)
        return {"early": early, "late": m.c(m.b(early)), "input": x, "none": None, "count": 3, "own": m.c.bias}

    assert_exact_at_every_cut(Layers(run))


def test_parameter_that_another_stage_holds_may_be_returned() -> None:
    assert_exact_at_every_cut(Layers(lambda m, x: (m.b(m.a(x)), m.a.weight)))


def test_parameter_used_in_several_stages_has_the_sum_of_their_gradients() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        return F.linear(m.b(m.a(x)), m.a.weight)

    chain = assert_exact_at_every_cut(Layers(run))
    stages = build_stages(Assignment(chain=chain, cuts=(0,)))
    model = chain.traced.root
    assert isinstance(model, Layers)
    assert dict(stages[0].module.named_parameters())["a.weight"] is model.a.weight
    assert dict(stages[1].module.named_parameters())["a.weight"] is model.a.weight


def test_whole_module_and_its_own_parameter_in_one_stage() -> None:
    assert_exact_at_every_cut(Layers(lambda m, x: F.linear(m.b(m.a(x)), m.b.weight, m.b.bias)))


def test_module_called_twice_runs_in_both_stages() -> None:
    assert_exact_at_every_cut(Layers(lambda m, x: m.b(torch.tanh(m.a(m.b(x))))))


def test_what_crosses_is_described_as_it_is() -> None:
    """The next stage makes its buffers by this, and sends gradients back for what trains."""
    graph = fx.Graph()
    tensors = [torch.ones(2, 3, requires_grad=True), torch.ones(4), torch.ones(1, dtype=torch.int64)]
    nodes = tuple(graph.placeholder(f"x{number}") for number in range(len(tensors)))
    for node, tensor in zip(nodes, tensors, strict=True):
        node.meta["val"] = tensor
    assert [(spec.shape, spec.dtype, spec.requires_grad) for spec in boundary_specs(nodes, {})] == [
        ((2, 3), torch.float32, True),
        ((4,), torch.float32, False),
        ((1,), torch.int64, False),
    ]


@pytest.mark.parametrize("order", [None, (1, 0, 2), (0, 2, 1), (2, 1, 0)])
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 3, 4), (2, 1, 1), (0, 3, 2)])
def test_a_tensor_keeps_its_layout_when_it_is_sent(order: tuple[int, ...] | None, shape: tuple[int, ...]) -> None:
    """A mask of dropout follows the memory: in another layout other entries would be zero than on one device."""
    spec = TensorSpec(shape=shape, dtype=torch.float32, requires_grad=False, memory_order=order)
    received = spec.empty(torch.device("cpu"))
    inside = spec.packed(received)
    assert inside.is_contiguous()
    assert inside.data_ptr() == received.data_ptr()  # what is received into
    sent = torch.randn(shape)
    inside.copy_(spec.packed(sent))
    assert torch.equal(received, sent)


def test_the_layout_of_a_boundary_is_that_of_the_traced_tensor() -> None:
    graph = fx.Graph()
    tensors = [torch.ones(2, 3, 4), torch.ones(2, 4, 3).transpose(1, 2), torch.ones(1, 5), torch.ones(5, 1).expand(5, 2)]
    nodes = tuple(graph.placeholder(f"x{number}") for number in range(len(tensors)))
    for node, tensor in zip(nodes, tensors, strict=True):
        node.meta["val"] = tensor
    assert [spec.memory_order for spec in boundary_specs(nodes, {})] == [None, (0, 2, 1), None, None]
