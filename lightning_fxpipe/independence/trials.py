"""Trials that show if a stage treats samples one by one, for cases that shapes do not decide (``independence.division``).

Before the first microbatch of a new trace goes through a stage, the stage runs some more times on it, twice in three ways:

- with a copy of the second sample in the first one's place: no other sample may notice. Sorting, rolling or flipping a batch,
  attention between its samples, a module that subtracts the batch's mean keep the shape, and are found so.
  A microbatch of one sample gets a second one for this, with the same entries in other places;
- with a copy of the last sample put in front: the others' results must be what they were. What goes by the number or the place
  of the samples is found so: a division by their number, other weights for the first half of them;
- where its modules have set anything on themselves, once more as it is: it must give the same again. A recurrent state that a
  module keeps for its next call would go from microbatch to microbatch, and on one device goes from batch to batch.

Batch norms, of which the user knows, use their running statistics meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import storage_key
from lightning_fxpipe.independence.division import call_words
from lightning_fxpipe.microbatch.batch_norms import batch_norms
from lightning_fxpipe.pytree.sizes import same_bytes
from lightning_fxpipe.reporting.messages import logger
from lightning_fxpipe.rng import isolated_rng, rng_state, same_rng
from lightning_fxpipe.user_code.snapshot import Snapshot

_Interpreter = TypeVar("_Interpreter", "_Noting", "_Longer")


def mixing_call(
    module: fx.GraphModule,
    inputs: Sequence[Tensor | None],
    dims: Sequence[int | None],
    rows_of: Callable[[str], int | None],
    num_rows: int,
) -> str | None:
    """The first call of a stage in which samples notice each other; None where there is none.

    Args:
        module: The stage.
        inputs: What it gets for a microbatch.
        dims: Dimension of each input that has the samples; None where none has.
        rows_of: The dimension of a node's result that has the samples, by the node's name; None where none has.
        num_rows: Rows of the microbatch.
    """
    if num_rows < 2:
        return None
    changed = _varied(inputs, dims, lambda value, dim: _with_first_replaced(value, dim, num_rows))
    if all(one is other for one, other in zip(inputs, changed, strict=True)):
        return None
    with torch.no_grad():
        results = [_run(_Noting(module), values).found for values in (inputs, changed)]
    for node in module.graph.nodes:
        dim = rows_of(node.name)
        before, after = (result.get(node.name) for result in results)
        if dim is None or before is None or after is None or before.shape != after.shape or before.shape[dim] % num_rows:
            continue
        entries = before.shape[dim] // num_rows
        if not _alike(before.movedim(dim, 0)[entries:], after.movedim(dim, 0)[entries:]):
            return call_words(node)
    return None


def mixing_call_of_one(
    module: fx.GraphModule,
    inputs: Sequence[Tensor | None],
    dims: Sequence[int | None],
    rows_of: Callable[[str], int | None],
) -> str | None:
    """Runs :func:`mixing_call` for a microbatch of one row: another is put in front, with the same entries in other
    places.
    """
    pair = _varied(inputs, dims, lambda value, dim: torch.cat([value.roll(1), value], dim))
    try:
        return mixing_call(module, pair, dims, rows_of, 2)
    except Exception as error:  # code may hold for one sample only
        logger.debug("Could not run a stage with a different sample: %s", error)
        return None


@dataclass(frozen=True, kw_only=True)
class Counting:
    """Results that depend on the number of the samples.

    Attributes:
        call: The first call that gives samples something else where there is one more.
        numbers: Attributes of modules that are set to another number then.
    """

    call: str | None = None
    numbers: tuple[str, ...] = ()


def counting_call(
    module: fx.GraphModule,
    inputs: Sequence[Tensor | None],
    dims: Sequence[int | None],
    rows_of: Callable[[str], int | None],
    fixed: Collection[str],
    num_rows: int,
    num_added: int,
) -> Counting:
    """Finds results of a stage that depend on the number or the place of the samples.

    Args:
        module, inputs, dims, rows_of, num_rows: As for :func:`mixing_call`.
        fixed: Names of the nodes whose results do not depend on the samples.
        num_added: Rows of a sample.
    """
    longer = _varied(inputs, dims, lambda value, dim: _with_more(value, dim, num_rows, num_added))
    if all(one is other for one, other in zip(inputs, longer, strict=True)):
        return Counting()

    def expected(node: fx.Node) -> Tensor | None:
        value, dim = before.found.get(node.name), rows_of(node.name)
        if value is None or value.layout is not torch.strided or (dim is None and node.name not in fixed):
            return None
        if dim is not None and value.dim() > dim and value.shape[dim] % num_rows == 0:
            value = _with_more(value, dim, num_rows, num_added)
        return value

    with torch.no_grad():
        before = _run(_Noting(module), inputs)
        after = _Longer(module, expected, before.drawing)
        try:
            _run(after, longer)
        except Exception as error:  # code may hold for the microbatch only
            logger.debug("Could not run a stage with one more sample: %s", error)
            return Counting(call=None if after.differing is None else call_words(after.differing))
    numbers = tuple(name for name, value in before.numbers.items() if after.numbers.get(name, value) != value)
    return Counting(call=None if after.differing is None else call_words(after.differing), numbers=numbers)


def carrying_call(module: fx.GraphModule, inputs: Sequence[Tensor | None]) -> str | None:
    """The first call of a stage that gives something else when it is made again, for what a module has kept; None for none.

    Args:
        module: The stage.
        inputs: What it gets for a microbatch.
    """
    first, again = _Noting(module), _Noting(module)
    with torch.no_grad(), _leaving_untouched(module) as kept:
        _interpret(first, inputs)
        if kept.attributes.is_current():
            return None
        kept.put_buffers_back()
        try:
            _interpret(again, inputs)
        except Exception as error:  # it wants what it has kept to be taken first
            logger.debug("Could not rebuild a stage from its saved activations: %s", error)
    for node in module.graph.nodes:
        one, other = first.found.get(node.name), again.found.get(node.name)
        if one is not None and (other is None or one.shape != other.shape or not _alike(one, other)):
            return call_words(node)
    return None


def _varied(
    inputs: Sequence[Tensor | None], dims: Sequence[int | None], vary: Callable[[Tensor, int], Tensor]
) -> list[Tensor | None]:
    """The inputs, of which those that have the samples are varied."""
    pairs = zip(inputs, dims, strict=True)
    return [value if value is None or dim is None else vary(value.detach(), dim) for value, dim in pairs]


def _with_more(tensor: Tensor, dim: int, num_rows: int, num_added: int) -> Tensor:
    """Some of the last rows put in front; a row may have several entries."""
    added = tensor.shape[dim] // num_rows * num_added
    return torch.cat([tensor.narrow(dim, tensor.shape[dim] - added, added), tensor], dim)


def _with_first_replaced(tensor: Tensor, dim: int, num_rows: int) -> Tensor:
    entries, changed = tensor.shape[dim] // num_rows, tensor.clone()
    changed.narrow(dim, 0, entries).copy_(tensor.narrow(dim, entries, entries))
    return changed


def _run(interpreter: _Interpreter, values: Sequence[Any]) -> _Interpreter:
    """The interpreter, after a run."""
    with _leaving_untouched(interpreter.module):
        _interpret(interpreter, values)
    return interpreter


def _interpret(interpreter: _Noting | _Longer, values: Sequence[Any]) -> None:
    with isolated_rng():
        interpreter.run(*(value.detach().clone() if isinstance(value, Tensor) else value for value in values))
    interpreter.numbers = {
        f"{path}.{name}".lstrip("."): value
        for path, module in interpreter.module.named_modules()
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }


class _Noting(fx.Interpreter):
    """Runs a stage.

    Attributes:
        found: What each call gave, by the name of its node; copies, because later calls may change it in place.
        drawing: Names of the calls that drew random numbers.
        numbers: Those that modules have as attributes after it, by name.
    """

    numbers: Mapping[str, float]

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.found: dict[str, Tensor] = {}
        self.drawing: set[str] = set()

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node, and notes its result."""
        before = rng_state()
        result = super().run_node(n)
        if not same_rng(before, rng_state()):
            self.drawing.add(n.name)
        if isinstance(result, Tensor) and n.op not in ("placeholder", "get_attr"):
            self.found[n.name] = result.clone()
        return result


class _Longer(fx.Interpreter):
    """Runs a stage with more rows, and compares each call with what it gave without them.

    Calls go on with what the other run gave, so that each is compared by itself: other sizes round differently. Where random
    numbers are in a result, there is nothing to compare, and what follows goes on with the same.

    Args:
        module: The stage.
        expected: What a call would give if it went by each sample alone; None where that is not known.
        drawing: Names of the calls that drew random numbers in the other run.

    Attributes:
        differing: The first call that gave something else.
        numbers: Those that modules have as attributes after it, by name.
    """

    numbers: Mapping[str, float]

    def __init__(self, module: fx.GraphModule, expected: Callable[[fx.Node], Tensor | None], drawing: set[str]) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.differing: fx.Node | None = None
        self._expected = expected
        # Memory of the module's own, which stays what it is: a result may be a view of it.
        lasting = (*module.parameters(), *module.buffers(), *Snapshot({"self": module}).tensors())
        self._lasting = {storage_key(tensor) for tensor in lasting}
        self._random = set(drawing)  # names of nodes whose results are other ones than in the other run

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node, and compares its result."""
        result = super().run_node(n)
        if n.op in ("placeholder", "get_attr", "output") or self.differing is not None:
            return result
        expected = self._expected(n)
        is_random = n.name in self._random or any(operand.name in self._random for operand in n.all_input_nodes)
        if expected is None or not isinstance(result, Tensor) or expected.shape != result.shape:
            if is_random:
                self._random.add(n.name)
            return result
        self._random.discard(n.name)
        if not is_random and not _close(expected, result):
            self.differing = n
            return result
        is_spread = any(step == 0 and size > 1 for step, size in zip(result.stride(), result.shape, strict=True))
        if is_spread or storage_key(result) in self._lasting:
            return result
        return result.copy_(expected)  # in place, for those that share the memory


class _Kept:
    """Contents of a stage's modules and buffers at one moment."""

    def __init__(self, module: nn.Module) -> None:
        self.attributes = Snapshot({"self": module})
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def put_buffers_back(self) -> None:
        """Makes buffers what they were."""
        with torch.no_grad():
            for buffer, values in self._buffers:
                # Only where it has changed: an earlier call may have saved it for its backward pass.
                if buffer.layout is not torch.strided or not same_bytes(buffer, values):
                    buffer.copy_(values)


@contextmanager
def _leaving_untouched(module: nn.Module) -> Iterator[_Kept]:
    """After the block the stage's modules and buffers are what they were; in it batch norms use their running statistics."""
    kept = _Kept(module)
    norms = [norm for _, norm in batch_norms(module) if norm.training and norm.running_mean is not None]
    for norm in norms:
        norm.training = False
    try:
        yield kept
    finally:
        kept.attributes.restore()
        for norm in norms:
            norm.training = True
        kept.put_buffers_back()


def _alike(one: Tensor, other: Tensor) -> bool:
    """Equal but for rounding: kernels may sum in another order."""
    if not one.is_floating_point():
        return same_bytes(one, other)
    tolerance = 1e-3 if one.dtype in (torch.float16, torch.bfloat16) else 1e-4
    return torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


def _close(one: Tensor, other: Tensor) -> bool:
    """Equal but for what kernels for other sizes, in the precision of the device, may make of it."""
    if not one.is_floating_point():
        return same_bytes(one, other)
    tolerance = 2e-2 if one.dtype in (torch.float16, torch.bfloat16) else 2e-3
    one, other = one.float(), other.float()
    finite = one[one.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
