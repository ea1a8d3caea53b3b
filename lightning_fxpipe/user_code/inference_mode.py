"""Steps run without inference modes of their own.

    with torch.inference_mode():
        reference = self(x)                      # the first of the stages' calls

Tensors made in such a mode have no versions, by which changes in place are seen, and the call that begins the pipeline may lie
in its block, while others are trained. Gradients are off there instead: values are the same.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from lightning_fxpipe._compat.torch import patched_attributes


def without_inference_modes() -> AbstractContextManager[None]:
    """In the block, code that enters ``torch.inference_mode()`` turns gradients off, and on with ``inference_mode(False)``."""
    entered: list[AbstractContextManager[None]] = []

    def enter(mode: torch.inference_mode) -> None:
        entered.append(torch.set_grad_enabled(not mode.mode))

    def leave(mode: torch.inference_mode, *error: Any) -> None:
        entered.pop().__exit__(*error)

    return patched_attributes((torch.inference_mode, "__enter__", enter), (torch.inference_mode, "__exit__", leave))
