"""Whatever user code changes in what it can reach, a snapshot puts it back, and each object is still the same object."""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset, WeightedRandomSampler

from lightning_fxpipe._compat.torch import FakeWorld
from lightning_fxpipe.user_code import snapshot
from lightning_fxpipe.user_code.paths import at_path
from lightning_fxpipe.user_code.snapshot import Snapshot

GLOBAL_COUNTS: dict[str, list[int]] = {"steps": [0]}
GLOBAL_NUMBER = 0


class Meter:
    """As in thousands of projects."""

    def __init__(self) -> None:
        self.sum, self.count, self.values = 0.0, 0, [0.0]

    def update(self, value: float) -> None:
        self.sum += value
        self.count += 1
        self.values.append(value)


class Slotted:
    __slots__ = ("extra", "history", "number")

    def __init__(self) -> None:
        self.number, self.history = 0, [1]


@dataclass
class Record:
    best: float = 1.0
    by_epoch: dict[int, list[float]] = field(default_factory=lambda: {0: [1.0]})


class Refusing(dict[str, Any]):
    """A dict that does not let itself be changed from outside."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError("asked")

    def grow(self) -> None:
        dict.__setitem__(self, "new", 1)


class Touchy:
    """Its properties and descriptors are nobody's business."""

    def __init__(self) -> None:
        self.number = 1

    @property
    def expensive(self) -> int:
        raise AssertionError("asked")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")


@lru_cache
def remembered(size: int) -> list[int]:
    return [size]


def count_up() -> None:
    global GLOBAL_NUMBER, MADE_LATER
    GLOBAL_NUMBER += 1
    MADE_LATER = GLOBAL_NUMBER
    GLOBAL_COUNTS["steps"].append(GLOBAL_NUMBER)


def counting() -> Callable[[], int]:
    count, seen = 0, [0]

    def count_one(into: list[int] = [0]) -> int:  # noqa: B006
        nonlocal count
        count += 1
        seen.append(count)
        into.append(count)
        return count

    return count_one


class Base(nn.Module):
    inherited: list[int] = []


class Holder(Base):
    losses: list[float] = []
    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.stats: dict[str, Any] = {"train": {"n": 0, "each": [1]}, "val": {}}
        self.lists: list[list[int]] = [[], [1]]
        self.meter, self.slotted, self.record = Meter(), Slotted(), Record()
        self.recent = deque([1, 2, [3]], maxlen=3)
        self.ordered = OrderedDict(a=1, b=[2])
        self.grouped: defaultdict[str, list[int]] = defaultdict(list, a=[1])
        self.counter = Counter("ab")
        self.seen = {1, 2}
        self.pair = (Meter(), [0])
        self.array, self.objects = np.zeros(3), np.array([[1], None], dtype=object)
        self.bytes = bytearray(b"ab")
        self.python_rng, self.numpy_rng = random.Random(1), np.random.default_rng(1)
        self.torch_rng = torch.Generator().manual_seed(1)
        self.refusing = Refusing(old=0)
        self.shared = self.layer.shared = Meter()  # type: ignore[assignment]
        self.call = counting()
        self.partial = partial(list.append, [1])
        self.touchy = Touchy()
        self.cycle: list[Any] = []
        self.cycle.append(self.cycle)
        self.me = self
        self.spare = 1
        self.helper = self.update  # a bound method

    def update(self) -> None:
        count_up()
        type(self).total += 1


CHANGES: dict[str, Callable[[Holder], Any]] = {
    "nested dict": lambda m: m.stats["train"].update(n=m.stats["train"]["n"] + 1),
    "new key": lambda m: m.stats["val"].update(best=1),
    "list in nested dict": lambda m: m.stats["train"]["each"].append(5),
    "list of lists": lambda m: m.lists[0].append(1),
    "meter": lambda m: m.meter.update(1.0),
    "slot": lambda m: setattr(m.slotted, "number", 3),
    "new slot": lambda m: setattr(m.slotted, "extra", 3),
    "list in a slot": lambda m: m.slotted.history.append(3),
    "dataclass": lambda m: m.record.by_epoch.setdefault(1, []).append(2.0),
    "deque": lambda m: m.recent.append(4),
    "list in a deque": lambda m: m.recent[-1].append(4) if isinstance(m.recent[-1], list) else None,
    "order": lambda m: m.ordered.move_to_end("a"),
    "list in an ordered dict": lambda m: m.ordered["b"].append(1),
    "default": lambda m: m.grouped["b"].append(1),
    "counter": lambda m: m.counter.update("a"),
    "set": lambda m: m.seen.add(len(m.seen) + 5),
    "object in a tuple": lambda m: m.pair[0].update(1.0),
    "list in a tuple": lambda m: m.pair[1].append(1),
    "array": lambda m: m.array.__iadd__(1),
    "array of objects": lambda m: m.objects[0].append(2),
    "bytes": lambda m: m.bytes.extend(b"c"),
    "python's generator": lambda m: m.python_rng.random(),
    "numpy's generator": lambda m: m.numpy_rng.random(),
    "torch's generator": lambda m: torch.rand(1, generator=m.torch_rng),
    "dict with methods": lambda m: m.refusing.grow(),
    "object of two modules": lambda m: m.layer.shared.update(2.0),  # type: ignore[operator, union-attr]
    "attribute of a submodule": lambda m: setattr(m.layer, "calls", 1),
    "closure": lambda m: m.call(),
    "attribute of a function": lambda m: setattr(m.call, "scale", 2.0),
    "list in a partial": lambda m: m.partial(2),
    "class attribute": lambda m: setattr(type(m), "total", type(m).total + 1),
    "new class attribute": lambda m: setattr(type(m), "late", [1]),
    "list of the class": lambda m: m.losses.append(1.0),
    "list of a base class": lambda m: m.inherited.append(1),
    "globals": lambda m: count_up(),
    "globals and class": lambda m: m.update(),
    "attribute": lambda m: setattr(m, "number", 1),
    "removed": lambda m: vars(m).pop("spare", None),
    "hook": lambda m: m.layer.register_forward_hook(lambda *_: None),
    "object": lambda m: setattr(m.touchy, "number", 2),
}


def described(value: Any, seen: dict[int, int]) -> Any:
    """Structure and identities, comparable: an object that appears again is named by where it appeared first."""
    if isinstance(value, (int, float, str, bytes, type(None))):
        return value
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, np.ndarray):
        return id(value), value.tolist() if value.dtype != object else [described(entry, seen) for entry in value]
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().tolist()
    if isinstance(value, random.Random):
        return id(value), value.getstate()
    if isinstance(value, np.random.Generator):
        return id(value), repr(value.bit_generator.state)
    if isinstance(value, dict):
        items = value.items() if isinstance(value, OrderedDict) else dict.items(value)
        return id(value), [(key, described(entry, seen)) for key, entry in items]
    if isinstance(value, set):
        return id(value), sorted(value)
    if isinstance(value, (list, tuple, deque)):
        return id(value), [described(entry, seen) for entry in value]
    if isinstance(value, bytearray):
        return id(value), bytes(value)
    slots = [(s, described(getattr(value, s), seen)) for s in getattr(type(value), "__slots__", ()) if hasattr(value, s)]
    own = getattr(value, "__dict__", {}) if not callable(value) or isinstance(value, nn.Module) else {}
    return id(value), slots, [(key, described(entry, seen)) for key, entry in own.items()]


def state(module: Holder) -> Any:
    seen: dict[int, int] = {}
    closure = [described(cell.cell_contents, seen) for cell in module.call.__closure__ or ()]  # type: ignore[attr-defined]
    outside = GLOBAL_COUNTS, GLOBAL_NUMBER, globals().get("MADE_LATER"), Holder.total, vars(Holder).get("late"), module.losses
    more = described(vars(module.call), seen), described(module.call.__defaults__, seen), described(module.partial.args, seen)  # type: ignore[attr-defined]
    return described(module, seen), closure, [described(value, seen) for value in (*outside, module.inherited)], more


@given(st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=8, unique=True))
@settings(deadline=None, max_examples=60)
def test_all_changes_are_put_back(names: list[str]) -> None:
    module = Holder()
    before = state(module)
    taken = Snapshot({"self": module})
    for name in names:
        CHANGES[name](module)
    taken.restore()
    assert state(module) == before


@given(
    st.lists(st.sampled_from(sorted(CHANGES)), max_size=6, unique=True),
    st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=6, unique=True),
)
@settings(deadline=None, max_examples=100)
def test_a_renewed_snapshot_is_one_of_that_moment(earlier: list[str], later: list[str]) -> None:
    module = Holder()
    roots = {"self": module}
    taken = Snapshot(roots)
    for name in earlier:
        CHANGES[name](module)
    if not taken.renew(roots, {}):
        return
    before, fresh = state(module), Snapshot(roots)
    for name in later:
        CHANGES[name](module)
    found = [(each.path[1:], each.start) for each in taken.differences()]
    assert sorted(map(str, found)) == sorted(str((each.path[1:], each.start)) for each in fresh.differences())
    taken.restore()
    assert state(module) == before


PLAIN_CHANGES = [
    "nested dict",
    "new key",
    "list in nested dict",
    "slot",
    "counter",
    "set",
    "array",
    "closure",
    "globals",
    "removed",
]


@pytest.mark.parametrize("name", PLAIN_CHANGES)
def test_changes_of_plain_values_need_no_new_snapshot(name: str) -> None:
    module = Holder()
    CHANGES["globals"](module)  # makes a variable
    taken = Snapshot({"self": module})
    CHANGES[name](module)
    assert taken.renew({"self": module}, {})
    assert taken.is_current()


def make_function(m: Holder) -> None:
    type(m).extra = lambda self: GLOBAL_COUNTS  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "list", []),
        lambda m: m.stats.update(val=[1]),
        lambda m: m.lists.reverse(),
        lambda m: setattr(m, "items", iter([1])),
        lambda m: vars(m).pop("meter"),
        make_function,
        lambda m: globals().update(MADE_BY_A_TEST=[1]),
    ],
    ids=["a new object", "another object", "another place", "an iterator", "gone", "a new function", "a new global variable"],
)
def test_where_other_objects_can_be_reached_the_snapshot_is_taken_anew(change: Callable[[Any], Any]) -> None:
    try:
        module = Holder()
        taken = Snapshot({"self": module})
        change(module)
        assert not taken.renew({"self": module}, {})
    finally:
        globals().pop("MADE_BY_A_TEST", None)
        if "extra" in vars(Holder):
            del Holder.extra  # type: ignore[attr-defined]


def test_a_snapshot_of_other_roots_is_not_renewed() -> None:
    module, other = Holder(), Holder()
    assert Snapshot({"self": module, "step": module.update}).renew({"self": module, "step": module.update}, {})
    assert not Snapshot({"self": module}).renew({"self": other}, {})
    assert not Snapshot({"self": module}).renew({"self": module, "step": module.update}, {})
    assert not Snapshot({"self": module}, shallow={"trainer": other}).renew({"self": module}, {"trainer": module})


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_each_change_is_seen_and_put_back(name: str) -> None:
    module = Holder()
    before = state(module)
    taken = Snapshot({"self": module})
    assert taken.changed_names() == []
    CHANGES[name](module)
    assert state(module) != before
    assert len(taken.changed_names()) >= 1
    taken.restore()
    assert state(module) == before
    assert taken.changed_names() == []


# ------------------------------------------------------------------ random structures

LEAVES = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.floats(allow_nan=False))


def _object_with(values: dict[str, Any]) -> Meter:
    made = Meter()
    vars(made).update(values)
    return made


TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=2), inner, max_size=4),
        st.lists(inner, max_size=4).map(deque),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(_object_with),
    ),
    max_leaves=20,
)


def mutable_in(value: Any, found: dict[int, Any]) -> None:
    if id(value) in found:
        return
    inside: list[Any] = []
    if isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, (list, deque, tuple)):
        inside = list(value)
    elif isinstance(value, Meter):
        inside = list(vars(value).values())
    else:
        return
    found[id(value)] = value
    for entry in inside:
        mutable_in(entry, found)


def mutate(target: Any, other: Any, how: int) -> None:
    if isinstance(target, dict):
        [lambda: target.update(zz=other), target.clear, lambda: target and target.popitem()][how]()
    elif isinstance(target, (list, deque)):
        [lambda: target.append(other), target.clear, target.reverse][how]()
    elif isinstance(target, Meter):
        [lambda: setattr(target, "b", other), vars(target).clear, lambda: setattr(target, "new", other)][how]()


@given(TREES, st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 2)), max_size=12))
@settings(deadline=None, max_examples=300)
def test_random_changes_of_random_structures_are_put_back(tree: Any, changes: list[tuple[int, int, int]]) -> None:
    root = Meter()
    vars(root)["tree"] = [tree]
    before = described(root, {})
    found: dict[int, Any] = {}
    mutable_in(root, found)
    objects = list(found.values())
    taken = Snapshot({"root": root})
    for one, other, how in changes:
        # Objects are put into each other, too, so that cycles and shared parts come about.
        mutate(objects[one % len(objects)], objects[other % len(objects)], how)
    taken.restore()
    assert described(root, {}) == before


@given(TREES)
@settings(deadline=None, max_examples=100)
def test_what_has_not_changed_is_not_said_to_have(tree: Any) -> None:
    root = Meter()
    vars(root)["tree"] = tree
    assert Snapshot({"root": root}).changed_names() == []


# ------------------------------------------------------------------ what is said of changes


@pytest.mark.parametrize("make", [SimpleNamespace, argparse.Namespace])
def test_attributes_of_pythons_own_namespaces_are_put_back(make: Any) -> None:
    """``__dict__`` of a class that is written in C is a member, not a getter: its objects were left alone."""
    holder = make(options=make(rate=0.5))
    found = Snapshot({"holder": holder}, enters_modules=False)
    holder.options.rate = 0.25
    assert [(each.path, each.value) for each in found.differences()] == [
        (("holder", ("attribute", "options"), ("attribute", "rate")), 0.25)
    ]
    found.restore()
    assert holder.options.rate == 0.5


def test_a_difference_says_where_it_is() -> None:
    module = Holder()
    taken = Snapshot({"self": module})
    module.stats["train"]["n"] = 5
    module.lists[1].append(7)
    module.meter.update(2.0)
    found = {difference.path: (difference.start, difference.value) for difference in taken.differences()}
    train = ("self", ("attribute", "stats"), ("key", "train"))
    assert found.pop((*train, ("key", "n"))) == (None, 5)
    assert found.pop(("self", ("attribute", "lists"), ("index", 1))) == (1, [7])
    assert {path[-1] for path in found} == {("attribute", "sum"), ("attribute", "count"), ("attribute", "values")}
    assert at_path({"self": module}, train) is module.stats["train"]
    assert taken.path_of(module.stats["train"]) == train


def test_what_is_no_longer_held_is_not_said_to_have_changed() -> None:
    module = Holder()
    taken = Snapshot({"self": module})
    old, module.meter = module.meter, Meter()
    old.update(1.0)
    assert [difference.path[-1] for difference in taken.differences()] == [("attribute", "meter")]


def test_modules_are_not_entered_where_that_is_not_wanted() -> None:
    module = Holder()
    taken = Snapshot({"self": module}, enters_modules=False)
    module.layer.calls = 1  # type: ignore[assignment]
    assert taken.changed_names() == []
    module.stats["val"]["n"] = 1
    assert taken.changed_names() == ["self.stats"]


# ------------------------------------------------------------------ bounds


@pytest.mark.parametrize("mock", [Mock(), MagicMock()])
def test_mocks_are_left_alone(mock: Any) -> None:
    module = nn.Identity()
    module.mock = mock
    taken = Snapshot({"self": module})
    module.mock.log(1)
    taken.restore()
    assert mock.log.call_count == 1


def test_large_data_takes_little_time() -> None:
    module = nn.Identity()
    module.data, module.more = list(range(1_000_000)), [[i] for i in range(100_000)]  # type: ignore[assignment]
    module.table = np.zeros(10_000_000)  # type: ignore[assignment]
    begin = time.process_time()
    taken = Snapshot({"self": module})
    module.data.append(5)  # type: ignore[operator, union-attr]
    taken.restore()
    assert time.process_time() - begin < 3.0
    assert len(module.data) == 1_000_000  # type: ignore[arg-type]


def test_many_modules_take_little_time() -> None:
    module = nn.ModuleList(nn.Linear(1, 1) for _ in range(5000))
    begin = time.process_time()
    taken = Snapshot({"self": module})
    taken.restore()
    assert time.process_time() - begin < 3.0


def test_what_is_near_is_remembered_where_there_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_OBJECTS", 30)
    module = nn.Identity()
    module.deep, module.near = [[[i]] for i in range(100)], {"n": 0}  # type: ignore[assignment]
    taken = Snapshot({"self": module})
    module.near["n"] += 1  # type: ignore[operator, index]
    taken.restore()
    assert module.near == {"n": 0}


def test_what_a_block_changes_is_passed_over_and_what_code_around_it_changes_is_not() -> None:
    module = Holder()
    module.counts, module.other = {"a": 0}, 0  # type: ignore[assignment]
    taken = Snapshot({"self": module})
    module.counts["before"] = 1  # type: ignore[operator, index]
    module.register_forward_hook(print)
    with taken.passing_over():
        module.counts["a"] = 1  # type: ignore[operator, index]
        module.other = 2  # type: ignore[assignment]
        del module.counts["before"]  # type: ignore[operator, union-attr]
        module.counts["before"] = 3  # type: ignore[operator, index]
    module.counts["after"] = 1  # type: ignore[operator, index]
    kinds = {str(difference.path[-1][1]) for difference in taken.differences()}
    assert kinds == {"after", str(("_forward_hooks", next(iter(module._forward_hooks))))}
    taken.restore()
    assert (module.counts, module.other) == ({"a": 1, "before": 3}, 2)
    assert not module._forward_hooks


def test_several_snapshots_pass_over_what_a_block_changes_at_once() -> None:
    """An opened module inside another one: what a whole module changes is the work of neither."""
    module = Holder()
    module.count = 0  # type: ignore[assignment]
    taken = [Snapshot({"self": module}), Snapshot({"outer": [module]})]
    with snapshot.passing_over(taken):
        module.count = 1  # type: ignore[assignment]
    later = Snapshot({"self": module})
    module.count = 2  # type: ignore[assignment]
    with snapshot.passing_over([*taken, later]):
        module.other = 1  # type: ignore[assignment]
    assert [[difference.value for difference in one.differences()] for one in (*taken, later)] == [[2]] * 3


def test_parameters_in_an_optimizers_groups_are_the_modules() -> None:
    """To ask thousands of them for their versions took as long as all else of a batch. A learning rate is no module's."""
    layer, rate = nn.Linear(2, 2), torch.tensor(0.1)
    groups = torch.optim.SGD(layer.parameters(), lr=rate).param_groups
    mine = {"params": [torch.zeros(2)]}
    found = Snapshot({"optimizers[0].param_groups": groups, "mine": mine})
    assert [id(tensor) for tensor in found.tensors()] == [id(rate), id(mine["params"][0])]
    groups[0]["params"].pop()
    assert not found.is_current()


def test_a_generator_of_torchs_is_remembered_among_tensors_without_data() -> None:
    """Its state is a tensor with data, in whatever mode the code around runs."""
    holder = SimpleNamespace(generator=torch.Generator().manual_seed(3), data=TensorDataset(torch.ones(2)))
    holder.sampler = WeightedRandomSampler([1.0], 1, generator=holder.generator)
    with FakeWorld().active():
        before = Snapshot({"holder": holder})
        assert before.is_current()
    drawn = torch.rand(2, generator=holder.generator)
    holder.sampler.num_samples = 2
    with FakeWorld().active():
        assert not before.is_current()
        again = before.take_back()
        assert before.is_current()
    assert holder.sampler.num_samples == 1
    assert torch.equal(torch.rand(2, generator=holder.generator), drawn)
    before.restore()
    again()
    assert holder.sampler.num_samples == 2
    assert not torch.equal(torch.rand(2, generator=holder.generator), drawn)


def test_what_cannot_be_remembered_is_left_alone() -> None:
    """Such as a generator for which the system draws: it has no state."""
    found = Snapshot({"holder": SimpleNamespace(generator=random.SystemRandom(), count=1)})
    assert found.left_alone == {random.SystemRandom}
    assert found.is_current()
