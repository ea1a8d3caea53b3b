"""How much memory there is, and how much of it autograd takes."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_fxpipe.stages import memory
from lightning_fxpipe.stages.memory import SavedBytes, available_memory, memory_for_rank


def test_the_smaller_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_of_machine", lambda: 1000)
    monkeypatch.setattr(memory, "_of_container", lambda: 700)
    assert available_memory() == 700
    assert memory_for_rank(torch.device("cpu"), 2) == 350


def test_where_nobody_says_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    assert memory_for_rank(torch.device("cpu"), 2) is None


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux")
def test_the_machine_says_what_is_free() -> None:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    found = memory._of_machine()
    assert found is not None
    assert 0 < found < int(total.split()[1]) * 1024


# ------------------------------------------------------------------ what autograd keeps

FLOAT = 4


def saved(run: nn.Module, x: torch.Tensor) -> int:
    counter = SavedBytes((*run.parameters(), x))
    with counter.counting():
        run(x)
    return counter.num_bytes


def test_each_memory_counts_once_and_not_what_is_there_anyway() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    # The linear layer keeps its input, and tanh its result, which the next layer's input is.
    assert saved(nn.Linear(8, 8), x) == 0
    assert saved(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)), x) == 3 * 16 * FLOAT


def test_what_was_counted_is_given_back() -> None:
    """A saved result that kept the operation which has made it would never be: Python does not see such cycles."""
    run, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)), torch.randn(3, 8, requires_grad=True)
    kept: list[weakref.ref[torch.Tensor]] = []
    run[1].register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    saved(run, x)
    gc.collect()
    assert [reference() for reference in kept] == [None]


def test_what_is_computed_again_is_not_kept() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(checkpoint(self.inner, x * 2, use_reentrant=False))

    # The block's input and tanh's result.
    assert saved(Checkpointed(), torch.randn(3, 8, requires_grad=True)) == 2 * 3 * 8 * FLOAT


def test_a_sparse_tensor_has_no_memory_to_share() -> None:
    class Sparse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(torch.eye(3).to_sparse(), x)

    assert saved(Sparse(), torch.randn(3, 2, requires_grad=True)) >= 3 * FLOAT


def test_a_sparse_tensor_may_be_there_anyway() -> None:
    assert SavedBytes([torch.eye(3).to_sparse()]).num_bytes == 0
