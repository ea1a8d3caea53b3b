"""States of the default random generators: those of Python, numpy and torch."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


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
        state["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Inverse of :func:`rng_state`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def python_rng() -> tuple[Any, ...]:
    """State of the generators that draw even while tensors are fake, python's and numpy's; comparable."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    return random.getstate(), *_comparable(numpy.random.get_state())


def _comparable(state: Any) -> tuple[Any, ...]:
    """A state of numpy's generator, of which arrays are no part."""
    if state is None:
        return ()
    if isinstance(state, dict):  # of another generator than numpy's usual one
        return (pickle.dumps(state),)
    name, keys, *rest = state
    return name, keys.tobytes(), *rest


def same_rng(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two states of the generators are equal, the current device's included."""
    nothing = torch.empty(0)
    return bool(
        torch.equal(one["torch"], other["torch"])
        and torch.equal(one.get("cuda", nothing), other.get("cuda", nothing))
        and one["python"] == other["python"]
        and _comparable(one.get("numpy")) == _comparable(other.get("numpy"))
    )
