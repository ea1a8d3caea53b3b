"""What ranks agree on."""

from __future__ import annotations

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


def agree(monkeypatch: pytest.MonkeyPatch, *values: Any) -> None:
    monkeypatch.setattr(agreement, "gather_values", lambda group, value: list(values))
    check_agreement(None, values[0], BatchError("They differ."))


def test_who_abstains_does_not_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    agree(monkeypatch, 1, None, 1)
    with pytest.raises(BatchError) as caught:
        agree(monkeypatch, 1, None, 2)
    assert caught.value.observed == "rank 0: 1; rank 1: None; rank 2: 2"
