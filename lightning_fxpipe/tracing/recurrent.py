"""Results of torch's recurrent layers on fake tensors, without a step for each position.

torch unrolls an LSTM, GRU or RNN that runs on fake tensors: hundreds of calls for a text, and the length is a constant of the
trace from then on. The results' shapes are documented, so nothing of that is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_fxpipe._compat.torch import FakeTensor


def _results(input: Tensor, states: tuple[Tensor, ...], weights: Any, positions: tuple[Any, ...], directions: int) -> Any:
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (input, *states, *weights))

    def made(*shape: Any) -> Tensor:
        tensor = torch.empty(shape, dtype=input.dtype, device=input.device, requires_grad=trains)
        return tensor.view(shape)  # a result, which may be changed in place, and not a leaf

    # With projections the first state is narrower than the others; the output consists of first states.
    output = made(*positions, states[0].shape[-1] * directions)
    return output, *(made(*state.shape) for state in states)


def _layer(input: Tensor, hx: Any, params: Any, *rest: Any) -> Any:
    bidirectional, batch_first = rest[-2:]
    output, *states = _results(input, _states(hx), params, _along_time(input, batch_first), 2 if bidirectional else 1)
    # Computed position by position, and then turned: not contiguous, as the layer's own.
    return output.transpose(0, 1) if batch_first else output, *states


def _along_time(input: Tensor, batch_first: bool) -> tuple[Any, Any]:
    first, second = input.shape[:2]
    return (second, first) if batch_first else (first, second)


def _packed(data: Tensor, batch_sizes: Tensor, hx: Any, params: Any, *rest: Any) -> Any:
    return _results(data, _states(hx), params, (data.shape[0],), 2 if rest[-1] else 1)


def _states(hx: Any) -> tuple[Tensor, ...]:
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)


_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


def shaped(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """The function, or what gives the same shapes, dtypes and gradients on fake tensors with less."""
    if function not in _RECURRENT or not args or not isinstance(args[0], FakeTensor):
        return function
    if torch.is_autocast_enabled(args[0].device.type):
        return function  # what dtype it returns is then the affair of the operators inside
    packed = isinstance(args[2], Tensor) and isinstance(args[1], Tensor)
    return _packed if packed else _layer
