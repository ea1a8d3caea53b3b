"""Any partition of any program equals the whole module bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, assume, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_fxpipe.planner.assignment import Assignment
from tests.staging import (
    Counter,
    assert_stages_equal_whole,
    call_of,
    chain_of,
    run_whole,
)
from tests.traces import covers

# Values are whole numbers in float64, weights -1, 0 and 1, and everything that grows is clamped: all sums are exact, so that
# no order of additions can make a difference, however often a value or a parameter is used.


class Block(nn.Module):
    """A module with an inner structure, an in-place ReLU and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return (self.relu(self.inner(x)) + x).clamp(-8, 8)


class Fork(nn.Module):
    """Several results, one of them not a tensor, one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"left": x * self.weight, "none": None, "pair": (x[:, :2], x.argsort(dim=1, stable=True)), "depth": 2}


class Positions(nn.Module):
    """Two tables without parameters; of its first argument only the dtype and the number of columns matter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.arange(4), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (ids.cumsum(0) + self.steps) % 5
        return angles.to(x.dtype), (angles[:, :1] * torch.ones(x.shape[1])).to(x.dtype)


class Calendar(nn.Module):
    """A table that is another after each call: as in training, so in a pipeline it is made once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("day", torch.zeros(4))

    def forward(self, ids: Tensor) -> Tensor:
        self.day.add_(1)
        return (ids + self.day) % 3


class Program(nn.Module):
    """Runs a list of instructions on registers; each gives an operation and the registers that it takes."""

    def __init__(self, instructions: Sequence[tuple[str, int, int]], returned: Sequence[int], seed: int) -> None:
        super().__init__()
        self.instructions, self.returned = tuple(instructions), tuple(returned)
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.linears[2].weight = self.linears[0].weight
        self.block, self.fork, self.counter = Block(), Fork(), Counter()
        self.positions, self.calendar = Positions(), Calendar()
        self.embedding = nn.Embedding(4, 4)
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.weight_again = self.linears[1].weight
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("steps", torch.zeros(()))
        self.double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))

    def __repr__(self) -> str:
        return f"Program({self.instructions}, {self.returned})"

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Any]:
        floats: list[Tensor] = [x]  # (batch, 4)
        integers: list[Tensor] = [ids]  # (batch, 4), from 0 to 3
        masks: list[Tensor] = [(ids > 1) * 2.0 - x]  # (batch, 4), without parameters in their history
        for name, first, second in self.instructions:
            a, b = floats[first % len(floats)], floats[second % len(floats)]
            i = integers[second % len(integers)]
            if name in MASKS:
                masks.append(MASKS[name](self, x, ids, masks[second % len(masks)], a))
                continue
            if name in MASK_USES:
                floats.append(MASK_USES[name](a, masks[second % len(masks)]).clamp(-8, 8))
                continue
            result = OPERATIONS[name](self, a, b, i)
            for value in result if isinstance(result, tuple) else (result,):
                (floats if value.dtype == torch.float64 else integers).append(value)
        chosen = [floats[index % len(floats)] for index in self.returned]
        return {"last": floats[-1], "chosen": (chosen, None), "integers": integers[-1], "mask": masks[-1], "name": "program"}


def _in_place(change: Callable[[Tensor], Any]) -> Callable[[Program, Tensor, Tensor, Tensor], Tensor]:
    def operation(m: Program, a: Tensor, b: Tensor, i: Tensor) -> Tensor:
        change(a)
        return a

    return operation


def _halves(m: Program, a: Tensor, b: Tensor, i: Tensor) -> Tensor:
    left, right = a.chunk(2, dim=1)
    return torch.cat((right, left * 2), 1)


def _no_grad(m: Program, a: Tensor, b: Tensor, i: Tensor) -> Tensor:
    with torch.no_grad():
        return m.linears[0](a).clamp(-8, 8)


def _forked(m: Program, a: Tensor, b: Tensor, i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out = m.fork(a)
    left, order = out["pair"]
    return out["left"] * out["depth"], torch.cat((left, b[:, 2:]), 1), order


def _sorted(m: Program, a: Tensor, b: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
    values, order = torch.sort(a, dim=1, stable=True)
    return values, order


def _count_steps(m: Program, a: Tensor, b: Tensor, i: Tensor) -> Tensor:
    m.steps.add_(1)
    return (a + m.steps).clamp(-8, 8)


def _transposed_copy_changed(m: Program, a: Tensor, b: Tensor, i: Tensor) -> Tensor:
    transposed = a.t()
    copy = transposed.contiguous()
    copy.add_(1)
    return (transposed + copy).t().clamp(-8, 8)


def _accumulate(m: Program, a: Tensor, b: Tensor, i: Tensor) -> Tensor:
    total = torch.zeros_like(a)
    total += a
    total[:, 1] += b[:, 0]
    return total.clamp(-8, 8)


def _set_item(m: Program, a: Tensor, b: Tensor, i: Tensor) -> Tensor:
    a[:, 0] = b[:, 1]
    return a


def _in_place_on_a_view(m: Program, a: Tensor, b: Tensor, i: Tensor) -> Tensor:
    a[:, 1:3].add_(1)
    return a


# Each takes the module, two float registers and an integer one; the float results go to the float registers, and so on.
OPERATIONS: dict[str, Callable[[Program, Tensor, Tensor, Tensor], Any]] = {
    # Modules and parameters, several of them shared.
    "linear 0": lambda m, a, b, i: m.linears[0](a).clamp(-8, 8),
    "linear 1": lambda m, a, b, i: m.linears[1](a).clamp(-8, 8),
    "linear 2, tied to 0": lambda m, a, b, i: m.linears[2](a).clamp(-8, 8),
    "block": lambda m, a, b, i: m.block(a),
    "fork": _forked,
    "functional linear": lambda m, a, b, i: F.linear(a, m.weight).clamp(-8, 8),
    "functional linear with a shared weight": lambda m, a, b, i: F.linear(a, m.weight_again, m.linears[0].bias).clamp(-8, 8),
    "embedding": lambda m, a, b, i: m.embedding(i).sum(1).clamp(-8, 8) + a,
    # Branches.
    "add": lambda m, a, b, i: (a + b).clamp(-8, 8),
    "sub": lambda m, a, b, i: (a - b).clamp(-8, 8),
    "mul": lambda m, a, b, i: (a * b).clamp(-8, 8),
    "maximum": lambda m, a, b, i: torch.maximum(a, b),
    "where": lambda m, a, b, i: torch.where(i > 1, a, b),
    "masked": lambda m, a, b, i: a * (b > 0),
    # Shapes, and sizes that follow the batch.
    "halves": _halves,
    "stack": lambda m, a, b, i: torch.stack((a, b)).unbind(0),
    "reshape": lambda m, a, b, i: a.reshape(a.shape[0] * 2, 2).flip(1).reshape(a.shape[0], 4),
    "view": lambda m, a, b, i: a.contiguous().view(-1).view(b.shape[0], 4),
    "arange": lambda m, a, b, i: a + torch.arange(a.shape[0], dtype=a.dtype)[:, None].clamp(max=3),
    "times batch": lambda m, a, b, i: (a * (b.shape[0] // 2)).clamp(-8, 8),
    "roll": lambda m, a, b, i: torch.cat((a[a.shape[0] // 2 :], a[: b.shape[0] // 2])),
    "expand": lambda m, a, b, i: a[:1].expand(b.shape[0], 4),
    "row": lambda m, a, b, i: a + b.sum(0).clamp(-8, 8),
    "scalar": lambda m, a, b, i: a + b.sum().clamp(-8, 8),
    "transposed": lambda m, a, b, i: a.t().contiguous().t(),
    "fixed batch": lambda m, a, b, i: (a * int(a.shape[0])).clamp(-8, 8),
    # Integers.
    "sort": _sorted,
    "gather": lambda m, a, b, i: a.gather(1, i),
    "argsort": lambda m, a, b, i: a.argsort(dim=1, stable=True),
    "compare": lambda m, a, b, i: (a > b).long() + (i > 1),
    # Without gradient, with random numbers, with buffers.
    "detach": lambda m, a, b, i: a.detach(),
    "no_grad": _no_grad,
    "dropout": lambda m, a, b, i: F.dropout(a.clone(memory_format=torch.contiguous_format), 0.5, m.training),
    "table": lambda m, a, b, i: (a * m.table).clamp(-8, 8),
    "count steps": _count_steps,
    "counter": lambda m, a, b, i: m.counter(a).clamp(-8, 8),
    # In place, on what may have other names or cross a cut.
    "relu_": _in_place(lambda a: F.relu(a, inplace=True)),
    "add_": _in_place(lambda a: a.add_(1)),
    "neg_": _in_place(lambda a: a.neg_()),
    "fresh relu_": lambda m, a, b, i: F.relu(a + b, inplace=True).clamp(-8, 8),
    "set item": _set_item,
    "view add_": _in_place_on_a_view,
    "accumulate": _accumulate,
    "transposed copy": _transposed_copy_changed,
}


def _built_in_place(m: Program, x: Tensor, ids: Tensor, k: Tensor, a: Tensor) -> Tensor:
    mask = torch.full((ids.shape[0], 4), -2.0, dtype=x.dtype)
    mask[:, 1:] *= torch.arange(3) > 0
    return mask.masked_fill_(ids == 0, 1)


def _changed_twice(m: Program, x: Tensor, ids: Tensor, k: Tensor, a: Tensor) -> Tensor:
    mask = (ids + 1).double()
    half = mask[:, :2]
    mask.neg_()
    return torch.cat((half, mask.add_(1)[:, 2:]), 1)


def _changed_by_what_trains(m: Program, x: Tensor, ids: Tensor, k: Tensor, a: Tensor) -> Tensor:
    mask = ids.double()
    return mask.add_(a.detach().round()).clamp_(-2, 2)


def _in_autocast(m: Program, x: Tensor, ids: Tensor, k: Tensor, a: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return (k[:, :, None].float() @ torch.ones(1, 1)).squeeze(2).double().clamp(-2, 2)


# Each takes the module, the inputs, an earlier mask and a float register, and gives a mask: most of them from the inputs alone.
MASKS: dict[str, Callable[[Program, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "compare ids": lambda m, x, ids, k, a: (ids > 1).double() - (ids[:1] == 0).double(),
    "of input": lambda m, x, ids, k, a: x.sign() * 2,
    "view of input": lambda m, x, ids, k, a: x.flip(1).t().t(),
    "row numbers": lambda m, x, ids, k, a: (torch.arange(ids.shape[0])[:, None] % 3 - torch.arange(4)).double(),
    "causal": lambda m, x, ids, k, a: torch.triu(torch.ones(x.shape[0], 4), 1).double() + ids,
    "of a buffer": lambda m, x, ids, k, a: m.table * k.sign(),
    "of steps": lambda m, x, ids, k, a: k.sign() + m.steps % 2,
    "positions": lambda m, x, ids, k, a: m.positions(a, ids)[0],
    "positions, second": lambda m, x, ids, k, a: m.positions(a, ids)[1].clamp(max=2),
    "zeros like a float": lambda m, x, ids, k, a: torch.zeros_like(a) + ids,
    "calendar": lambda m, x, ids, k, a: m.calendar(ids).double(),
    "transposed mask": lambda m, x, ids, k, a: k.t().contiguous().t(),
    "part": lambda m, x, ids, k, a: k[:, :1].expand(ids.shape[0], 4),
    "one hot": lambda m, x, ids, k, a: F.one_hot(ids[:, 0], 4).double(),
    "gather": lambda m, x, ids, k, a: k.gather(1, ids),
    "any": lambda m, x, ids, k, a: (k > 0).any(1, keepdim=True) * ids.double(),
    "built in place": _built_in_place,
    "changed twice": _changed_twice,
    "changed by what trains": _changed_by_what_trains,
    "under autocast": _in_autocast,
    "random": lambda m, x, ids, k, a: torch.randint(0, 3, (ids.shape[0], 4)).double(),
    "dropped": lambda m, x, ids, k, a: F.dropout(k.clone(), 0.5, m.training),
    "sorted": lambda m, x, ids, k, a: k.sort(dim=1, stable=True).values,
    "detached": lambda m, x, ids, k, a: a.detach().round(),
    "add_": lambda m, x, ids, k, a: k.clamp(-2, 2).add_(1),
    "old mask neg_": lambda m, x, ids, k, a: k.neg_(),
    "old mask set item": lambda m, x, ids, k, a: (k.__setitem__((slice(None), 0), a.detach()[:, 1]), k)[1],
}
MASK_USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "times mask": lambda a, k: a * k,
    "plus mask": lambda a, k: a + k,
    "where mask": lambda a, k: torch.where(k > 0, a, -a),
    "minus mask, in place": lambda a, k: (a + 0).sub_(k),
}


@st.composite
def programs(draw: st.DrawFn) -> Program:
    register = st.integers(0, 20)
    # Low registers would be the first values again and again; counted from the end they make long chains.
    recent = st.integers(-3, -1) | register
    instruction = st.tuples(st.sampled_from([*OPERATIONS, *MASKS, *6 * [*MASK_USES]]), recent, recent)
    mask = st.tuples(st.sampled_from(list(MASKS)), recent, recent)
    instructions = draw(st.lists(mask, max_size=3)) + draw(st.lists(instruction, min_size=2, max_size=14))
    return Program(instructions, draw(st.lists(register, max_size=3)), draw(st.integers(0, 99)))


def whole_numbers(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randint(-3, 4, (size, 4), generator=generator).double()
    return x, torch.randint(0, 4, (size, 4), generator=generator)


def num_recomputed(assignment: Assignment) -> int:
    """Values that stages compute for themselves rather than receive them from the stage where the model computes them."""
    made_in = {node: assignment.stage_of(i) for i, unit in enumerate(assignment.chain.units) for node in unit.nodes}
    values = assignment.chain.recomputation.nodes
    return sum(made_in[node] < stage for stage in range(assignment.num_stages) for node in assignment.uses(stage) & values)


ALL_TESTS = "FXPIPE_ALL_TESTS" in os.environ


@given(programs(), st.sampled_from([(), None, ("block", "fork")]), st.booleans(), st.data())
@settings(
    max_examples=500 if ALL_TESTS else 50,
    deadline=None,
    derandomize=not ALL_TESTS,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_any_partition_of_any_program_equals_the_whole(
    model: Program, opened: Any, training: bool, data: st.DataObject
) -> None:
    model.train(training)
    try:
        reference = run_whole(model, whole_numbers(4))
    except RuntimeError:
        assume(False)  # not a program: it changes in place what autograd needs or forbids to change
    exact = [g.abs().max() < 2**50 for g in reference.gradients.values()]
    assume(all(exact))
    chain = chain_of(model, *whole_numbers(4), opened=opened)
    legal = [site.position for site in chain.sites[:-1] if site.obstacle is None]
    cuts = data.draw(st.lists(st.sampled_from(legal), unique=True, max_size=4).map(sorted)) if legal else []
    assignment = Assignment(chain=chain, cuts=tuple(cuts))
    event(f"values recomputed in another stage: {min(num_recomputed(assignment), 3)}")
    for size in (4, 6):
        args = whole_numbers(size)
        if covers(chain.traced, call_of(*args)):
            assert_stages_equal_whole(assignment, *args)
        else:
            assert size != 4


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("opened", [(), None], ids=["whole", "opened"])
@pytest.mark.parametrize("mask", list(MASKS))
def test_every_mask_is_exact_however_far_it_is_from_its_uses(mask: str, opened: Any, training: bool) -> None:
    uses = [(name, -1, -1) for layer in ("linear 0", "linear 1") for name in (layer, "plus mask", "times mask")]
    model = Program([("linear 1", 0, 0), (mask, -1, -1), *uses, ("where mask", -1, -1)], [1, 3], 1).train(training)
    chain = chain_of(model, *whole_numbers(4), opened=opened)
    legal = tuple(site.position for site in chain.sites[:-1] if site.obstacle is None)
    after_layers = [(position,) for position in legal if chain.units[position].nodes[0].name.startswith("linears")]
    for cuts in [*after_layers, legal]:
        for size in (4, 6):
            assert_stages_equal_whole(Assignment(chain=chain, cuts=cuts), *whole_numbers(size))
    last_mask = chain.traced.output_node.args[0][-1]
    computed_once = {"changed by what trains", "random", "calendar", "sorted", "detached", "old mask set item"}
    assert (last_mask in chain.recomputation.nodes) == (mask not in computed_once and (mask, training) != ("dropped", True))
