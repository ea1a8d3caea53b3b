"""Undoes what a run of user code leaves behind, where it is one run more than the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_fxpipe.rng import isolated_rng, rng_state, set_rng_state
from lightning_fxpipe.snapshot import user_state
from lightning_fxpipe.writes import undone_writes


@contextmanager
def undone(root: nn.Module, *functions: Callable[..., Any]) -> Iterator[None]:
    """After the block the module and all that its code reaches are what they were, and so are the random generators.

    What is logged, printed or written to files is the caller's to prevent.

    Args:
        root: The module.
        *functions: Code that runs beside its methods.
    """
    before = user_state(root, *functions)
    gradients = [(parameter, parameter.grad) for parameter in root.parameters() if not parameter.is_meta]
    held = [gradient for _, gradient in gradients if gradient is not None]
    tensors = (*before.tensors(), *root.parameters(), *root.buffers(), *held)
    try:
        with isolated_rng(), undone_writes(tensors):
            yield
    finally:
        before.restore()
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient


@contextmanager
def undone_if_raised(kind: type[Exception], root: nn.Module) -> Iterator[None]:
    """Where the block raises an error of a kind, the module and all that its code reaches are what they were before it.

    Args:
        kind: The kind.
        root: The module.
    """
    before, state = user_state(root), rng_state()
    tensors = [tensor for tensor in (*before.tensors(), *root.buffers()) if not tensor.is_meta]
    values = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    except kind:
        before.restore()
        set_rng_state(state)
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data.copy_(value)
        raise
