"""What ranks agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lightning_fxpipe.distributed import agreement
from lightning_fxpipe.distributed.agreement import check_agreement, digest
from lightning_fxpipe.errors import BatchError


def test_a_digest_tells_batches_apart() -> None:
    x = torch.arange(6.0)
    others = [x.reshape(2, 3), x.reshape(3, 2), x.view(torch.int32), x + 1, [x, x]]
    assert len({digest(batch) for batch in [x, *others]}) == len(others) + 1
    assert digest({"x": x}) == digest({"x": x.clone()})


def agree(monkeypatch: pytest.MonkeyPatch, *values: Any, reasons: Sequence[Sequence[str]] = ()) -> None:
    answers = [(value, some) for value, some in zip(values, reasons or [()] * len(values), strict=True)]
    monkeypatch.setattr(agreement, "gather_values", lambda group, value: answers)
    check_agreement(None, values[0], BatchError("They differ."))


def test_who_abstains_does_not_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    agree(monkeypatch, 1, None, 1)
    with pytest.raises(BatchError) as caught:
        agree(monkeypatch, 1, None, 2)
    assert caught.value.observed == "rank 0: 1; rank 1: None; rank 2: 2"


def test_reasons_that_not_all_ranks_have_are_told_and_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    agree(monkeypatch, 1, 1, reasons=[("it rains",), ("the sun shines",)])
    with pytest.raises(BatchError) as caught:
        agree(monkeypatch, 1, 2, reasons=[("it rains",), ("it rains", "the sun shines", "it is warm")])
    assert caught.value.observed == "rank 0: 1; rank 1: 2, since the sun shines, it is warm"
