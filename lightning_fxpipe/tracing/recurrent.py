"""Results of torch's recurrent layers on fake tensors, without a step for each position; and of packing sequences for them.

torch unrolls an LSTM, GRU or RNN that runs on fake tensors: hundreds of calls for a text, and the length is a constant of the
trace from then on. The results' shapes are documented, so nothing of that is needed. How many entries packed sequences have
depends on their lengths, so torch cannot pack fakes at all. Here that number is an unknown size; the length of the longest,
which tensors have as a dimension, is what the call that is recorded has, as any number that code looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_fxpipe._compat.torch import PACK_PADDED, PAD_PACKED, FakeTensor, unknown_size


def _results(input: Tensor, states: tuple[Tensor, ...], weights: Any, positions: tuple[Any, ...], directions: int) -> Any:
    inputs = (input, *states, *weights)
    # With projections the first state is narrower than the others; the output consists of first states.
    output = _make((*positions, states[0].shape[-1] * directions), *inputs)
    return output, *(_make(tuple(state.shape), *inputs) for state in states)


def _layer(input: Tensor, hx: Any, params: Any, *rest: Any) -> Any:
    bidirectional, batch_first = rest[-2:]
    first, second = input.shape[:2]
    positions = (second, first) if batch_first else (first, second)
    output, *states = _results(input, _states(hx), params, positions, 2 if bidirectional else 1)
    # Computed position by position, and then turned: not contiguous, as the layer's own.
    return output.transpose(0, 1) if batch_first else output, *states


def _run_packed(data: Tensor, batch_sizes: Tensor, hx: Any, params: Any, *rest: Any) -> Any:
    return _results(data, _states(hx), params, (data.shape[0],), 2 if rest[-1] else 1)


def _states(hx: Any) -> tuple[Tensor, ...]:
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)


_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


def shape_only(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """The function, or what gives the same shapes, dtypes and gradients on fake tensors with less."""
    if function not in _RECURRENT or not args or not isinstance(args[0], FakeTensor):
        return function
    if torch.is_autocast_enabled(args[0].device.type):
        return function  # what dtype it returns is then the affair of the operators inside
    packed = isinstance(args[2], Tensor) and isinstance(args[1], Tensor)
    return _run_packed if packed else _layer


class PackedSequences:
    """The packed sequences of one recording, known by their ``batch_sizes``."""

    def __init__(self) -> None:
        self._num_sequences: dict[int, tuple[Tensor, Any]] = {}  # with the tensor, which keeps its identity

    def result(self, function: Callable[..., Any], args: tuple[Any, ...], longest: Any) -> Any:
        """Returns the result of a function of torch that packs sequences or pads packed ones; None for another function, or
        for unknown ones.

        ``longest`` is the length of the longest sequence that is packed.
        """
        if function is PACK_PADDED and isinstance(longest, int):
            return self._pack(*args, longest=longest)
        if function is PAD_PACKED and id(args[1]) in self._num_sequences:
            return self._pad(*args)
        return None

    def result_of_layer(self, layer: nn.Module, args: tuple[Any, ...]) -> Any:
        """Returns the result of a recurrent layer for known packed sequences; None for other calls."""
        if not isinstance(layer, nn.RNNBase) or not args or not isinstance(args[0], PackedSequence):
            return None
        packed, states = args[0], args[1] if len(args) > 1 else None
        if id(packed.batch_sizes) not in self._num_sequences or torch.is_autocast_enabled(packed.data.device.type):
            return None
        inputs = (packed.data, *layer.parameters(), *(() if states is None else _states(states)))
        directions = 2 if layer.bidirectional else 1
        width = layer.proj_size or layer.hidden_size
        count = self._num_sequences[id(packed.batch_sizes)][1]
        output = _make((packed.data.shape[0], directions * width), *inputs)
        last = [width, layer.hidden_size] if isinstance(layer, nn.LSTM) else [width]
        left = tuple(_make((directions * layer.num_layers, count, size), *inputs) for size in last)
        return packed._replace(data=output), left if len(left) > 1 else left[0]

    def _pack(self, sequences: Tensor, lengths: Tensor, batch_first: bool, *, longest: int) -> tuple[Tensor, Tensor]:
        data = _make((unknown_size(sequences), *sequences.shape[2:]), sequences)
        batch_sizes = torch.empty(longest, dtype=torch.int64)
        self._num_sequences[id(batch_sizes)] = batch_sizes, sequences.shape[0 if batch_first else 1]
        return data, batch_sizes

    def _pad(self, data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, length: int) -> tuple[Tensor, Tensor]:
        count = self._num_sequences[id(batch_sizes)][1]
        sizes = (count, length) if batch_first else (length, count)
        return _make((*sizes, *data.shape[1:]), data), torch.empty(count, dtype=torch.int64)


def _make(shape: tuple[Any, ...], like: Tensor, *others: Tensor) -> Tensor:
    """A result of a call with these inputs: of the first one's kind, and with a gradient if any has one."""
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (like, *others))
    tensor = torch.empty(shape, dtype=like.dtype, device=like.device, requires_grad=trains)
    return tensor.view(shape)  # a result, which may be changed in place, and not a leaf
