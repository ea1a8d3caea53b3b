"""The default random generators at one state again and again: each microbatch's step begins as the batch's."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch
from torch import Tensor

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe.rng import rng_state, same_rng, set_rng_state


class Rewind:
    """Brings the generators to one state again and again, and says whether they have drawn since.

    For this numpy's generator is read and written as memory: its own functions need 40 microseconds for either.

    Args:
        state: Of :func:`rng_state`.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self._others = {name: value for name, value in state.items() if name != "numpy"}
        self._tensors = {name: _bytes_of(value) for name, value in state.items() if isinstance(value, Tensor)}
        self._numpy: bytes | None = None

    def is_at(self, state: dict[str, Any]) -> bool:
        """Whether another state is the same."""
        return same_rng(self._state, state)

    def rewind(self) -> None:
        """Brings the generators to the state."""
        address = _address_of(self._state.get("numpy"))
        if self._numpy is None or address is None:
            set_rng_state(self._state)
            self._numpy = None if address is None else ctypes.string_at(address, _NUMPY_BYTES)
            return
        set_rng_state(self._others)
        sys.modules["numpy"].random.seed(0)  # drops the second of a pair of normal numbers, which is no part of the memory
        ctypes.memmove(address, self._numpy, _NUMPY_BYTES)

    def have_drawn(self) -> bool:
        """Whether the generators have drawn since :meth:`rewind`; without one, since they had the state."""
        address = _address_of(self._state.get("numpy"))
        if self._numpy is None or address is None:
            return not same_rng(self._state, rng_state())
        return (
            ctypes.string_at(address, _NUMPY_BYTES) != self._numpy
            or random.getstate() != self._state["python"]
            or _bytes_of(torch.get_rng_state()) != self._tensors["torch"]
            or ("cuda" in self._tensors and _bytes_of(torch.cuda.get_rng_state()) != self._tensors["cuda"])
        )


# Of the Mersenne Twister: 624 words, and the place among them.
_NUMPY_BYTES = 625 * 4


def _address_of(state: Any) -> int | None:
    """Where numpy's generator has its memory; None unless that is all there is to a state."""
    if not isinstance(state, tuple) or state[0] != "MT19937" or state[3]:  # the last: a normal number waits
        return None
    generator = sys.modules["numpy"].random.get_bit_generator()
    return int(generator.ctypes.state_address) if type(generator).__name__ == "MT19937" else None


def _bytes_of(state: Tensor) -> bytes:
    with unwatched_torch():
        return state.numpy().tobytes()
