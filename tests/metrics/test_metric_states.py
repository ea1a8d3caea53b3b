"""What a step changes in the states of its metrics is told, and makes the same of another rank's."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.metrics.metric_states import MetricStates, take_over_states


class Counts(Metric):
    """Keeps what it counts in every kind of thing."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(2))
        self.add_state("seen", [])
        self.register_buffer("running", torch.zeros(3))
        self.by_name = {"a": torch.zeros(2), "b": torch.zeros(2)}
        self.parts = [torch.zeros(2), torch.zeros(2)]
        self.names = {"x"}
        self.number = 0

    def update(self, x: Tensor) -> None:
        self.total = self.total + x

    def compute(self) -> Tensor:
        return self.total


# A change, and the attribute that it is found in.
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an update": (lambda m: m.update(torch.ones(2)), "total"),
    "in place": (lambda m: m.total.add_(1), "total"),
    "a new entry": (lambda m: m.seen.append(torch.ones(1)), "seen"),
    "a buffer in place": (lambda m: m.running.add_(1), "_buffers"),
    "another buffer": (lambda m: setattr(m, "running", torch.ones(3)), "_buffers"),
    "in a dict, in place": (lambda m: m.by_name["b"].add_(1), "by_name"),
    "a key": (lambda m: m.by_name.update(c=torch.ones(1)), "by_name"),
    "in a list, in place": (lambda m: m.parts[1].add_(1), "parts"),
    "a list, emptied": (lambda m: m.parts.clear(), "parts"),
    "a set": (lambda m: m.names.add("y"), "names"),
    "a number": (lambda m: setattr(m, "number", 1), "number"),
}


def state_of(metric: Any) -> Any:
    buffers = dict(metric.named_buffers())
    return [metric.total, metric.seen, metric.by_name, metric.parts, sorted(metric.names), metric.number, buffers]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_arrives_alone(name: str) -> None:
    here = Counts()
    here.seen.append(torch.zeros(1))
    there = copy.deepcopy(here)
    states = MetricStates({"counts": here})
    assert states.changes() == []
    change, attribute = CHANGES[name]
    change(here)
    changes = states.changes()
    assert {change.path[1] for change in changes} - {"_update_count"} == {attribute}
    take_over_states({"counts": there}, pickle.loads(pickle.dumps(changes)), torch.device("cpu"))
    assert str(state_of(there)) == str(state_of(here))


def test_of_a_list_that_has_grown_the_new_entries_are_told() -> None:
    here = Counts()
    here.seen.extend([torch.zeros(1), torch.ones(1)])
    states = MetricStates({"counts": here})
    here.seen = [*(tensor.clone() for tensor in here.seen), torch.full((1,), 2.0)]  # as torchmetrics' forward does
    (change,) = states.changes()
    assert change.start == 2
    assert [tensor.item() for tensor in change.value] == [2.0]


def test_a_state_that_cannot_be_sent_is_refused_with_its_place() -> None:
    here = Counts()
    states = MetricStates({"counts": here})
    here.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="state of the metric counts cannot be shared with the other ranks") as caught:
        states.changes()
    assert "lock is" in str(caught.value.observed)
    assert caught.value.todo
