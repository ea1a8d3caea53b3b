"""Shapes of what a module returns, where its Python looks at tensor values and so cannot run without any.

The module runs on made-up data of the shapes that the trace has. Only the shapes, dtypes and gradients of its results are
kept, so its weights are made up too: a rank that has dropped them gets the same answer. Integers and masks mean something
(lengths, class numbers, places), so those that follow from the region's inputs are the example's own. Some runs tell what a
size follows from: two on different data show which sizes depend on data, and two with other values of each symbol which change
along.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe._compat.torch import (
    FakeTensor,
    depends_on_data,
    outside_fakes,
    size_hint,
    size_of_symbol,
    symbol_hints,
    symbolic_expression,
    unknown_size,
)
from lightning_fxpipe.pytree.structure import Structure, Template
from lightning_fxpipe.reporting.wording import error_words
from lightning_fxpipe.tracing.signals import RecordError
from lightning_fxpipe.user_code.exchange import exchanged_tensors
from lightning_fxpipe.user_code.writes import Writes

_logger = logging.getLogger("lightning_fxpipe")

Example = Callable[[Tensor], Tensor | None]


class ProbeFailed(Exception):
    """The module cannot run on made-up data."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A call of a module with fake tensors, made by ``call(module, *args, **kwargs)``.

    Attributes:
        template: Its (args, kwargs).
        example: The value that a tensor has in the traced call, or None where it is not known.
    """

    call: Callable[..., Any]
    module: nn.Module
    template: Template
    example: Example

    def result(self) -> Any:
        """The result, and the arguments as the call leaves them, with fakes.

        Called under the fake mode that the arguments belong to.

        Raises:
            ProbeFailed: No such result can be found.
        """
        for filler in (0, 1):
            try:
                first = self._run({}, seed=1, filler=filler)
                break
            except Exception as error:
                failure = error
        else:
            raise ProbeFailed(f"on dummy data ({error_words(failure)})") from failure
        again = self._run({}, seed=2, filler=filler)
        try:
            other = self._run({}, seed=2, filler=filler, altered=True)
        except Exception:  # it accepts the example's integers only
            _logger.debug("%s ran only with the integers of the example", type(self.module).__name__, exc_info=True)
            other = again
        if any(run.structure != first.structure for run in (again, other)):
            raise ProbeFailed("the structure of its result depends on data")
        runs = [first, again, other]
        symbols = self._symbols()
        changes = self._changes(first, symbols, filler)
        results = []
        for index, tensor in enumerate(first.tensors):
            if (given := first.given[index]) is not None:
                results.append(given)
                continue
            same = list(zip(*(run.tensors[index].shape for run in runs), strict=True))
            sizes = [
                _size_of(before[0], [(c.symbol, c.value, c.shapes[index][dim]) for c in changes], symbols)
                if len(set(before)) == 1
                else unknown_size(self.template.tensors[0])
                for dim, before in enumerate(same)
            ]
            results.append(torch.empty(sizes, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad))
        return first.structure.fill(results)

    def result_for_any_numbers(self) -> Any:
        """Returns a result like :meth:`result`, with any values for integers that are unknown.

        Raises:
            ProbeFailed: No such result can be found, or its shapes follow from the integers.
        """
        result = self.result()
        shapes = []
        for filler in (0, 1):
            try:
                run = self._run({}, seed=1, filler=filler)
            except Exception:
                _logger.debug("%s does not accept %d", type(self.module).__name__, filler, exc_info=True)
                continue
            shapes.append([tensor.shape for tensor in run.tensors])
        if any(other != shapes[0] for other in shapes):
            raise ProbeFailed("the shapes of its result depend on numbers")
        return result

    def _changes(self, first: _Run, symbols: Mapping[Any, Any], filler: int) -> list[_Change]:
        """Shapes of the results with each symbol at two other values, the others as they are."""
        found = []
        try:
            for symbol, size in symbols.items():
                for value in (size_hint(size) + 1, 2 * size_hint(size) + 1):
                    shapes = [tuple(tensor.shape) for tensor in self._run({symbol: value}, seed=1, filler=filler).tensors]
                    assert [len(shape) for shape in shapes] == [tensor.dim() for tensor in first.tensors]
                    found.append(_Change(symbol, value, shapes))
        except Exception as error:
            if len(symbols) > 1:
                raise ProbeFailed("it does not run with other sizes") from error
            # What has the size of the batch is taken to follow it.
            found = [
                _Change(symbol, hint + 1, [tuple(n + 1 if n == hint else n for n in tensor.shape) for tensor in first.tensors])
                for symbol, size in symbols.items()
                if (hint := size_hint(size))
            ]
        return found

    def _symbols(self) -> dict[Any, Any]:
        """The symbols that sizes of the arguments follow from, as sizes."""
        every: list[Any] = [size for tensor in self.template.tensors for size in tensor.shape]
        sizes = [size for size in every if isinstance(size, torch.SymInt)]
        hints = {symbol: hint for size in sizes if not depends_on_data(size) for symbol, hint in symbol_hints(size).items()}
        return {symbol: size_of_symbol(symbol, self.template.tensors[0], hint) for symbol, hint in hints.items()}

    def _run(self, sizes: Mapping[Any, int], *, seed: int, filler: int, altered: bool = False) -> _Run:
        generator = torch.Generator().manual_seed(seed)

        def made_up(tensor: Tensor, _: str = "") -> Tensor:
            example = None if tensor.is_floating_point() else self.example(tensor)
            try:
                shape = [_concrete(size, sizes) for size in tensor.shape]
            except (ValueError, TypeError):  # it depends on data
                if example is None:
                    raise
                shape = list(example.shape)
            # Unwatched: what is made up here is nothing that the module draws.
            with outside_fakes(), torch.no_grad(), unwatched_torch():
                if tensor.is_floating_point():
                    made = torch.randn(shape, generator=generator).to(tensor.dtype).to(tensor.device)
                elif example is not None:
                    made = _resize(_smallest_sample(example) if altered else example, shape)
                else:
                    made = torch.full(shape, filler, dtype=tensor.dtype, device=tensor.device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(made, requires_grad=tensor.requires_grad)
            return made.requires_grad_(tensor.requires_grad)

        values = [made_up(tensor) for tensor in self.template.tensors]
        numbers = [_concrete(size, sizes) for size in self.template.sizes]
        args, kwargs = self.template.structure.fill(values, numbers)
        with exchanged_tensors(self.module, made_up) as before, outside_fakes():
            writes = Writes(before.tensors())  # such as one in a list: what is exchanged are those of modules
            try:
                with writes if writes.can_happen else nullcontext():
                    result = self.call(self.module, *args, **kwargs)
            finally:
                writes.undo()
        after = Template.of((result, args, kwargs))
        given = {id(value): tensor for value, tensor in zip(values, self.template.tensors, strict=True)}
        return _Run(after.structure, after.tensors, tuple(given.get(id(tensor)) for tensor in after.tensors))


def result_of_function(
    function: Callable[..., Any], arguments: Template, example: Example, because: Exception | None = None
) -> Any:
    """Returns the result of a function that cannot run on fakes.

    Args:
        function: The function.
        arguments: Its (args, kwargs); where there are no fakes among them, it is called as it is.
        example: As in :class:`Probe`.
        because: Why it cannot.

    Raises:
        RecordError: It cannot run on made-up data either.
    """
    if not any(isinstance(tensor, FakeTensor) for tensor in arguments.tensors):
        args, kwargs = arguments.fill(arguments.tensors)
        return function(*args, **kwargs)
    call = partial(without_module, function)
    try:
        result, *_ = Probe(call=call, module=nn.Module(), template=arguments, example=example).result()
    except ProbeFailed as failure:
        raise RecordError(f"{getattr(function, '__name__', function)} needs values: {failure}") from because
    return result


def without_module(function: Callable[..., Any], _: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A function's call as a probe makes it."""
    return function(*args, **kwargs)


class _Run(NamedTuple):
    """(result, args, kwargs) after a call: structure, tensors, and for each of these the argument that it was before."""

    structure: Structure
    tensors: tuple[Tensor, ...]
    given: tuple[Tensor | None, ...]


class _Change(NamedTuple):
    """The shapes of the results with one symbol at another value."""

    symbol: Any
    value: int
    shapes: list[tuple[int, ...]]


def _concrete(size: Any, sizes: Mapping[Any, int]) -> int:
    """A size where some symbols have other values than those that the trace ran with."""
    expression = symbolic_expression(size)
    if isinstance(expression, int):
        return expression
    if depends_on_data(size) or not isinstance(size, torch.SymInt):
        raise ValueError(f"{size} depends on data or is not an integer")
    return int(expression.subs({**symbol_hints(size), **sizes}))


def _smallest_sample(tensor: Tensor) -> Tensor:
    """All samples as the one whose numbers are smallest: what depends on the largest of them comes out otherwise."""
    if tensor.dim() == 0 or len(tensor) == 0:
        return tensor
    sums = tensor.reshape(len(tensor), -1).sum(dim=1)
    return tensor[sums.argmin()].expand_as(tensor).clone()


def _resize(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor with its last entries repeated, or left out, along each dimension."""
    for dim, size in enumerate(shape):
        if tensor.shape[dim] != size:
            index = torch.arange(size, device=tensor.device).clamp(max=tensor.shape[dim] - 1)
            tensor = tensor.index_select(dim, index)
    return tensor.clone()


def _size_of(before: int, changes: Sequence[tuple[Any, int, int]], symbols: Mapping[Any, Any]) -> int | torch.SymInt:
    """A size as a multiple of the symbols that it grows with.

    Args:
        before: The size.
        changes: What it is with a symbol at another value: (symbol, value, size).
        symbols: The symbols as sizes.
    """
    followed = {symbol: size_hint(symbols[symbol]) for symbol, _, after in changes if after != before}
    coefficient, rest = divmod(before, math.prod(followed.values()))
    size: int | torch.SymInt = coefficient
    for symbol, hint in followed.items():
        grown = [(value, after) for changed, value, after in changes if changed == symbol]
        if rest or any(after * hint != before * value for value, after in grown):
            raise ProbeFailed(f"a size of its results, {before} and then {grown[0][1]}, is not a multiple of an input's size")
        size = size * symbols[symbol]
    return size
