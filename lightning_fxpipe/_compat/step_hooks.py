"""Hooks around the steps of optimizers. torch 2.9-2.15; tests/_compat/test_step_hooks.py calls each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

# Hooks around the steps of all optimizers can be registered publicly, but not found.
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

Hook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]


class _Ours:
    """A hook of this package, which no user sees."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._hook(optimizer, args, kwargs)


@contextmanager
def wrapped_step_hooks(optimizer: Optimizer, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """During the block the hooks around an optimizer's step, its own and everybody's, are what ``wrap`` makes of them.

    Not those of :func:`innermost_step_hooks`. They can be registered publicly, but not found.
    """
    own = [getattr(optimizer, name, {}) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")]
    shared: Any = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    before = [(hooks, dict(hooks)) for hooks in (*own, *shared)]
    for hooks, originals in before:
        hooks.update({key: wrap(hook) for key, hook in originals.items() if not isinstance(hook, _Ours)})
    try:
        yield
    finally:
        for hooks, originals in before:
            hooks.update({key: hook for key, hook in originals.items() if key in hooks})


def innermost_step_hooks(optimizer: Optimizer, before: Hook, after: Hook, last: Hook) -> tuple[RemovableHandle, ...]:
    """Registers hooks on an optimizer: ``before`` and ``last`` run after those that are there, and ``after`` before all others.

    There is no public way to have a hook run before others.
    """
    first_after = optimizer.register_step_post_hook(_Ours(after))
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(first_after.id, last=False)
    return optimizer.register_step_pre_hook(_Ours(before)), first_after, optimizer.register_step_post_hook(_Ours(last))
