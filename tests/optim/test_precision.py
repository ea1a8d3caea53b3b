"""The Trainer's precision plugin in a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_fxpipe.optim.precision import step_context
from lightning_fxpipe.user_code.step import StepKind


@pytest.mark.parametrize("kind", list(StepKind))
def test_each_step_has_its_context(kind: StepKind) -> None:
    class Plugin:
        def __getattr__(self, name: str) -> Any:
            return lambda: name

    words = {StepKind.TRAIN: "train", StepKind.VALIDATE: "val", StepKind.TEST: "test", StepKind.PREDICT: "predict"}
    assert step_context(Plugin(), kind) == f"{words[kind]}_step_context"  # type: ignore[comparison-overlap]
