"""Canaries of what is private around the steps of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_fxpipe._compat.step_hooks import innermost_step_hooks, wrapped_step_hooks


def test_hooks_around_an_optimizers_step_are_wrapped_for_a_while() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    called: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: called.append("own before")),
        optimizer.register_step_post_hook(lambda *_: called.append("own after")),
        register_optimizer_step_pre_hook(lambda *_: called.append("before")),
        register_optimizer_step_post_hook(lambda *_: called.append("after")),
    ]

    def wrap(hook: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            called.append("wrapped")
            return hook(*args)

        return wrapped

    try:
        with wrapped_step_hooks(optimizer, wrap):
            optimizer.step()
        within, called[:] = list(called), []
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert sorted(called) == ["after", "before", "own after", "own before"]
    assert within == [word for name in called for word in ("wrapped", name)]


def test_the_innermost_hooks_are_next_to_the_step_and_are_not_wrapped() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    called: list[str] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            called.append("step")

    def note(word: str) -> Any:
        return lambda *_: called.append(word)

    optimizer = Noting([parameter], lr=0.1)
    optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))
    handles = innermost_step_hooks(optimizer, note("just before"), note("just after"), note("last"))
    optimizer.register_step_post_hook(note("after, too"))
    with wrapped_step_hooks(optimizer, lambda hook: note("wrapped")):
        optimizer.step()
    assert called == ["wrapped", "just before", "step", "just after", "wrapped", "last", "wrapped"]
    called.clear()
    optimizer.step()
    assert called == ["before", "just before", "step", "just after", "after", "last", "after, too"]
    for handle in handles:
        handle.remove()
    called.clear()
    optimizer.step()
    assert called == ["before", "step", "after", "after, too"]
