"""Which dimensions a trace is made independent of, what it covers then, and what is done where that cannot be."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_fxpipe._compat.torch import FakeWorld
from lightning_fxpipe.distributed.commands import Commands
from lightning_fxpipe.distributed.decisions import Decisions
from lightning_fxpipe.distributed.topology import Placement, Topology
from lightning_fxpipe.errors import TraceError
from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.cost import build_chain
from lightning_fxpipe.planner.step_plan import make_plan
from lightning_fxpipe.pytree.shapes import DimGroups, ShapeHistory, Shapes
from lightning_fxpipe.runtime import batch_run as runtime
from lightning_fxpipe.runtime import pass_setup as passsetup
from lightning_fxpipe.runtime import stage_traces as stagetraces
from lightning_fxpipe.runtime.lru import LruCache
from lightning_fxpipe.runtime.stage_traces import StageTraces
from lightning_fxpipe.stages.build import concrete_size
from lightning_fxpipe.tracing.region import StepCall
from lightning_fxpipe.tracing.trace import TracedRegion, trace_region
from lightning_fxpipe.tracing.trace_log import MANY_TRACES, TraceLog
from lightning_fxpipe.user_code.members import Members
from lightning_fxpipe.user_code.step import Step, StepKind
from tests.staging import assert_stages_equal_whole, call_of

WIDTH = 6

# ------------------------------------------------------------------------------------------------- what varies, and together


def history_of(*seen: tuple[int, Shapes]) -> ShapeHistory:
    """After calls with these batch sizes and shapes."""
    history = ShapeHistory()
    for batch_size, shapes in seen:
        history.observe(shapes, batch_size)
    return history


def test_one_shape_varies_in_nothing() -> None:
    assert history_of((4, ((4, 7),)), (4, ((4, 7),))).groups(((4, 7),)) == ()


def test_the_batch_is_not_among_what_varies() -> None:
    assert history_of((4, ((4, 7),)), (3, ((3, 7),))).groups(((3, 7),)) == ()


def test_a_dimension_that_had_another_size_varies() -> None:
    assert history_of((4, ((4, 7),)), (4, ((4, 9),))).groups(((4, 9),)) == (((0, 1),),)


def test_sizes_that_change_together_stay_together() -> None:
    first, second = ((4, 7), (4, 7), (4, 7, 7)), ((4, 9), (4, 9), (4, 9, 9))
    assert history_of((4, first), (4, second)).groups(second) == (((0, 1), (1, 1), (2, 1), (2, 2)),)


def test_sizes_that_were_equal_once_by_accident_are_told_apart() -> None:
    shapes = [((4, 7), (4, 7)), ((4, 9), (4, 9)), ((4, 5), (4, 6))]
    assert history_of(*((4, s) for s in shapes[:2])).groups(shapes[1]) == (((0, 1), (1, 1)),)
    assert history_of(*((4, s) for s in shapes)).groups(shapes[2]) == (((0, 1),), ((1, 1),))
    # And they stay told apart when they are equal again.
    assert history_of(*((4, s) for s in shapes)).groups(shapes[1]) == (((0, 1),), ((1, 1),))


def test_a_length_equal_to_the_batch_size_does_not_become_the_batch() -> None:
    assert history_of((4, ((4, 4),)), (6, ((6, 6),))).groups(((6, 6),)) == (((0, 1),),)


def test_a_first_dimension_that_was_the_batch_size_by_accident_varies() -> None:
    assert history_of((4, ((4, 3), (4,))), (4, ((4, 3), (5,)))).groups(((4, 3), (5,))) == (((1, 0),),)


def test_what_has_size_one_now_is_a_constant() -> None:
    assert history_of((4, ((4, 7),)), (4, ((4, 1),))).groups(((4, 1),)) == ()
    assert history_of((4, ((4, 1),)), (4, ((4, 7),))).groups(((4, 7),)) == (((0, 1),),)


def test_what_cannot_be_a_symbol_is_left_out_for_good() -> None:
    history = history_of((4, ((4, 7, 3),)), (4, ((4, 9, 5),)))
    history.keep_static(((0, 1),))
    assert history.groups(((4, 9, 5),)) == (((0, 2),),)


def test_specialised_once_is_an_accident_twice_is_not() -> None:
    history = history_of((4, ((4, 7),)), (4, ((4, 9),)))
    for size, expected in ((16, 1), (16, 1), (12, 0)):
        history.note_specialised(((0, 1),), size)
        assert len(history.groups(((4, 9),))) == expected


shapes_of_two = st.tuples(st.integers(2, 5), st.integers(2, 5), st.integers(2, 5))


@given(st.lists(shapes_of_two, min_size=1, max_size=12))
@settings(deadline=None)
def test_a_group_has_one_size_in_every_shape_that_was_seen(seen: list[tuple[int, int, int]]) -> None:
    shapes = [(batch, ((batch, a, b), (batch, b))) for batch, a, b in seen]
    history = history_of(*shapes)
    for _, (first, second) in shapes:
        sizes = (first, second)
        for group in history.groups(sizes):
            assert all(len({s[tensor][dim] for tensor, dim in group}) == 1 for _, s in shapes)
            assert all(len({s[tensor][dim] for _, s in shapes}) > 1 for tensor, dim in group)


# ------------------------------------------------------------------------------------------------- traces


def traced_with(model: nn.Module, groups: DimGroups, *args: Tensor, answers_looks: bool = True) -> TracedRegion:
    return trace_region(model, replace(call_of(*args), varying=groups), opened=None, answers_looks=answers_looks)


class Mixes(nn.Module):
    """Two inputs, whose lengths have to be the same; and sizes as arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x) + y
        h = self.second(h).reshape(h.shape[0], y.shape[1] * WIDTH)
        return self.third(h.view(-1, x.shape[1], WIDTH)) * y.shape[1]


def inputs(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, WIDTH, generator=generator), torch.randn(*shape, WIDTH, generator=generator)


@pytest.mark.parametrize("groups", [(((0, 1), (1, 1)),), (((0, 1),), ((1, 1),))], ids=["one symbol", "two symbols"])
def test_stages_are_exact_at_every_length_and_cut(groups: DimGroups) -> None:
    chain = build_chain(traced_with(Mixes(), groups, *inputs(4, 5)))
    legal = tuple(site.position for site in chain.sites[:-1] if site.obstacle is None)
    for cuts in (*((position,) for position in legal), legal):
        for shape in ((4, 5), (4, 9), (3, 2), (7, 7)):
            assert_stages_equal_whole(Assignment(chain=chain, cuts=cuts), *inputs(*shape))


@pytest.mark.parametrize("groups", [(((0, 1), (1, 1)),), (((0, 1),), ((1, 1),))], ids=["one symbol", "two symbols"])
def test_lengths_that_must_be_equal_are_asked_to_be(groups: DimGroups) -> None:
    traced = traced_with(Mixes(), groups, *inputs(4, 5))
    assert traced.bind_sizes(((4, 9, WIDTH), (4, 9, WIDTH))) is not None
    assert traced.bind_sizes(((4, 9, WIDTH), (4, 8, WIDTH))) is None
    assert traced.bind_sizes(((4, 9, WIDTH + 1), (4, 9, WIDTH + 1))) is None


def test_a_symbol_is_not_that_of_an_equal_size_elsewhere() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).sum(dim=1)

    traced = traced_with(Adds(), (((0, 1),),), torch.randn(5, 5, WIDTH))  # length, batch: the same here
    assert traced.bind_sizes(((5, 9, WIDTH),)) is not None


def test_dimensions_of_a_group_must_agree() -> None:
    with pytest.raises(ValueError, match="differs from those of the other microbatches in group 0"):
        FakeWorld().input(torch.ones(3, 4), [], {0: 0, 1: 0})


# ------------------------------------------------------------------------------------------------- the traces of a step


class Steps(nn.Module):
    """A model in a module with a step."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Model(run)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(*batch).sum()


class Model(nn.Module):
    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.run = run

    def forward(self, *args: Any) -> Tensor:
        return self.last(self.run(self.first(args[0]), *args[1:]))


class Messages:
    """What was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.warnings: list[str] = []
        self.details: list[str] = []

    def log(self) -> TraceLog:
        return TraceLog(self.lines.append, self.warnings.append, self.details.append)


def traces_of(root: Steps, *example: Any, log: TraceLog | None = None) -> StageTraces:
    plan = make_plan(root, example, num_stages=2)
    topology = Topology(group=None, control_group=None, rank=0, placement=Placement(num_ranks=2), device=torch.device("cpu"))
    return StageTraces(root, plan, topology, log or Messages().log())


def x_of(batch: int, length: int, width: int = WIDTH) -> Tensor:
    return torch.zeros(batch, length, width)


def numbers_of_traces(run: Callable[..., Tensor], batches: Sequence[tuple[Any, ...]], log: TraceLog | None = None) -> list[int]:
    """How many traces there are after each batch."""
    root = Steps(run)
    traces = traces_of(root, *batches[0], log=log)
    counts = []
    for batch in batches:
        found, shapes = traces.find(StepKind.TRAIN, StepCall.of_training(root, batch), batch[0].shape[0])
        assert found.traced.bind_sizes(shapes) is not None
        counts.append(len(traces))
    return counts


def test_the_second_trace_holds_for_all_lengths() -> None:
    batches = [(x_of(4, length),) for length in (7, 7, 9, 5, 128, 7, 2, 64)]
    assert numbers_of_traces(torch.tanh, batches) == [1, 1, 2, 2, 2, 2, 2, 2]


def test_lengths_equal_by_accident_cost_one_more_trace() -> None:
    def run(h: Tensor, other: Tensor) -> Tensor:
        return h.mean(dim=1) + other.mean(dim=1)

    sizes = [(7, 7), (9, 9), (5, 5), (5, 6), (8, 3), (4, 4)]
    assert numbers_of_traces(run, [(x_of(4, a), x_of(4, b)) for a, b in sizes]) == [1, 2, 2, 3, 3, 3]


def test_a_batch_of_one_and_a_length_of_one_are_traced_by_themselves() -> None:
    sizes = [(4, 7), (4, 9), (1, 5), (1, 8), (4, 1), (2, 1), (3, 3)]
    assert numbers_of_traces(torch.tanh, [(x_of(*size),) for size in sizes]) == [1, 2, 3, 3, 4, 4, 4]


def test_a_path_taken_at_one_length_does_not_end_the_other_lengths_trace() -> None:
    def run(h: Tensor) -> Tensor:
        return h * 2 if h.shape[1] == 16 else h.tanh()

    assert numbers_of_traces(run, [(x_of(4, length),) for length in (7, 16, 9, 5, 16, 12)]) == [1, 2, 3, 3, 3, 3]


def test_code_that_needs_to_know_a_size_is_traced_for_each() -> None:
    def run(h: Tensor) -> Tensor:
        return h * (h.shape[1].bit_length())  # a symbol has no such method

    messages = Messages()
    batches = [(x_of(4, length),) for length in (7, 9, 5, 9)]
    assert numbers_of_traces(run, batches, messages.log()) == [1, 2, 3, 3]
    assert "dimension 1 of args[0] is 5 after 9, for this size only" in messages.lines[0]


def test_only_the_size_that_must_be_known_is_a_constant() -> None:
    def run(h: Tensor, other: Tensor) -> Tensor:
        return h.mean(dim=1) * h.shape[1].bit_length() + other.mean(dim=1)

    sizes = [(7, 3), (9, 5), (9, 8), (9, 6), (5, 8), (5, 4)]
    assert numbers_of_traces(run, [(x_of(4, a), x_of(4, b)) for a, b in sizes]) == [1, 2, 2, 2, 3, 3]


def test_code_that_fails_is_left_to_the_step_which_fails_as_on_one_device() -> None:
    def run(h: Tensor) -> Tensor:
        if h.shape[1] > 8:
            raise KeyError("too long")
        return h

    root = Steps(run)
    traces = traces_of(root, x_of(4, 7))
    called = []
    for length in (7, 9):
        found, _ = traces.find(StepKind.TRAIN, StepCall.of_training(root, (x_of(4, length),)), 4)
        called.append([str(node.target) for node in found.traced.graph.nodes if node.op == "call_module"])
    assert called == [["model.first", "model.last"], ["model.first"]]


def test_as_many_traces_are_kept_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(h: Tensor) -> Tensor:
        for _ in range(h.shape[1]):
            h = h.tanh()
        return h

    monkeypatch.setattr(stagetraces, "MAX_TRACES", 3)
    messages = Messages()
    counts = numbers_of_traces(run, [(x_of(2, length),) for length in (2, 3, 4, 2, 5, 2, 6, 2, 3)], messages.log())
    assert counts == [1, 2, 3, 3, 3, 3, 3, 3, 3]
    # The one for length 2 was used between the others, so it is still there; that for 3 was made again.
    assert [line.split(" is ")[1].split(" ")[0] for line in messages.details + messages.lines] == ["3", "4", "5", "6", "3"]


class Peeks(nn.Module):
    """Looks at a value, so it cannot run without data; what becomes of the sizes is in ``run``."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, h: Tensor) -> Tensor:
        return self.run(h) if float(h.detach().sum()) != 1.5 else h


def peeking(run: Callable[[Tensor], Tensor], *shape: int) -> Any:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.peeks = Peeks(run)

        def forward(self, x: Tensor) -> Tensor:
            return self.peeks(x)

    return traced_with(Whole(), (((0, 1),),), torch.randn(*shape), answers_looks=False)


@pytest.mark.parametrize(
    "run",
    [
        lambda h: h * 2,
        lambda h: h.flatten(),
        lambda h: h.repeat(3, 2),
        lambda h: h[:, :1],
        lambda h: h.sum(dim=0),
        lambda h: h.t(),
    ],
    ids=["same", "product", "multiples", "constant", "one left", "turned"],
)
@pytest.mark.parametrize("shape", [(4, 6), (4, 4), (6, 3)])
def test_sizes_of_what_looks_at_values_follow_the_inputs(run: Callable[[Tensor], Tensor], shape: tuple[int, int]) -> None:
    traced = peeking(run, *shape)
    value = next(node for node in traced.graph.nodes if node.op == "call_module").meta["val"]
    for other in (shape, (5, 7), (9, 2)):
        sizes = traced.bind_sizes((other,))
        assert sizes is not None
        assert tuple(concrete_size(size, sizes) for size in value.shape) == tuple(run(torch.zeros(other)).shape)


@pytest.mark.parametrize("run", [lambda h: h[:, 1:], lambda h: h[:, ::4], lambda h: h[:, : h.shape[1] // 2]])
def test_sizes_that_are_no_multiples_are_not_guessed(run: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TraceError, match="is not a multiple of an input's"):
        peeking(run, 4, 6)


# ------------------------------------------------------------------------------------------------- what is told


def test_a_new_trace_is_noted_with_its_cause_and_time() -> None:
    messages = Messages()
    numbers_of_traces(torch.tanh, [(x_of(4, length),) for length in (7, 9, 5)], messages.log())
    (line,) = messages.details
    assert not messages.lines
    assert re.match(r"training_step was retraced in \d+\.\d+ s", line)
    assert "dimension 1 of args[0] is 9 after 7, any size from here on." in line
    assert not messages.warnings


def test_a_smaller_last_batch_is_nothing_to_speak_of() -> None:
    messages = Messages()
    numbers_of_traces(torch.tanh, [(x_of(size, 7),) for size in (4, 1, 4, 1)], messages.log())
    assert not messages.lines
    assert not messages.warnings


def test_what_causes_a_trace_again_is_told() -> None:
    messages = Messages()
    numbers_of_traces(lambda h, word: h * int(word), [(x_of(4, 7), word) for word in "012"], messages.log())
    (line,) = messages.lines
    assert "args[1] is '2' after '1'" in line


def test_a_number_among_the_arguments_causes_no_trace_from_its_second_value_on() -> None:
    messages = Messages()
    numbers_of_traces(lambda h, number: h * number, [(x_of(4, 7), 1.5 + number) for number in range(5)], messages.log())
    assert not messages.lines


def test_a_constant_that_keeps_changing_is_named_once() -> None:
    messages = Messages()
    batches = [(x_of(4, 7), str(number)) for number in range(MANY_TRACES + 3)]
    numbers_of_traces(lambda h, word: h * int(word), batches, messages.log())
    assert "args[1] is '2' after '1'" in messages.lines[0]
    (warning,) = messages.warnings
    assert f"retraced {MANY_TRACES - 1} times, {MANY_TRACES - 1} times because of args[1]" in warning


def test_a_number_of_which_the_code_needs_the_value_is_named_with_what_needs_it() -> None:
    messages = Messages()
    batches = [(x_of(4, 7), 1.5 + number) for number in range(MANY_TRACES + 1)]
    numbers_of_traces(lambda h, number: h * float(number), batches, messages.log())
    (warning,) = messages.warnings
    assert "float(), int(), f-strings and indices need its value" in warning


# ------------------------------------------------------------------------------------------------- the cache


def test_a_cache_keeps_what_was_used_last() -> None:
    made: list[int] = []
    cache: LruCache[int, int] = LruCache(3)

    def get(key: int) -> int:
        return cache.get(key, lambda: made.append(key) or key)

    for key in (1, 2, 3, 1, 4, 1, 2):
        assert get(key) == key
    assert made == [1, 2, 3, 4, 2]
    assert len(cache) == 3


class FakeExecutor:
    """Counts how many there are, and runs nothing."""

    alive: weakref.WeakSet[FakeExecutor] = weakref.WeakSet()
    num_made = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        FakeExecutor.alive.add(self)
        FakeExecutor.num_made += 1

    def step(self, run: Any) -> None:
        """Nothing."""


@pytest.fixture
def fake_executors(monkeypatch: pytest.MonkeyPatch) -> type[FakeExecutor]:
    monkeypatch.setattr(passsetup, "Executor", FakeExecutor)
    monkeypatch.setattr(FakeExecutor, "num_made", 0)
    return FakeExecutor


def run_batches(batches: Sequence[Any], training_step: Callable[[Any, Any], Any]) -> Messages:
    class Module(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return training_step(self.model, batch)

    messages, root = Messages(), Module(torch.tanh)
    plan = make_plan(root, batches[0], num_stages=2)
    topology = Topology(group=None, control_group=None, rank=0, placement=Placement(num_ranks=2), device=torch.device("cpu"))
    commands = Commands(None, source=0)
    stages = runtime.PipelineRuntime(
        root,
        Members(root),
        plan,
        topology,
        num_microbatches=2,
        commands=commands,
        trace_log=messages.log(),
        decisions=Decisions.among(topology),
    )
    for index, batch in enumerate(batches):
        step = Step(
            kind=StepKind.TRAIN, function=root.training_step, rest=(index,), context=nullcontext, random_key=("train", index)
        )
        stages.run(step, batch, {})
    return messages


def test_memory_does_not_grow_with_the_number_of_shapes(fake_executors: type[FakeExecutor]) -> None:
    sizes = [(2 * (2 + index % 4), 2 + index) for index in range(200)]
    messages = run_batches([x_of(*size) for size in sizes], lambda model, x: model(x).sum())
    gc.collect()
    assert fake_executors.num_made == 200  # forward; that of a backward pass is made when it begins
    assert len(fake_executors.alive) <= 2 * 8
    assert len(messages.details) == 1  # the second length; all later shapes go through its trace


def test_names_of_samples_make_nothing_new(fake_executors: type[FakeExecutor]) -> None:
    batches = [{"x": x_of(4, 7), "names": [f"{index}-{sample}" for sample in range(4)], "id": f"{index}"} for index in range(5)]
    messages = run_batches(batches, lambda model, batch: model(batch["x"]).sum())
    assert fake_executors.num_made == 1
    assert not messages.details


def test_a_number_that_the_model_gets_is_not_overlooked(fake_executors: type[FakeExecutor]) -> None:
    batches = [{"x": x_of(4, 7), "lengths": [length] * 4} for length in (7, 5, 7, 3, 5)]
    messages = run_batches(batches, lambda model, batch: model(batch["x"][:, : max(batch["lengths"])]).sum())
    assert fake_executors.num_made == 3
    assert len(messages.details) == 1
