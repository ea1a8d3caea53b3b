"""Advances random generators as if tensors had been drawn, in little memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# Elements that are drawn at a time.
_CHUNK = 1 << 16


def generator_of(kwargs: Mapping[str, Any], device: torch.device) -> torch.Generator:
    """The generator that a call on ``device`` draws from."""
    given = kwargs.get("generator")
    if isinstance(given, torch.Generator):
        return given
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators: Sequence[torch.Generator] = torch.cuda.default_generators
        return generators[index]
    return torch.default_generator


def spend(function: Any, scalars: Sequence[Any], kwargs: Mapping[str, Any], blank: Tensor, device: torch.device) -> None:
    """Draws what an operator that fills a tensor, such as ``aten.normal_``, would draw on a device, and throws it away.

    Args:
        function: The operator.
        scalars: Its arguments after the tensor.
        kwargs: Its keyword arguments.
        blank: A tensor of the right shape, dtype and layout on the meta device.
        device: Where to draw.
    """
    number, dtype = blank.numel(), blank.dtype
    in_parts = number > 2 * _CHUNK and blank.is_contiguous() and _draws_in_parts(function, tuple(scalars), dtype, device)
    if not in_parts:
        function(torch.empty_strided(blank.shape, blank.stride(), dtype=dtype, device=device), *scalars, **kwargs)
        return
    part = torch.empty(_CHUNK + number % _CHUNK, dtype=dtype, device=device)
    for _ in range(number // _CHUNK - 1):
        function(part[:_CHUNK], *scalars, **kwargs)
    function(part, *scalars, **kwargs)


@lru_cache(maxsize=256)
def _draws_in_parts(function: Any, scalars: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Returns True if parts, of which the last is not small, take from the generator what the whole takes; tried out."""
    states = []
    for parts in ((3 * 64 + 7,), (64, 64, 64 + 7)):
        generator = torch.Generator(device).manual_seed(1)
        for size in parts:
            try:
                function(torch.empty(size, dtype=dtype, device=device), *scalars, generator=generator)
            except (TypeError, RuntimeError):
                return False
        states.append(generator.get_state())
    return torch.equal(*states)
