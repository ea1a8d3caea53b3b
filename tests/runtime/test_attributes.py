"""What a step sets on the module on one rank is the same on another afterwards, whatever it was."""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.runtime.attributes import StepAttributes, take_over
from lightning_fxpipe.user_code.members import Members

CPU = torch.device("cpu")


class Meter:
    """As in thousands of projects."""

    def __init__(self) -> None:
        self.sum, self.values = 0.0, [0.0]
        self.last: Any = None

    def update(self, value: float) -> None:
        self.sum += value
        self.values.append(value)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.number, self.text, self.nothing = 1.0, "a", None
        self.tensor = torch.zeros(3)
        self.losses: list[Any] = []
        self.by_name: dict[str, Any] = {"train": [], "best": 0.0}
        self.seen = {1, 2}
        self.meter, self.meters = Meter(), {"a": (Meter(), [Meter()])}
        self.recent: deque[Any] = deque([0], maxlen=3)
        self.counter = Counter("ab")
        self.array = np.zeros(2)
        self.generator = random.Random(1)


def plain(value: Any) -> Any:
    """A value that ``==`` compares."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, Meter):
        return plain(vars(value))
    if isinstance(value, (np.ndarray, random.Random)):
        return value.tolist() if isinstance(value, np.ndarray) else value.getstate()
    return [plain(entry) for entry in value] if isinstance(value, (list, tuple, deque)) else value


def state(module: nn.Module) -> dict[str, Any]:
    own = {name: plain(value) for name, value in vars(module).items() if not name.startswith("_")}
    return own | {name: plain(value) for name, value in module.named_buffers()}


def run_on_both(here: Holder, there: Holder, after_the_call: Callable[[Holder], Any]) -> list[Any]:
    """One step of which only the first module sees what comes after the model's call."""
    before = StepAttributes(here, Members(here), dict(here.named_buffers()))
    after_the_call(here)
    changes = before.changes()
    take_over(there, changes, CPU)
    return changes


CHANGES: dict[str, Callable[[Holder], Any]] = {
    "number": lambda m: setattr(m, "number", m.number + 1),
    "new attribute": lambda m: setattr(m, "last", torch.ones(2)),
    "removed attribute": lambda m: vars(m).pop("text", None),
    "tensor in place": lambda m: m.tensor.add_(1),
    "tensor replaced": lambda m: setattr(m, "tensor", m.tensor * 2 + 1),
    "appended": lambda m: m.losses.append(torch.tensor(float(len(m.losses)), requires_grad=True) * 2),
    "nested append": lambda m: m.by_name.setdefault("train", []).append(len(m.by_name)),
    "list of lists": lambda m: m.losses.append([m.number]),
    "in the last entry": lambda m: m.losses[-1].append(7) if m.losses and isinstance(m.losses[-1], list) else None,
    "cleared": lambda m: m.losses.clear(),
    "shortened": lambda m: m.losses and m.losses.pop(),
    "first entry": lambda m: m.losses and m.losses.__setitem__(0, "first"),
    "list replaced": lambda m: setattr(m, "losses", [*m.losses, 1]),
    "key": lambda m: m.by_name.update(best=m.by_name.get("best", 0.0) + 0.5),
    "key removed": lambda m: m.by_name.pop("train", None),
    "set": lambda m: m.seen.add(len(m.seen) + 1),
    "meter": lambda m: m.meter.update(m.number),
    "meter in a list in a tuple": lambda m: m.meters["a"][1][0].update(2.0),
    "meter replaced": lambda m: (setattr(m, "meter", Meter()), m.meter.update(5.0)),
    "tensor in a meter": lambda m: setattr(m.meter, "last", torch.ones(2)),
    "deque": lambda m: m.recent.append(m.number),
    "counter": lambda m: m.counter.update("a"),
    "array": lambda m: m.array.__iadd__(1),
    "generator": lambda m: m.generator.random(),
    "object kept twice": lambda m: setattr(m, "best", m.meters["a"][0]),
    "buffer in place": lambda m: m.mean.mul_(0.5).add_(1),
    "buffer replaced": lambda m: setattr(m, "mean", m.mean + 3),
}


@given(st.lists(st.lists(st.sampled_from(sorted(CHANGES)), max_size=4), min_size=1, max_size=6))
@settings(deadline=None, max_examples=200)
def test_the_other_rank_has_what_this_one_has(steps: list[list[str]]) -> None:
    here = Holder()
    there = copy.deepcopy(here)
    for names in steps:
        run_on_both(here, there, lambda module: [CHANGES[name](module) for name in names])
        assert state(there) == state(here)


@pytest.mark.parametrize("name", sorted(set(CHANGES) - {"in the last entry", "cleared", "shortened", "first entry"}))
def test_each_change_is_seen(name: str) -> None:
    here = Holder()
    before = state(copy.deepcopy(here))
    assert run_on_both(here, Holder(), CHANGES[name])
    assert state(here) != before


def test_an_entry_that_has_changed_and_moved_is_sent() -> None:
    """It is no longer where it was, so that its change is told nowhere else."""
    here = Holder()
    here.losses = [[1.0]]
    there = copy.deepcopy(here)

    def step(module: Any) -> None:
        module.losses[0].append(7)
        module.losses = [*module.losses, 1]

    run_on_both(here, there, step)
    assert there.losses == here.losses == [[1.0, 7], 1]


def test_a_step_that_changes_nothing_sends_nothing() -> None:
    here = Holder()
    here.losses.append(torch.ones(2))
    assert run_on_both(here, Holder(), lambda module: setattr(module, "number", 1.0)) == []


@pytest.mark.parametrize("name", ["tensor", "mean"])
def test_a_tensor_that_has_got_other_values_is_still_the_same(name: str) -> None:
    """Otherwise whoever else holds it would have the old values, on the other ranks only."""
    here = Holder()
    here.also = [getattr(here, name)]  # type: ignore[assignment]
    there = copy.deepcopy(here)
    run_on_both(here, there, lambda module: getattr(module, name).add_(2))
    assert there.also[0] is getattr(there, name)  # type: ignore[index]
    assert state(there) == state(here)


def test_a_growing_list_is_sent_by_its_new_entries() -> None:
    here = Holder()
    here.losses.extend(range(100))
    there = copy.deepcopy(here)
    changes = run_on_both(here, there, lambda module: module.losses.append(100))
    assert [(change.path[1:], change.start) for change in changes] == [((("attribute", "losses"),), 100)]
    assert len(changes[0].value or b"") < 50
    assert there.losses == list(range(101))


def test_what_both_ranks_have_appended_before_the_call_is_there_once() -> None:
    here, there = Holder(), Holder()
    before = StepAttributes(here, Members(here), {})
    for module in (here, there):
        module.losses.append("before the call")
    here.losses.append("after it")
    take_over(there, before.changes(), CPU)
    assert there.losses == ["before the call", "after it"]


def test_tensors_leave_their_graph() -> None:
    here, there = Holder(), Holder()
    run_on_both(here, there, lambda module: module.losses.append(module.layer(torch.ones(1, 2)).sum()))
    assert here.losses[0].requires_grad
    assert not there.losses[0].requires_grad


def test_what_cannot_be_sent_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"sets self\.lock to a value that cannot be sent to the other ranks"):
        run_on_both(Holder(), Holder(), lambda module: setattr(module, "lock", threading.Lock()))


def test_objects_stay_the_same_objects() -> None:
    here = Holder()
    there = copy.deepcopy(here)
    meter, values = there.meter, there.meter.values

    def keep_and_update(module: Holder) -> None:
        module.meter.update(3.0)
        module.kept = [module.meter, module.layer, module.layer.weight]  # type: ignore[assignment]

    run_on_both(here, there, keep_and_update)
    assert there.meter is meter
    assert there.meter.values is values
    assert values == [0.0, 3.0]
    assert [a is b for a, b in zip(there.kept, [meter, there.layer, there.layer.weight], strict=True)] == [True] * 3  # type: ignore


def test_a_learning_rate_that_a_step_sets_is_set_on_every_rank() -> None:
    """Otherwise each stage would train at a rate of its own."""

    class FakeTrainer:
        def __init__(self, module: nn.Module) -> None:
            self.callbacks: list[Any] = []
            self.optimizers = [torch.optim.SGD(module.parameters(), lr=1.0)]
            scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 1)
            self.lr_scheduler_configs = [SimpleNamespace(scheduler=scheduler)]
            self.strategy = self

    def warm_up(module: Any) -> None:
        module._trainer.lr_scheduler_configs[0].scheduler.step()
        module._trainer.optimizers[0].param_groups[0]["lr"] *= 0.5

    here, there = Holder(), Holder()
    for module in (here, there):
        module._trainer = FakeTrainer(module)  # type: ignore[assignment]
    run_on_both(here, there, warm_up)
    assert there._trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)  # type: ignore[attr-defined, union-attr]
    assert there._trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1  # type: ignore[attr-defined, union-attr]
    assert there._trainer.optimizers[0].param_groups[0]["params"][0] is there.layer.weight  # type: ignore[attr-defined, union-attr]


def test_what_has_not_changed_since_is_known_without_another_look() -> None:
    here = Holder()
    before = StepAttributes(here, Members(here), {})
    still = before.still()
    assert still is not None
    here.number = 7  # type: ignore[assignment]
    assert before.still() is None
    assert still.restore()
    assert before.still() is still
    here.batches = iter([1, 2])
    assert StepAttributes(here, Members(here), {}).still() is None, "what was drawn from it could not be put back"
