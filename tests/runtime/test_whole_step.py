"""A step that runs whole may not use tensors of other stages in its trial."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.runtime.whole_step import WholeSteps


def test_a_parameter_of_another_stage_outside_the_pipelined_calls_is_refused() -> None:
    module = nn.Linear(2, 2, device="meta")
    run: Any = SimpleNamespace(_module=module, _topology=SimpleNamespace(device=torch.device("cpu")))
    with (
        pytest.raises(UnsupportedError, match="The step uses parameters outside the pipelined calls") as caught,
        WholeSteps.no_placeholders(run),
    ):
        module.weight.sum()
    assert caught.value.todo
