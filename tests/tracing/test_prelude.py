"""What is noted of the code before the model's call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.tracing.prelude import dry_run_of_prelude

LOOKS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "item": lambda x, n: x.sum().item(),
    "bool": lambda x, n: bool(x.sum() > 0),
    "mask": lambda x, n: x[x > 0.5],
    "one argument of where": lambda x, n: torch.where(x > 0.5),
    "one_hot": lambda x, n: nn.functional.one_hot(n),
    "repeats": lambda x, n: x.repeat_interleave(n, dim=0),
    "count": lambda x, n: torch.bincount(n),
    "unique_consecutive": lambda x, n: n.unique_consecutive(),
}
HARMLESS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "arithmetic": lambda x, n: x * 2 + n[:, None],
    "index": lambda x, n: x[n],
    "where": lambda x, n: torch.where(x > 0.5, x, -x),
    "one_hot of so many": lambda x, n: nn.functional.one_hot(n, 5),
    "as often": lambda x, n: x.repeat_interleave(2, dim=0),
    "repeats with a size": lambda x, n: x.repeat_interleave(n, dim=0, output_size=6),
    "noise": lambda x, n: x + torch.randn_like(x),
}


def looks(code: Callable[[Tensor, Tensor], Any]) -> bool:
    with dry_run_of_prelude(nn.Identity(), code, (torch.rand(4, 3), torch.tensor([0, 1, 2, 3])), {}) as run:
        code(*run.args)
    assert run.facts is not None
    return run.facts.needs_values


@pytest.mark.parametrize("name", LOOKS)
def test_code_that_needs_values_is_noticed(name: str) -> None:
    assert looks(LOOKS[name])


@pytest.mark.parametrize("name", HARMLESS)
def test_code_that_needs_shapes_only_is_not(name: str) -> None:
    assert not looks(HARMLESS[name])
