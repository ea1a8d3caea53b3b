"""What user code leaves behind in a module is undone, wherever it is."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_fxpipe.user_code.members import Members
from lightning_fxpipe.user_code.undo import Remembered, UndoneRuns, undo_after


class Tracker:
    """An object of the user's own, that holds others."""

    def __init__(self) -> None:
        self.best = 1.0
        self.history: list[float] = [1.0]
        self.inner: Any = None


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.norm = nn.BatchNorm1d(2)
        self.metric = MeanMetric()
        self.number, self.tensor = 1.0, torch.zeros(3)
        self.losses = [torch.zeros(1)]
        self.by_name: dict[str, Any] = {"train": [1]}
        self.seen = {1, 2}
        self.recent: deque[int] = deque([1, 2], maxlen=2)
        self.counts = Counter("ab")
        self.array = np.zeros(2)
        self.tracker = Tracker()
        self.tracker.inner = self.pair = (Tracker(), [0])
        self.generator = torch.Generator().manual_seed(1)


def state(module: Holder) -> Any:
    """All of it as values that ``==`` compares."""
    trackers = [(t.best, list(t.history)) for t in (module.tracker, module.pair[0])]
    plain = module.number, dict(module.by_name), list(module.by_name["train"]), set(module.seen), list(module.recent)
    tensors = [t.tolist() for t in (module.tensor, *module.losses, *module.buffers(), *module.parameters())]
    own = sorted(name for name in vars(module) if not name.startswith("_"))
    metric = float(module.metric.mean_value), module.metric._update_count
    arrays = module.array.tolist(), dict(module.counts), list(module.pair[1])
    return own, plain, tensors, trackers, metric, arrays, module.generator.get_state().tolist(), module.norm.training


CHANGES: dict[str, Callable[[Holder], Any]] = {
    "number": lambda m: setattr(m, "number", 2.0),
    "new attribute": lambda m: setattr(m, "last", torch.ones(2)),
    "removed attribute": lambda m: delattr(m, "number"),
    "tensor in place": lambda m: m.tensor.add_(1),
    "tensor in a list in place": lambda m: m.losses[0].add_(1),
    "list appended": lambda m: m.losses.append(torch.ones(1)),
    "list replaced": lambda m: setattr(m, "losses", []),
    "list in a dict": lambda m: m.by_name["train"].append(2),
    "key": lambda m: m.by_name.update(best=1),
    "set": lambda m: m.seen.add(5),
    "deque": lambda m: m.recent.append(3),
    "counter": lambda m: m.counts.update("a"),
    "array": lambda m: m.array.__iadd__(1),
    "object": lambda m: setattr(m.tracker, "best", 0.5),
    "list in an object": lambda m: m.tracker.history.append(0.5),
    "object in a tuple": lambda m: setattr(m.pair[0], "best", 0.1),
    "list in a tuple": lambda m: m.pair[1].append(1),
    "buffer in place": lambda m: m.mean.add_(1),
    "buffer replaced": lambda m: setattr(m, "mean", torch.ones(2)),
    "batch norm": lambda m: m.norm(torch.randn(4, 2)),
    "train mode": lambda m: m.eval(),
    "metric": lambda m: m.metric.update(3.0),
    "generator": lambda m: torch.rand(1, generator=m.generator),
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_each_change_is_undone(name: str) -> None:
    module = Holder()
    before = state(module)
    with undo_after(module):
        CHANGES[name](module)
        changed = vars(module).get("number") is None or state(module) != before
    assert changed
    assert state(module) == before


def test_all_changes_are_undone_after_an_error() -> None:
    module = Holder()
    before = state(module)

    def change_everything() -> None:
        with undo_after(module):
            for change in CHANGES.values():
                change(module)
            raise KeyError

    with pytest.raises(KeyError):
        change_everything()
    assert state(module) == before


def test_default_generators_go_on_where_they_were() -> None:
    expected = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    with undo_after(nn.Identity()):
        _ = torch.rand(1), random.random(), np.random.rand()
    assert [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()] == expected


def test_parameters_are_restored() -> None:
    module = Holder()
    weight = module.layer.weight.tolist()
    with undo_after(module), torch.no_grad():
        module.layer.weight.mul_(0.5)
    assert module.layer.weight.tolist() == weight


def test_the_gradients_of_a_graph_stay_right() -> None:
    """What nobody has changed is not written to: autograd would refuse to go on with it."""
    module = Holder()
    loss = (module.tensor * module.layer.weight.sum()).exp().sum()
    with undo_after(module):
        module.number = 3.0
    loss.backward()


def test_gradients_are_restored() -> None:
    module = Holder()
    module.layer(torch.ones(1, 2)).sum().backward()
    gradients = module.layer.weight.grad, module.layer.bias.grad
    with undo_after(module):
        module.layer(torch.ones(1, 2)).sum().backward()
        module.layer.bias.grad = None
    assert module.layer.weight.grad is gradients[0]
    assert module.layer.bias.grad is gradients[1]
    assert gradients[0].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_only_what_is_written_to_is_copied() -> None:
    """A buffer for replay may be larger than the memory that is left."""
    module = Holder()
    module.tensor = torch.zeros(1).expand(2**50)  # nobody could copy that
    with undo_after(module):
        _ = module.tensor[:5] + 1
        module.mean[1] = 3.0
    assert module.mean.tolist() == [0.0, 0.0]


def test_views_of_one_memory_are_restored() -> None:
    module = Holder()
    module.losses = [module.tensor[:2], module.tensor[1:]]
    with undo_after(module):
        module.losses[0].add_(1)
        module.losses[1].mul_(3)
        module.tensor.data.sub_(1)
    assert module.tensor.tolist() == [0.0, 0.0, 0.0]


def test_what_is_remembered_comes_back() -> None:
    """A tensor whose elements are one place in memory, as placeholders have them, cannot have been written to."""
    module = Holder()
    module.tensor = torch.zeros(1).expand(2**50)
    start = Remembered(module)
    module.number = 3.0
    module.mean[1] = 3.0
    module.losses[0].add_(1)
    start.restore()
    assert module.number == 1.0
    assert module.mean.tolist() == [0.0, 0.0]
    assert module.losses[0].tolist() == [0.0]


def test_several_runs_are_undone_with_one_look() -> None:
    """Each run's writes are undone after it, for the next run to begin as the first; the rest after all of them."""
    module = Holder()
    before = state(module)
    runs = UndoneRuns(Members(module), module)
    with runs:
        for has_written in (True, False):
            with runs.one() as run:
                if has_written:
                    module.mean.add_(1)
            assert run.has_changed_any is has_written, "of this run alone"
            assert module.mean.tolist() == [0.0, 0.0]
        module.number = 2.0
    assert runs.has_assigned
    assert state(module) == before


def test_attributes_are_what_they_were_for_the_next_of_several_runs() -> None:
    module = Holder()
    runs = UndoneRuns(Members(module), module)
    with runs:
        for _ in range(2):
            with runs.one():
                assert module.number == 1.0
                assert not hasattr(module, "new")
                module.number = 2.0
                module.new = 1
            assert runs.has_assigned


WRITES: dict[str, Callable[[Holder], Any]] = {
    "by name": lambda m: nn.init.constant_(tensor=m.mean, val=1.0),
    "in a list": lambda m: torch._foreach_add_([torch.ones(2), m.mean], 1.0),
    "as a result": lambda m: torch.add(torch.ones(2), 1, out=m.mean),
    "without gradients": lambda m: m.mean.data.add_(1),
    "detached": lambda m: m.mean.detach().mul_(2).add_(3),
    "a view": lambda m: m.mean[:1].fill_(7),
    "item by item": lambda m: m.mean.__setitem__(0, 5),
    "running values": lambda m: nn.functional.batch_norm(torch.rand(4, 2), m.mean, m.norm.running_var, training=True),
    "a parameter": lambda m: m.layer.weight.data.zero_(),
    "too long weights": lambda m: nn.functional.embedding(torch.tensor([0]), m.layer.weight.detach(), max_norm=0.01),
    "an operator": lambda m: torch.ops.aten.add_.Tensor(m.mean, torch.ones(2)),
    "an operator's packet": lambda m: torch.ops.aten.add_(m.mean, torch.ones(2)),
    "in vmap": lambda m: torch.vmap(lambda x: m.mean.add_(1).sum() + x)(torch.ones(2)),
    "an attribute": lambda m: m.losses[0].add_(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_whatever_call_writes_in_several_runs_is_undone(write: Callable[[Holder], Any]) -> None:
    """The calls of torch are watched, and their operators only where they get a tensor that must stay."""
    module = Holder()
    before = {name: tensor.clone() for name, tensor in {**module.state_dict(), "losses": module.losses[0]}.items()}
    runs = UndoneRuns(Members(module), module)
    with runs, runs.one() as run:
        write(module)
    assert run.has_changed_any
    now = {**module.state_dict(), "losses": module.losses[0]}
    assert all(torch.equal(now[name], before[name]) for name in before)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x


def test_what_torchscript_writes_in_several_runs_is_undone() -> None:
    """Its operators are calls of torch of which no function mode hears."""
    module = Holder()
    module.scripted = torch.jit.script(Scripted())
    runs = UndoneRuns(Members(module), module)
    with runs, runs.one() as run:
        module.scripted(torch.ones(2))
    assert run.has_changed_any
    assert module.scripted.count.tolist() == [0.0, 0.0]


def test_random_numbers_are_remembered() -> None:
    """A first attempt has drawn some, and the second draws them again."""
    remembered = Remembered(nn.Linear(2, 2))
    first = torch.rand(3), random.random()
    remembered.restore()
    again = torch.rand(3), random.random()
    assert torch.equal(first[0], again[0])
    assert first[1] == again[1]
