"""Names of torch's autograd engine that are not public. torch 2.11-2.15; tests/_compat/test_autograd.py calls each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion


def after_backward(callback: Callable[[], None]) -> None:
    """Has ``callback`` called when the backward pass that now runs has computed all gradients.

    Called in the backward of an operation. DistributedDataParallel and FSDP end their backward passes so.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def unused_inputs_may_be_split_off() -> bool:
    """Whether torch passes by an input that has no part in a stage's output, in half a backward pass. Before 2.13 it raises."""
    return TorchVersion(torch.__version__) >= TorchVersion("2.13")


def backward_keeps_graph() -> bool:
    """Whether the backward pass that now runs was called with ``retain_graph=True``. Called in the backward of an operation."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def runs_before(ctx: Any, index: int) -> bool:
    """Whether the backward pass that now runs goes on to what an operation got as its input ``index``.

    It does not where only the gradients of others were asked for, as by ``autograd.grad``. Called in the operation's backward;
    the input is no leaf.
    """
    function, _ = ctx.next_functions[index]
    return bool(torch._C._will_engine_execute_node(function))


def with_own_node(tensor: Tensor) -> Tensor:
    """The same values in the same memory, as the result of an operation of its own.

    It may be detached in place, which autograd forbids for views, and nobody has saved it for a backward pass. The operator is
    what torch's reshaping products (``linear`` of three dimensions) end with.
    """
    found: Tensor = torch.ops.aten._unsafe_view.default(tensor, tensor.shape)
    return found


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether somebody has set hooks on a parameter's gradient."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)
