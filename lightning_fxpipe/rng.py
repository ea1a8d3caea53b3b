"""States of the default random generators: those of Python, numpy and torch."""

from __future__ import annotations

import ctypes
import pickle
import random
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Restores the generators of python, numpy and torch after the block."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


@contextmanager
def kept_generators(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Restores other generators of torch after the block."""
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def rng_state() -> dict[str, Any]:
    """States of the generators of python, numpy (where it is in use) and torch, of the current device too."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _numpy_generator.state(numpy)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Inverse of :func:`rng_state`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        _numpy_generator.set_state(sys.modules["numpy"], state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def host_state() -> bytes:
    """Returns the states of Python's and numpy's generators in :data:`HOST_STATE_BYTES` bytes.

    Of numpy's none if it is not in use, or is not a Mersenne Twister.
    """
    _, words, gauss = random.getstate()
    python = _PYTHON_STATE.pack(*words, gauss is not None, gauss or 0.0)
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else _numpy_generator.state(numpy)
    if not isinstance(state, tuple) or state[0] != "MT19937":
        return python.ljust(HOST_STATE_BYTES, b"\0")
    _, keys, position, has_gauss, gauss = state
    return python + _NUMPY_STATE.pack(True, keys.astype("<u4").tobytes(), position, bool(has_gauss), gauss)


def set_host_state(state: bytes) -> None:
    """Inverse of :func:`host_state`; numpy's generator keeps its state if there is none."""
    *words, has_gauss, gauss = _PYTHON_STATE.unpack_from(state)
    random.setstate((_PYTHON_VERSION, tuple(words), gauss if has_gauss else None))
    is_there, keys, position, has_gauss, gauss = _NUMPY_STATE.unpack_from(state, _PYTHON_STATE.size)
    if is_there and (numpy := sys.modules.get("numpy")) is not None:
        words_of_numpy = numpy.frombuffer(keys, dtype="<u4").astype(numpy.uint32)
        _numpy_generator.set_state(numpy, ("MT19937", words_of_numpy, position, int(has_gauss), gauss))


_PYTHON_VERSION = random.getstate()[0]
_PYTHON_STATE = struct.Struct("<625I?d")  # 624 words and the place among them; the second of a pair of normal numbers
_NUMPY_STATE = struct.Struct("<?2496sI?d")
HOST_STATE_BYTES = _PYTHON_STATE.size + _NUMPY_STATE.size


def python_rng() -> tuple[Any, ...]:
    """State of the generators that draw even while tensors are fake, python's and numpy's; comparable."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    return random.getstate(), *_comparable(_numpy_generator.state(numpy))


def _comparable(state: Any) -> tuple[Any, ...]:
    """A state of numpy's generator, of which arrays are no part."""
    if state is None:
        return ()
    if isinstance(state, dict):  # of another generator than numpy's usual one
        return (pickle.dumps(state),)
    name, keys, *rest = state
    return name, keys.tobytes(), *rest


def same_rng(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns True if two states of the generators are equal, the current device's included."""
    mine, others = one.get("numpy"), other.get("numpy")
    return bool(
        (mine is others or _comparable(mine) == _comparable(others))
        and one["python"] == other["python"]
        and all(_same_tensor(one.get(name), other.get(name)) for name in ("torch", "cuda"))
    )


def _same_tensor(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


class _NumpyGenerator:
    """numpy's default generator. To read or write its state takes numpy 40 microseconds, and its memory less than 3.

    A normal number that waits, the second of a pair, is no part of that memory: such a state numpy reads and writes.
    """

    def __init__(self) -> None:
        self._memory: bytes | None = None  # with which the generator has this state
        self._state: Any = None

    def state(self, numpy: Any) -> Any:
        """Replaces ``numpy.random.get_state``."""
        address = _address_of_generator(numpy)
        if address is None:
            return numpy.random.get_state()
        memory = ctypes.string_at(address, _NUMPY_BYTES)
        if memory != self._memory:
            state = numpy.random.get_state()
            if state[3]:
                return state
            self._memory, self._state = memory, state
        return self._state

    def set_state(self, numpy: Any, state: Any) -> None:
        """Replaces ``numpy.random.set_state``."""
        address = _address_of_generator(numpy)
        if address is None or not isinstance(state, tuple) or state[0] != "MT19937" or state[3]:
            self._memory = self._state = None
            numpy.random.set_state(state)
            return
        if self._memory is None or state is not self._state:
            self._memory, self._state = state[1].tobytes() + int(state[2]).to_bytes(4, sys.byteorder), state
        numpy.random.seed(0)  # drops a normal number that waits
        ctypes.memmove(address, self._memory, _NUMPY_BYTES)


_numpy_generator = _NumpyGenerator()  # which is the process's, too

# Of the Mersenne Twister: 624 words, and the place among them.
_NUMPY_BYTES = 625 * 4


def _address_of_generator(numpy: Any) -> int | None:
    """Returns the memory address of numpy's default generator; None if another generator has taken its place."""
    generator = numpy.random.get_bit_generator()
    return int(generator.ctypes.state_address) if type(generator).__name__ == "MT19937" else None
