"""What each stage computes for itself: masks and tables that follow from the inputs cheaply, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

from lightning_fxpipe._compat.torch import FakeWorld, TorchDispatchMode
from lightning_fxpipe.errors import PartitionError
from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.cost import Chain
from lightning_fxpipe.planner.follow_plan import follow_plan
from lightning_fxpipe.planner.recompute import TRAFFIC_PER_MESSAGE
from lightning_fxpipe.planner.step_plan import make_plan
from lightning_fxpipe.stages.build import build_stages
from lightning_fxpipe.tracing.trace import trace_region
from tests.rotary import RotaryDecoder
from tests.staging import (
    BATCH,
    WIDTH,
    Counter,
    Double,
    Layers,
    assert_exact_at_every_cut,
    assert_stages_equal_whole,
    batch,
    call_of,
    chain_of,
    position_of,
)

# ------------------------------------------------------------------------------------------------ a decoder over four stages


def token_ids(size: int, length: int = 12) -> Tensor:
    """Zeros are padding."""
    return torch.randint(0, 40, (size, length), generator=torch.Generator().manual_seed(size))


def decoder(**options: Any) -> RotaryDecoder:
    """Embedding and head weigh as much as a block, so that four stages are two modules each."""
    torch.manual_seed(3)
    return RotaryDecoder(**({"vocab": 167, "depth": 6} | options))


def test_only_the_hidden_state_crosses_the_cuts_of_a_decoder() -> None:
    plan = make_plan(decoder(), token_ids(BATCH), num_stages=4)
    assert [[tensor.requires_grad for tensor in stage.outputs] for stage in plan.stages] == [[True], [True], [True], []]
    hidden = BATCH * 12 * 16 * 4
    assert [stage.output_bytes for stage in plan.stages] == [hidden] * 3 + [0]
    assert [stage.skipping_bytes for stage in plan.stages] == [0] * 4
    assert {tensor.module for tensor in plan.recomputed} == {"", "rotary"}
    assert len(plan.recomputed) == 3  # cosines, sines and the mask
    assert "Recomputed in each stage that uses them instead of sent: values of rotary, (root)" in " ".join(str(plan).split())


@pytest.mark.parametrize(("table", "is_cheap"), [(torch.sign, True), (torch.argsort, False)], ids=["cheap", "not cheap"])
def test_cheap_value_that_only_the_last_stage_uses_is_not_sent(table: Callable[[Tensor], Tensor], is_cheap: bool) -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        k = table(x)
        return m.d(m.c(m.b(m.a(x)))) + k

    plan = make_plan(Layers(run), batch(), num_stages=4)
    num_bytes = 0 if is_cheap else BATCH * WIDTH * 8
    assert [stage.skipping_bytes for stage in plan.stages] == [num_bytes, 0, 0, 0]
    assert [stage.output_bytes - stage.skipping_bytes for stage in plan.stages] == [96, 96, 96, 0]
    assert [tensor.stages for tensor in plan.recomputed] == ([(3,)] if is_cheap else [])


def test_buffers_are_held_by_the_stages_that_recompute_from_them() -> None:
    plan = make_plan(decoder(), token_ids(BATCH), num_stages=4)
    using = tuple(stage.index for stage in plan.stages if any("blocks" in fqn for fqn in stage.fqns))
    assert len(using) > 1
    assert plan.stages_of("rotary.inv_freq") == plan.stages_of("later") == using


@pytest.mark.parametrize("opened", [(), ("rotary",), None], ids=["whole", "rotary opened", "all opened"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_stages_of_a_decoder_equal_the_whole(opened: Any, training: bool) -> None:
    model = decoder(depth=3).double().train(training)
    chain = chain_of(model, token_ids(BATCH), opened=opened)
    legal = [site.position for site in chain.sites[:-1] if site.obstacle is None and site.position % 4 == 0]
    for size in (BATCH, 7):
        assert_stages_equal_whole(Assignment(chain=chain, cuts=tuple(legal)), token_ids(size))


@pytest.mark.parametrize("opened", [(), ("rotary",)], ids=["whole", "opened"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_of_a_long_context_are_recomputed_in_any_precision(opened: Any, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = decoder(dim=256, depth=2, context=4096).to(dtype)
    chain = chain_of(model, token_ids(2, length=4096), opened=opened)
    for site in chain.sites[:-1]:
        assert [node.meta["val"].requires_grad for node in site.crossing] in ([], [True]), site


def test_plan_is_followed_by_graphs_for_evaluation_and_of_other_shapes() -> None:
    plan = make_plan(decoder(), token_ids(BATCH), num_stages=4)
    for training, ids in ((False, token_ids(3)), (True, token_ids(5, length=9)), (False, token_ids(2, length=16))):
        model = decoder().double().train(training)
        assignment = follow_plan(plan, trace_region(model, call_of(ids), opened=plan.opened))
        assert [len(assignment.boundary(stage)) for stage in range(3)] == [1, 1, 1]
        for stage in plan.stages:
            assert assignment.fqns(stage.index) <= set(stage.fqns)
        assert_stages_equal_whole(assignment, ids)


def test_what_a_plan_keeps_in_one_stage_is_sent_from_there() -> None:
    # As with a plan made by hand, or from a graph in which the tables were not worth recomputing.
    plan = make_plan(decoder(), token_ids(BATCH), num_stages=4)
    first = plan.stages_of("later")[0]
    stages = tuple(
        replace(stage, fqns=tuple(fqn for fqn in stage.fqns if stage.index == first or fqn not in ("later", "rotary.inv_freq")))
        for stage in plan.stages
    )
    model = decoder().double()
    assignment = follow_plan(replace(plan, stages=stages), trace_region(model, call_of(token_ids(3)), opened=plan.opened))
    assert {len(assignment.boundary(stage)) for stage in range(first, 3)} & {4}
    assert_stages_equal_whole(assignment, token_ids(3))


def test_buffer_that_is_changed_may_not_be_held_by_several_stages() -> None:
    class Stepping(Layers):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.steps.add_(1)
            mask = (x > 0) * self.steps
            return self.c(self.b(self.a(x) * mask) * mask) * mask

    model = Stepping(lambda m, x: x)
    model.register_buffer("steps", torch.ones(WIDTH))
    plan = make_plan(model.eval(), batch(), num_stages=3)
    assert len(plan.stages_of("steps")) > 1
    with pytest.raises(PartitionError, match="changes a tensor in place that the plan stores in several stages"):
        follow_plan(plan, trace_region(model.train(), call_of(batch()), opened=plan.opened))


# --------------------------------------------------------------------------------------------------- what may be recomputed


def result_of(chain: Chain, index: int = -1) -> Any:
    return chain.traced.output_node.args[0][index]


def run_with(mask: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Any]:
    """Uses ``mask(module, input, hidden)`` after each layer, and returns it last."""

    def run(m: Any, x: Tensor) -> Any:
        h = m.a(x)
        k = mask(m, x, h)
        return m.d(m.c(m.b(h * k) * k) * k), k

    return run


def is_recomputed(mask: Callable[[Any, Tensor, Tensor], Tensor], opened: Any = (), **children: Any) -> bool:
    """Whether the mask is, after a check that stages equal the whole model either way."""
    model = Layers(run_with(mask), **children).double()
    x = batch().double().round()
    chain = chain_of(model, x, opened=opened)
    legal = [site.position for site in chain.sites[:-1] if site.obstacle is None]
    for cuts in [*((position,) for position in legal), tuple(legal)]:
        assert_stages_equal_whole(Assignment(chain=chain, cuts=cuts), x)
    return result_of(chain) in chain.recomputation.nodes


class Table(nn.Module):
    """A module without parameters, to be changed by a test."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x > 0) * self.scale


def test_module_without_parameters_is_recomputed() -> None:
    assert is_recomputed(lambda m, x, h: m.table(x), table=Table())
    assert is_recomputed(lambda m, x, h: m.act(x), act=nn.Sequential(nn.ReLU(), nn.Identity()))


class CountingInPython(Table):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Caching(Table):
    def __init__(self) -> None:
        super().__init__()
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.cache.append(x)
        return super().forward(x)


class TrainingDependent(Table):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if self.training else 1.0)


class Frozen(Table):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight


class ReadingAnother(Table):
    """Has somebody else's parameter out of sight."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.__dict__["owner"] = [owner]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.__dict__["owner"][0].weight.detach()[0]


class LookingAtValues(Table):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if float(x.sum()) > 1e9 else 1)


class DrawingInPython(Table):
    def forward(self, x: Tensor) -> Tensor:
        import random

        return super().forward(x) * (2 if random.random() > 2 else 1)


@pytest.mark.parametrize(
    "module", [CountingInPython(), Caching(), TrainingDependent(), Frozen(), LookingAtValues(), DrawingInPython(), Counter()]
)
def test_module_with_a_state_or_an_effect_is_called_once(module: nn.Module) -> None:
    assert not is_recomputed(lambda m, x, h: m.table(x), table=module)


def test_module_that_reads_a_parameter_out_of_sight_is_called_once() -> None:
    chain = chain_of(Layers(run_with(lambda m, x, h: m.table(x)), table=ReadingAnother(nn.Linear(WIDTH, WIDTH))), batch())
    assert result_of(chain) not in chain.recomputation.nodes


def test_module_with_hooks_is_called_once() -> None:
    table = nn.Sequential(Table())
    table[0].register_forward_hook(lambda *_: None)
    assert not is_recomputed(lambda m, x, h: m.table(x), table=table)


def test_dropout_is_recomputed_where_it_does_nothing() -> None:
    model = Layers(run_with(lambda m, x, h: F.dropout(x, 0.5, m.training)))
    for training in (True, False):
        chain = chain_of(model.train(training), batch())
        assert (result_of(chain) in chain.recomputation.nodes) == (not training)


@wrap_torch_function(lambda x: (x,))
def of_the_users_own(x: Tensor) -> Tensor:
    return x * 2


def _data_dependent_size(m: Any, x: Tensor, h: Tensor) -> Tensor:
    return x * x[x[:, 0] > 0].shape[0]


def _changed_by_a_later_layer(m: Any, x: Tensor, h: Tensor) -> Tensor:
    k = x * 2
    k.mul_(h.detach().round())
    return k


@pytest.mark.parametrize(
    "mask",
    [
        lambda m, x, h: h.detach(),
        lambda m, x, h: torch.rand(WIDTH),
        lambda m, x, h: torch.randn_like(x),
        lambda m, x, h: torch.bernoulli(x.abs().clamp(0, 1)),
        lambda m, x, h: x.sort(dim=1, stable=True).values,
        lambda m, x, h: torch.linalg.qr(x).R[:1],
        lambda m, x, h: Double.apply(x, 2.0)[0],
        lambda m, x, h: of_the_users_own(x),
        lambda m, x, h: x * m.frozen.weight[0],
        _data_dependent_size,
        _changed_by_a_later_layer,
    ],
    ids=[
        *("detached", "random", "random like", "bernoulli", "sorted", "decomposition"),
        *("autograd function", "user's function", "frozen parameter", "size that depends on data", "changed later"),
    ],
)
def test_computed_once(mask: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    assert not is_recomputed(mask, frozen=nn.Linear(WIDTH, WIDTH).requires_grad_(False))


@pytest.mark.parametrize(
    "mask",
    [
        lambda m, x, h: (x > 0).double(),
        lambda m, x, h: torch.zeros_like(h) + 2,
        lambda m, x, h: torch.zeros_like(h[:, :1].detach() * x),
        lambda m, x, h: h.new_ones(h.shape[0], 1) * 3,
        lambda m, x, h: torch.arange(x.shape[0], dtype=x.dtype)[:, None] % 3,
        lambda m, x, h: torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=x.dtype),
        lambda m, x, h: m.table * 2,
        lambda m, x, h: x.t().contiguous().t().abs(),
        lambda m, x, h: x[:, :1],
        lambda m, x, h: (
            torch.full_like(x, 2.0).masked_fill_(x > 0, 3.0).index_fill_(1, torch.tensor([0]), 1.0)
            if False
            else torch.full_like(x, 2.0).masked_fill_(x > 0, 3.0)
        ),
    ],
    ids=[
        "compare",
        "like what trains",
        "like a part of it",
        "new",
        "positions",
        "written out",
        "plain attribute",
        "transposed",
        "view",
        "in place",
    ],
)
def test_recomputed(mask: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    assert is_recomputed(mask, table=torch.arange(float(WIDTH)).double())


def test_stage_without_the_tensor_whose_kind_is_taken_over_makes_one() -> None:
    chain = chain_of(Layers(run_with(lambda m, x, h: torch.ones_like(h))), batch())
    cuts = tuple(position_of(chain, name) for name in "ab")
    stages = build_stages(Assignment(chain=chain, cuts=cuts))
    assert [[node.name for node in stage.boundary_in] for stage in stages] == [[], ["a"], ["b"]]
    made = [node for node in stages[2].module.graph.nodes if node.target is torch.empty]
    assert [node.users for node in made]
    assert stages[2].region_inputs == ()  # what it receives tells the batch size
    assert not [node for node in stages[1].module.graph.nodes if node.target is torch.empty]  # it has the tensor itself


# ------------------------------------------------------------------------------------------------------------------- price


def test_reading_much_for_little_is_done_once() -> None:
    # The sum over all rows has no more elements than one row; the price of a message is not enough for so many.
    def recomputed(rows: int) -> bool:
        model = Layers(run_with(lambda m, x, h: x.sum(0, keepdim=True)))
        chain = chain_of(model, torch.randn(rows, WIDTH))
        return result_of(chain) in chain.recomputation.nodes

    limit = TRAFFIC_PER_MESSAGE // (4 * WIDTH)
    assert recomputed(limit)
    assert not recomputed(limit + 100)


def test_wide_product_is_computed_once_and_narrow_product_by_each_stage() -> None:
    def recomputed(inner: int) -> bool:
        def mask(m: Any, x: Tensor, h: Tensor) -> Tensor:
            return (m.left @ m.right)[:1, :WIDTH] * 2 + (m.left @ m.right).sum() * 0

        model = Layers(run_with(mask), left=torch.ones(400, inner), right=torch.ones(inner, 400))
        chain = chain_of(model, batch())
        matmul = next(node for node in chain.traced.graph.nodes if node.name == "matmul")
        return matmul in chain.recomputation.nodes

    assert recomputed(1)
    assert not recomputed(100)


def test_cheap_value_is_recomputed_together_with_what_it_follows_from() -> None:
    model = Layers(run_with(lambda m, x, h: ((x > 0).double() * 2 - 1).float()))
    chain = chain_of(model, batch())
    stages = build_stages(Assignment(chain=chain, cuts=(position_of(chain, "a"), position_of(chain, "c"))))
    for stage in stages[1:]:
        names = [node.name for node in stage.module.graph.nodes]
        assert {"gt", "double", "mul", "sub", "float_1"} <= set(names)
    assert not {"gt", "double"} & {node.name for node in stages[0].module.graph.nodes}  # which does not use it


def test_cut_after_a_recomputed_value_is_no_cut_of_its_own() -> None:
    model = Layers(run_with(lambda m, x, h: ((x > 0).double() * 2 - 1).float()))
    with pytest.raises(PartitionError, match="6 places for a cut"):  # a, mul, b, mul, c, mul and d: seven calls
        make_plan(model, batch(), num_stages=9)


# --------------------------------------------------------------------------------------------------------------- obstacles


def test_what_could_not_cross_is_no_obstacle_where_it_need_not() -> None:
    def mask(m: Any, x: Tensor, h: Tensor) -> Tensor:
        base = x.t() * 2  # not contiguous, and changed through a view while both are alive
        part = base[:2]
        m.b(h)
        part.add_(1)
        return base.t()

    chain = assert_exact_at_every_cut(Layers(run_with(mask)))
    assert {site.obstacle for site in chain.sites} == {None}


# ------------------------------------------------------------------------------------------------------------------ canary


def test_dispatch_mode_sees_the_operators_of_a_call_on_fakes_with_their_tags() -> None:
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with FakeWorld().active(), Watch():
        x = torch.zeros(3, 4)
        F.dropout(x[0] + 1, 0.5, True)
    zeros, select, add, dropout = (func for func in seen if func.namespace == "aten")
    assert [str(func).split(".")[:2] for func in (zeros, select, add)] == [
        ["aten", name] for name in ("zeros", "select", "add")
    ]
    assert select.is_view
    assert not add.is_view
    assert torch.Tag.pointwise in add.tags
    assert torch.Tag.nondeterministic_seeded in dropout.tags
