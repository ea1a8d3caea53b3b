"""Values of user code on their way to the other ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_fxpipe._compat.torch import tree_map
from lightning_fxpipe.errors import UnsupportedError


def sendable(value: Any, refusal: Callable[[str], UnsupportedError]) -> Any:
    """A copy of the value that can be sent, with its tensors on the CPU and without gradients.

    Args:
        value: Anything.
        refusal: Makes the error where the value cannot be pickled, from what was observed.
    """
    value = tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, value)
    require_picklable(value, refusal)
    return value


def require_picklable(value: Any, refusal: Callable[[str], UnsupportedError]) -> None:
    """Raises the error that ``refusal`` makes from what was observed, where a value cannot be pickled."""
    if type(value) in (type(None), bool, int, float, str, Tensor):  # known to be, and tensors may be large
        return
    try:
        pickle.dumps(value)
    except Exception as error:
        raise refusal(f"a {type(value).__name__}, which cannot be pickled: {error}") from error
