"""Names of torch's autograd engine that are not public. torch 2.9-2.15; tests/_compat/test_autograd.py calls each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def after_backward(callback: Callable[[], None]) -> None:
    """Has ``callback`` called when the backward pass that now runs has computed all gradients.

    Called in the backward of an operation. DistributedDataParallel and FSDP end their backward passes so.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def backward_keeps_graph() -> bool:
    """Returns True if the backward pass that now runs was called with ``retain_graph=True``. Called in the backward of an
    operation.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def runs_before(ctx: Any, index: int) -> bool:
    """Returns True if the backward pass that now runs goes on to what an operation got as its input ``index``.

    It does not where only the gradients of others were asked for, as by ``autograd.grad``. Called in the operation's backward;
    the input is no leaf.
    """
    function, _ = ctx.next_functions[index]
    return bool(torch._C._will_engine_execute_node(function))


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Returns True if a parameter's gradient has hooks."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)
