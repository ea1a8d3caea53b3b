"""Weights of units, bytes across cuts, and the places where in-place changes forbid a cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lightning_fxpipe.planner.cost import Chain, build_chain, canonical_fqns
from lightning_fxpipe.pytree.sizes import tensor_bytes
from lightning_fxpipe.tracing.recordable import RegionCall
from lightning_fxpipe.tracing.trace import trace_region
from tests.models import make_model, make_samples

BATCH = 4
FLOAT = 4  # bytes


def chain_of(model: nn.Module, *args: Tensor, opened: Any = None) -> Chain:
    call = RegionCall(path="", args=args, kwargs={}, batch_size=args[0].shape[0])
    return build_chain(trace_region(model, call, opened=opened))


def batch(width: int = 6) -> Tensor:
    return torch.randn(BATCH, width, generator=torch.Generator().manual_seed(0))


def crossing(chain: Chain) -> list[list[str]]:
    """Names of what crosses after each unit, the region's end included."""
    return [[node.name for node in site.crossing] for site in chain.sites]


def illegal(chain: Chain) -> dict[str, str]:
    """Obstacles, by the name of the call before the cut."""
    return {
        unit.nodes[0].name: site.obstacle
        for unit, site in zip(chain.units, chain.sites, strict=True)
        if site.obstacle is not None
    }


class Layers(nn.Module):
    """``a`` to ``d``, used as ``run`` says."""

    def __init__(self, run: Callable[[Any, Tensor], Any], width: int = 6) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(width, width) for _ in range(4))
        self.run = run
        self.build()

    def build(self) -> None:
        """Adds what the subclass needs."""

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


# ------------------------------------------------------------------------------------------------------------ weights


class HandComputable(nn.Module):
    """6 -> 8 -> (5, 3); the first result is used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(8))
        self.out = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        left, right = self.out(h * self.scale).split([5, 3], dim=1)
        mask = left > 0
        return torch.cat((left * mask, right), dim=1) + h


def test_chain_of_a_hand_computable_model() -> None:
    chain = chain_of(HandComputable(), batch())
    assert [(unit.path, unit.num_parameters) for unit in chain.units] == [
        ("inner.0", 6 * 8 + 8),
        ("inner.1", 0),
        ("", 8),  # h * scale
        ("out", 8 * 8),
        ("", 0),  # split, with the two nodes that take its result apart
        ("", 0),  # left > 0
        ("", 0),  # left * mask
        ("", 0),  # cat
        ("", 0),  # + h
    ]
    assert [[node.name for node in unit.nodes] for unit in chain.units][4] == ["split", "getitem", "getitem_1"]
    assert [unit.tensor_fqns for unit in chain.units[:4]] == [
        {"inner.0.weight", "inner.0.bias"},
        set(),
        {"scale"},
        {"out.weight"},
    ]
    assert crossing(chain) == [
        ["inner_0"],
        ["inner_1"],
        ["inner_1", "mul"],
        ["inner_1", "out"],
        ["inner_1", "getitem", "getitem_1"],
        ["inner_1", "getitem", "getitem_1", "gt"],
        ["inner_1", "getitem_1", "mul_1"],
        ["inner_1", "cat"],
        ["add"],
    ]
    eight, five, three = (BATCH * width * FLOAT for width in (8, 5, 3))
    mask = BATCH * 5  # one byte for each bool
    assert [site.num_bytes for site in chain.sites] == [
        eight,
        eight,
        2 * eight,
        2 * eight,
        eight + five + three,
        eight + five + three + mask,
        eight + three + five,
        2 * eight,
        eight,
    ]
    assert [site.position for site in chain.sites] == list(range(9))
    assert illegal(chain) == {}


def test_inputs_and_parameters_never_cross_but_their_results_do() -> None:
    # Every rank has the batch, and every stage its parameters.
    model = Layers(lambda m, x: m.b(m.a(x) + x) @ m.a.weight + x)
    assert crossing(chain_of(model, batch())) == [["a"], ["add"], ["b"], ["matmul"], ["add_1"]]


def test_nothing_crosses_before_the_first_unit() -> None:
    site = chain_of(Layers(lambda m, x: m.a(x)), batch()).site(-1)
    assert (site.position, site.crossing, site.num_bytes, site.obstacle) == (-1, (), 0, None)


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet", "unet"])
@pytest.mark.parametrize("opened", [(), None], ids=["whole", "opened"])
def test_weights_of_all_units_sum_to_the_parameters_of_the_model(name: str, opened: Any) -> None:
    model = make_model(name)
    chain = chain_of(model, make_samples(name, 2)[0], opened=opened)
    assert sum(unit.num_parameters for unit in chain.units) == sum(parameter.numel() for parameter in model.parameters())
    names = set(canonical_fqns(model).values())
    assert set().union(*(unit.tensor_fqns for unit in chain.units)) == names


def test_shared_parameter_counts_where_it_is_first_used_and_is_named_by_every_user() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 6)
            self.body = nn.Linear(6, 6)
            self.head = nn.Linear(6, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.body(self.embed(x)))) + self.embed.weight.sum()

    chain = chain_of(Tied(), torch.arange(BATCH))
    weights = {unit.nodes[0].name: unit.num_parameters for unit in chain.units}
    assert weights == {"embed": 60, "body": 42, "body_1": 0, "head": 0, "sum_1": 0, "add": 0}
    users = {unit.nodes[0].name for unit in chain.units if "embed.weight" in unit.tensor_fqns}
    assert users == {"embed", "head", "sum_1"}
    assert not any("head.weight" in unit.tensor_fqns for unit in chain.units)


def test_every_name_of_a_tensor_leads_to_its_first() -> None:
    model = make_model("gpt")
    model.register_buffer("mask", torch.ones(2))
    model.blocks[0].register_buffer("same", model.mask)
    names = canonical_fqns(model)
    assert names["head.weight"] == names["tok.weight"] == "tok.weight"
    assert names["blocks.0.same"] == names["mask"] == "mask"
    assert names["blocks.1.proj.bias"] == "blocks.1.proj.bias"


def test_bytes_follow_dtype_and_the_batch_that_was_traced() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        return m.b((m.a(x).double() > 0).long().float())

    sites = chain_of(Layers(run), batch()).sites
    assert [site.num_bytes for site in sites[:4]] == [BATCH * 6 * size for size in (4, 8, 1, 8)]
    assert tensor_bytes(torch.empty(())) == 4
    assert tensor_bytes(torch.empty(3, 5, dtype=torch.bfloat16)) == 30


def test_view_costs_what_it_shows_not_what_it_keeps() -> None:
    # Copies are sent: of an expanded row every element, of a slice only what it has.
    sites = chain_of(Layers(lambda m, x: m.b(m.a(x)[:1].expand(BATCH, 6)) + m.a(x)[:, :1]), batch()).sites
    assert [site.num_bytes for site in sites[:3]] == [BATCH * 6 * FLOAT, 6 * FLOAT, BATCH * 6 * FLOAT]


def test_module_with_several_outputs_is_one_unit() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(6, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            output, (hidden, _) = self.rnn(x)
            return output.sum(1) + hidden[0]

    chain = chain_of(Net(), torch.randn(BATCH, 3, 6))
    rnn, output, pair, hidden = chain.units[0].nodes
    assert [node.args for node in (output, pair, hidden)] == [(rnn, 0), (rnn, 1), (pair, 0)]
    # The tuples stay behind, and of the unused cell state there is no node.
    assert chain.sites[0].crossing == (output, hidden)
    assert chain.sites[0].num_bytes == (BATCH * 3 * 6 + BATCH * 6) * FLOAT


# ---------------------------------------------------------------------------------------------------------- obstacles


def test_view_and_its_base_may_not_both_cross_before_an_in_place_change() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        base = m.a(x)
        view = base[:, :3]
        middle = m.b(x)
        base.add_(1)  # changes the view too
        return m.c(base) + view.sum() + middle

    chain = chain_of(Layers(run), batch())
    assert [unit.nodes[0].name for unit in chain.units][:4] == ["a", "getitem", "b", "add_"]
    obstacles = illegal(chain)
    assert set(obstacles) == {"getitem", "b"}
    assert re.fullmatch(r"the result of add_ \(.*test_cost.py:\d+\) changes two tensors in place that share.*", obstacles["b"])


def test_base_alone_may_cross_before_an_in_place_change() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        base = m.a(x)
        part = base[:, :3].sum()  # the view is gone before the cut
        middle = m.b(x)
        base.add_(1)
        return m.c(base) + part + middle

    chain = chain_of(Layers(run), batch())
    # Between the view and its last use both are alive, but not after it.
    assert set(illegal(chain)) == {"getitem"}


def test_view_alone_may_cross_before_an_in_place_change() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        view = m.a(x).view(-1, 3)
        view.add_(1)
        return m.c(view.view(-1, 6))

    assert illegal(chain_of(Layers(run), batch())) == {}


def test_view_and_base_may_both_cross_after_the_change() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        base = m.a(x)
        view = base[:, :3]
        base.add_(1)
        return m.c(base) + view.sum()

    chain = chain_of(Layers(run), batch())
    assert set(illegal(chain)) == {"getitem"}
    assert crossing(chain)[2] == ["getitem", "add_"]


def test_two_views_of_one_base_may_not_both_cross_before_a_change_of_either() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        left, right = m.a(x).view(BATCH, 2, 3).unbind(1)
        whole = m.b(x)
        left.add_(1)
        return m.c(torch.cat((left, right), 1)) + whole

    # torch forbids in-place changes of unbind's results where a gradient is needed.
    model = Layers(run).requires_grad_(False)
    model.c.requires_grad_(True)
    assert "b" in illegal(chain_of(model, batch()))


def test_change_of_a_copy_is_no_obstacle() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        h = m.a(x)
        copy = h.clone()
        copy.add_(1)
        F.relu(copy, inplace=True)
        return m.c(h) + copy

    assert illegal(chain_of(Layers(run), batch())) == {}


@pytest.mark.parametrize(("name", "opened"), [("mlp", None), ("gpt", ()), ("resnet", None), ("unet", None)])
def test_ordinary_models_may_be_cut_anywhere(name: str, opened: Any) -> None:
    assert illegal(chain_of(make_model(name), make_samples(name, 2)[0], opened=opened)) == {}


def test_block_of_a_transformer_may_be_cut_wherever_its_heads_are_not_transposed() -> None:
    chain = chain_of(make_model("gpt"), make_samples("gpt", 2)[0])
    transposed = ("permute", "unbind", "scaled_dot_product_attention", "transpose")
    assert all(name.rstrip("_0123456789") in transposed for name in illegal(chain))


class WithBuffers(Layers):
    def build(self) -> None:
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("table", torch.ones(6))
        self.bn = nn.BatchNorm1d(6)
        self.counter = Counter()


class Counter(nn.Module):
    """Changes its buffer on each call, and its result depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.calls


class CanonicalCut:
    """The sites between two calls, by the calls' names."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._position = {unit.nodes[0].name: i for i, unit in enumerate(chain.units)}

    def illegal_between(self, first: str, last: str) -> list[bool]:
        return [
            self._chain.sites[position].obstacle is not None for position in range(self._position[first], self._position[last])
        ]


def test_buffer_that_is_only_read_may_be_used_on_both_sides() -> None:
    def run(m: WithBuffers, x: Tensor) -> Tensor:
        return m.c(m.b(m.a(x) * m.table) * m.table)

    assert illegal(chain_of(WithBuffers(run), batch())) == {}


def test_buffer_changed_in_place_is_used_on_one_side_only() -> None:
    def run(m: WithBuffers, x: Tensor) -> Tensor:
        h = m.a(x) * m.steps  # read
        h = m.b(h)
        m.steps.add_(1)  # changed
        h = m.c(h)
        return m.d(h) * m.steps  # read again

    chain = chain_of(WithBuffers(run), batch())
    cut = CanonicalCut(chain)
    assert [unit.nodes[0].name for unit in chain.units] == ["a", "mul", "b", "add_", "c", "d", "mul_1"]
    assert cut.illegal_between("a", "mul") == [False]
    # Each rank has a copy of the buffer, and only one of them is changed.
    assert cut.illegal_between("mul", "mul_1") == [True] * 5
    assert "changes in place a tensor that both sides use" in (chain.sites[2].obstacle or "")


def test_region_input_changed_in_place_is_used_on_one_side_only() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        h = m.a(x)
        x.mul_(2)
        return m.c(m.b(h)) + x

    chain = chain_of(Layers(run), batch())
    assert CanonicalCut(chain).illegal_between("a", "add") == [True] * (len(chain.units) - 1)


def test_parameter_changed_in_place_is_used_on_one_side_only() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.b.weight.clamp_(-1, 1)
        return m.c(m.b(m.a(x)))

    chain = chain_of(Layers(run), batch())
    cut = CanonicalCut(chain)
    # `b` is a whole module, whose weights appear in no node of their own.
    assert cut.illegal_between("clamp_", "b") == [True, True]
    assert cut.illegal_between("b", "c") == [False]


@pytest.mark.parametrize(("module", "opened"), [("bn", None), ("counter", ()), ("counter", None)])
def test_module_that_changes_its_buffers_is_called_on_one_side_only(module: str, opened: Any) -> None:
    def run(m: WithBuffers, x: Tensor) -> Tensor:
        stateful = getattr(m, module)
        return m.c(stateful(m.b(stateful(m.a(x)))))

    chain = chain_of(WithBuffers(run), batch(), opened=opened)
    uses = [i for i, unit in enumerate(chain.units) if unit.path == module]
    # Its running statistics would go apart on two ranks. Its last nodes may compute on what it has read.
    last_change = max(i for i in uses if chain.units[i].nodes[0].op == "call_module" or "add_" in chain.units[i].nodes[0].name)
    obstacles = [site.obstacle is not None for site in chain.sites]
    assert last_change > min(uses)
    assert obstacles[min(uses) : last_change] == [True] * (last_change - min(uses))
    assert obstacles[: min(uses)] == [False] * min(uses)
    assert obstacles[max(uses)] is False


def test_buffer_of_a_whole_module_that_changes_it_is_read_on_the_same_side() -> None:
    def run(m: WithBuffers, x: Tensor) -> Tensor:
        h = m.bn(m.a(x))
        return m.c(m.b(h) * m.bn.running_mean)

    chain = chain_of(WithBuffers(run), batch())
    cut = CanonicalCut(chain)
    assert cut.illegal_between("bn", "mul") == [True, True]
    assert cut.illegal_between("mul", "c") == [False]


def test_functional_batch_norm_changes_its_running_statistics_too() -> None:
    def run(m: WithBuffers, x: Tensor) -> Tensor:
        def norm(h: Tensor) -> Tensor:
            return F.batch_norm(h, m.steps.expand(6).clone(), m.table, training=True)

        return m.c(norm(m.b(norm(m.a(x)))))

    chain = chain_of(WithBuffers(run), batch())
    norms = [i for i, unit in enumerate(chain.units) if unit.nodes[0].name.startswith("batch_norm")]
    assert [chain.sites[i].obstacle is not None for i in range(norms[0], norms[1])] == [True] * (norms[1] - norms[0])


def test_batch_norm_in_eval_mode_may_be_called_on_both_sides() -> None:
    def run(m: WithBuffers, x: Tensor) -> Tensor:
        return m.c(m.bn(m.b(m.bn(m.a(x)))))

    assert illegal(chain_of(WithBuffers(run).eval(), batch())) == {}


def test_tensor_whose_size_depends_on_data_does_not_cross() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        h = m.a(x)
        chosen = h[h[:, 0] > 0]
        return m.c(m.b(chosen).sum(0) + h)

    chain = chain_of(Layers(run), batch())
    sites = {unit.nodes[0].name: site.obstacle for unit, site in zip(chain.units, chain.sites, strict=True)}
    depends = [name for name, obstacle in sites.items() if obstacle]
    assert all("depends on data" in (sites[name] or "") for name in depends)
    assert "b" in depends
    assert "c" not in depends


def test_only_tensors_cross() -> None:
    for name in ("mlp", "gpt", "resnet", "unet"):
        chain = chain_of(make_model(name), make_samples(name, 3)[0])
        for site in chain.sites:
            assert all(isinstance(node, fx.Node) and isinstance(node.meta["val"], Tensor) for node in site.crossing)
