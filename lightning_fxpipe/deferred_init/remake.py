"""Torch calls that are written down, and made again for the tensors that are needed.

Tensors without data are known by their storage and their shape in it. The steps that some of them depend on are made in order,
each with memory for what is needed of it only. A step that draws random numbers gets the state that the generator had for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fxpipe._compat.torch import storage_key, tree_leaves, tree_map, version_of
from lightning_fxpipe.deferred_init.drawing import generator_of, spend
from lightning_fxpipe.rng import kept_generators

# Larger tensors with data that a step takes are not copied.
_LARGE = 1024 * 1024
# They set all of the tensor that they change, whatever it was.
_OVERWRITE = frozenset(
    ("uniform_", "normal_", "fill_", "zero_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_", "copy_")
)
_DRAWS_LIKE = {"rand": torch.ops.aten.uniform_.default, "randn": torch.ops.aten.normal_.default}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Storage of a tensor, and its shape and strides in there."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """That of a tensor."""
        return cls(
            storage=storage_key(tensor),
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor at this place of a storage with data."""
        with torch.no_grad():
            empty = torch.empty(0, dtype=self.dtype, device=storage.device)
            return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor with data that a step takes."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> Constant:
        """That of a tensor that may be changed later."""
        kept = tensor.detach() if tensor.nbytes > _LARGE else tensor.detach().clone()
        return cls(kept, version_of(kept))

    def value(self) -> Tensor:
        """Returns the tensor; raises RuntimeError if it has been changed."""
        if version_of(self.tensor) != self.version:
            raise RuntimeError("A tensor from which weights were initialised was changed afterwards.")
        return self.tensor


@dataclass(frozen=True, kw_only=True)
class Step:
    """A torch call.

    Attributes:
        function: What is called.
        args: Its arguments, with places for tensors without data.
        kwargs: Its keyword arguments.
        results: Places of the tensors that it returns.
        reads: Storages that it needs.
        writes: Storages that it makes or changes.
        overwritten: The storage of which nothing older is left afterwards.
        default_dtype: The default dtype when it was made, which precision plugins change.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Place, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    overwritten: int | None
    default_dtype: torch.dtype

    @property
    def name(self) -> str:
        """Name of the operator."""
        return str(self.function.overloadpacket.__name__)


class Recording:
    """Torch calls in their order; made again, they make tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._steps: list[Step] = []
        self._undrawn: list[int] = []  # steps whose random numbers are still to be drawn
        self._states: dict[int, Tensor] = {}  # of the generator, before a step
        self._storages: dict[int, torch.UntypedStorage] = {}  # without data; kept, so that no other gets the same key
        self._written: dict[int, int] = {}  # elements that steps have set, by storage
        self._recent: dict[int, torch.UntypedStorage] = {}  # what was computed last
        self._recent_until = 0

    @property
    def is_empty(self) -> bool:
        """True if nothing is known of any tensor."""
        return not self._storages

    def know(self, tensor: Tensor) -> None:
        """Takes a tensor without data up; until a step writes to it, it is zero."""
        self._storages.setdefault(storage_key(tensor), tensor.untyped_storage())

    def knows(self, tensor: Tensor) -> bool:
        """Returns True if a tensor without data has been taken up."""
        return storage_key(tensor) in self._storages

    def is_written(self, tensor: Tensor) -> bool:
        """Returns True if steps have given the tensor values."""
        return self._written.get(storage_key(tensor), 0) >= tensor.numel()

    def add(self, function: Any, args: Any, kwargs: Any, result: Any, changed: Sequence[Tensor]) -> bool:
        """Writes a call down, unless it does nothing but give another view of a tensor, or memory.

        Args:
            function: An operator, called with ``args`` and ``kwargs``.
            result: What it returns, without data.
            changed: The tensors without data that it changes.

        Returns:
            Whether it draws random numbers.
        """
        used = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_meta]
        made = tensors_in(result)
        for tensor in (*used, *made):
            self.know(tensor)
        reads = {storage_key(tensor) for tensor in used}
        new = [tensor for tensor in made if storage_key(tensor) not in reads]
        if not changed and (not new or is_empty_memory(function)):
            return False
        overwritten = None
        if len(changed) == 1 and function.overloadpacket.__name__ in _OVERWRITE and _fills_storage(changed[0]):
            overwritten = storage_key(changed[0])
        step = Step(
            function=function,
            args=tree_map(_freeze, args),
            kwargs=tree_map(_freeze, kwargs),
            results=tuple(map(Place.of, made)),
            reads=frozenset(reads - {overwritten}),
            writes=frozenset(storage_key(tensor) for tensor in (*changed, *new)),
            overwritten=overwritten,
            default_dtype=torch.get_default_dtype(),
        )
        if is_random(function):
            self._undrawn.append(len(self._steps))
        self._steps.append(step)
        for tensor in (*changed, *new):
            key = storage_key(tensor)
            self._written[key] = self._written.get(key, 0) + tensor.numel()
        return is_random(function)

    def needs_draws(self, tensors: Iterable[Tensor]) -> bool:
        """Returns True if tensors depend on random numbers that have not been drawn yet."""
        needed = self._steps_needed({storage_key(tensor) for tensor in tensors}, len(self._steps), {}, 0)
        return not set(self._undrawn).isdisjoint(needed)

    def draw(self, wanted: Collection[int] | None = None) -> None:
        """Draws random numbers that have not been drawn, and throws them away: of steps that write ``wanted``, or of all."""
        undrawn, self._undrawn = self._undrawn, []
        for index in undrawn:
            step = self._steps[index]
            if wanted is not None and step.writes.isdisjoint(wanted):
                self._undrawn.append(index)
                continue
            self._states[index] = generator_of(step.kwargs, self.device).get_state()
            with torch.no_grad():
                self._spend(index, step)

    def _spend(self, index: int, step: Step) -> None:
        generator = {key: value for key, value in step.kwargs.items() if key == "generator"}
        if step.name in _OVERWRITE and isinstance(step.args[0], Place):
            spend(step.function, step.args[1:], step.kwargs, _blank(step.args[0]), self.device)
        elif step.name in _DRAWS_LIKE:
            spend(_DRAWS_LIKE[step.name], (), generator, _blank(step.results[0]), self.device)
        else:
            places = [leaf for leaf in tree_leaves((step.args, step.kwargs)) if isinstance(leaf, Place)]
            is_like = step.name.endswith("_like")
            found = {} if is_like else self._run({place.storage for place in places}, until=index)
            self._repeat(step, dict(found), {})

    def make(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors with their data; those that share memory still do. Generators stay as they are."""
        found = self._run({storage_key(tensor) for tensor in tensors})
        return [Place.of(tensor).view(found[storage_key(tensor)]) for tensor in tensors]

    def values(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the values that tensors have after the steps so far. What is computed stays for the next call."""
        found = self._run({storage_key(tensor) for tensor in tensors}, goes_on=True)
        self._recent, self._recent_until = found, len(self._steps)
        return [Place.of(tensor).view(found[storage_key(tensor)]).clone() for tensor in tensors]

    def forget_values(self) -> None:
        """Drops what :meth:`values` has computed."""
        self._recent = {}

    def _run(
        self, wanted: Collection[int], *, until: int | None = None, goes_on: bool = False
    ) -> dict[int, torch.UntypedStorage]:
        """Makes the steps that storages depend on.

        Args:
            wanted: The storages.
            until: Number of steps after which their values are wanted; None for all.
            goes_on: Whether to go on from what was computed last, and to keep what is computed on the way.

        Returns:
            Storages with data, by key.
        """
        until = len(self._steps) if until is None else until
        found = dict(self._recent) if goes_on else {}
        chosen = self._steps_needed(wanted, until, found, self._recent_until)
        if found and chosen and chosen[0] < self._recent_until:  # it would need what has been changed since
            found = {}
            chosen = self._steps_needed(wanted, until, {}, 0)
        last_use = {key: index for index in chosen for key in self._steps[index].reads | self._steps[index].writes}
        generators = {generator_of(self._steps[index].kwargs, self.device) for index in chosen if index in self._states}
        with torch.no_grad(), kept_generators(generators):
            for index in chosen:
                step = self._steps[index]
                if index in self._states:
                    generator_of(step.kwargs, self.device).set_state(self._states[index])
                self._repeat(step, found, last_use)
                for key in () if goes_on else (step.reads | step.writes) - set(wanted):
                    if last_use[key] == index:
                        found.pop(key, None)
        for key in wanted:
            self._allocate(key, found)
        return found

    def _steps_needed(self, wanted: Collection[int], until: int, known: Mapping[int, Any], since: int) -> list[int]:
        """The steps that storages depend on, where some are known as they are after the first ``since`` steps."""
        needed, chosen = set(wanted), []
        for index in reversed(range(until)):
            if index == since - 1:
                needed -= known.keys()
            step = self._steps[index]
            if not needed.isdisjoint(step.writes):
                chosen.append(index)
                needed |= step.reads
                needed -= {step.overwritten}
        return chosen[::-1]

    def _allocate(self, key: int, found: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
        if key not in found:
            empty = torch.zeros(self._storages[key].nbytes(), dtype=torch.uint8, device=self.device)
            found[key] = empty.untyped_storage()
        return found[key]

    def _repeat(self, step: Step, found: dict[int, torch.UntypedStorage], last_use: Mapping[int, int]) -> None:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, Place):
                return leaf.view(self._allocate(leaf.storage, found))
            return leaf.value() if isinstance(leaf, Constant) else leaf

        args, kwargs = tree_map(real, (step.args, on_device(step.kwargs, self.device)))
        before = torch.get_default_dtype()
        torch.set_default_dtype(step.default_dtype)
        try:
            made = tensors_in(step.function(*args, **kwargs))
        finally:
            torch.set_default_dtype(before)
        for place, tensor in zip(step.results, made, strict=False):
            if place.storage in found:
                continue
            if (tensor.stride(), tensor.storage_offset()) == (place.stride, place.offset):
                found[place.storage] = tensor.untyped_storage()
            else:
                place.view(self._allocate(place.storage, found)).copy_(tensor)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in a structure, in its order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def is_random(function: Any) -> bool:
    """Returns True if an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in function.tags


def on_device(kwargs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The keyword arguments with another device."""
    return {key: device if isinstance(value, torch.device) else value for key, value in kwargs.items()}


def _freeze(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return Place.of(leaf) if leaf.is_meta else Constant.of(leaf)


def _blank(place: Place) -> Tensor:
    return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="meta")


def _fills_storage(tensor: Tensor) -> bool:
    return tensor.nbytes == tensor.untyped_storage().nbytes() and 0 not in tensor.stride()


def is_empty_memory(function: Any) -> bool:
    """Returns True if an operator returns memory that holds nothing yet."""
    return "empty" in str(function)
