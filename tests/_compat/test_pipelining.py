"""A canary for what ``_compat.pipelining`` uses of torch's stages; see also ``tests/ranks/test_memory.py``."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from lightning_fxpipe._compat.pipelining import FrugalStage

OVERRIDDEN = [name for name, value in vars(FrugalStage).items() if inspect.isfunction(value) and not name.startswith("_")]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_the_overridden_methods_are_torchs(name: str) -> None:
    theirs, ours = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (PipelineStage, FrugalStage))
    assert theirs[:2] == ours[:2]


def test_a_stage_lists_what_it_receives() -> None:
    """Under the names that are used; `fwd_cache` is gone where torch makes its buffers late."""
    source = inspect.getsource(inspect.getmodule(PipelineStage) or torch)
    assert "self.args_recv_info: dict[int, tuple[" in source
    assert "self.grad_recv_info" in source
    assert "self.fwd_cache" in source or "release_fwd_send_outputs" in source
