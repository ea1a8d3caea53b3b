"""Which entries a rank receives when a hook ends, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fxpipe.distributed.agreement import fingerprint
from lightning_fxpipe.distributed.topology import Placement, Topology
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.hooks import rank_zero_changes as tested
from lightning_fxpipe.hooks.rank_zero_changes import followed
from lightning_fxpipe.hooks.whole_optimizers import WholeOptimizers

BEFORE = torch.ones(3)


def changes(monkeypatch: pytest.MonkeyPatch, zeros: Any, mine: Any) -> dict[Any, Any]:
    """Returns the entries received by a rank that has ``mine`` where rank 0 has ``zeros``."""
    names = {("value of", "weight"): zeros, ("value of", "other"): BEFORE}
    own = {("value of", "weight"): mine}
    fingerprints = {name: fingerprint(value) for name, value in names.items()}
    monkeypatch.setattr(tested, "gather_values", lambda group, value: [fingerprints, value])
    monkeypatch.setattr(tested, "broadcast_value", lambda value, source, group: [zeros])
    topology = Topology(group=None, control_group=None, rank=0, placement=Placement(num_ranks=2), device=torch.device("cpu"))
    before = {("value of", "weight"): fingerprint(BEFORE)}
    return tested.rank_zero_changes(own, before, topology, "on_train_end")


def test_a_rank_receives_what_rank_zero_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where both have changed it, each in its own way."""
    assert changes(monkeypatch, BEFORE, BEFORE) == {}
    for mine in (BEFORE, BEFORE * 2):
        (found,) = changes(monkeypatch, BEFORE * 3, mine).values()
        assert found.tolist() == [3, 3, 3]


def test_a_change_on_another_rank_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device is rank 0, and would not make it."""
    with pytest.raises(UnsupportedError, match="changes the value of weight on one rank of the pipeline, but not on rank 0."):
        changes(monkeypatch, BEFORE, BEFORE * 2)


def test_another_group_on_one_rank_alone_is_refused() -> None:
    """Its parameters would be trained by some ranks only."""
    said = "A hook leaves an optimizer with a different number of parameter groups on one rank of the pipeline than on rank 0."
    topology: Any = SimpleNamespace(is_last=True)
    optimizers = WholeOptimizers(nn.Linear(1, 1), topology, lambda: None)
    own: Any = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"lr": 0.1, "params": []}]), is_shared_out=False)
    optimizers.follow([own])
    (groups, *_) = optimizers.entries(states=False)
    with pytest.raises(UnsupportedError, match=said):
        optimizers.follow_changes({groups: 2})


def test_the_order_of_elements_counts() -> None:
    values = torch.arange(1.0, 6.0)
    assert fingerprint(values) != fingerprint(values.flip(0))
    assert fingerprint({"a": values, "b": None}) == fingerprint({"a": values.clone(), "b": None})
    assert fingerprint(values.to_sparse()) != fingerprint(values.flip(0).to_sparse())
    assert fingerprint(torch.ones(9, dtype=torch.uint8)[1:]) != fingerprint(torch.ones(9, dtype=torch.uint8)[2:])


def test_values_are_taken_over_in_the_memory_of_the_present_ones() -> None:
    """The optimizer, and views of user code, keep what they have."""
    present = {"momentum": torch.zeros(2), "step": 1}
    found = followed(present, {"momentum": torch.ones(2), "step": 2}, torch.device("cpu"))
    assert found["momentum"] is present["momentum"]
    assert present["momentum"].tolist() == [1, 1]
    assert found["step"] == 2
    assert followed(None, torch.ones(2), torch.device("cpu")).tolist() == [1, 1]
    assert followed(present["momentum"], None, torch.device("cpu")) is None
