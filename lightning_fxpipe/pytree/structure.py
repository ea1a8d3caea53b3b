"""The tensors inside a value of any type, and new values of the same structure with other tensors.

A model takes and returns more than dicts and tuples: dataclasses, ``ModelOutput``, ``BatchEncoding``, a key-value cache, a
``PackedSequence``. Registering each such type as a pytree would be endless. But nearly every object can be pickled, and pickle
looks into all of them: here it runs in memory and stops at each tensor, so that what it writes is the structure alone.
"""

from __future__ import annotations

import copyreg
import io
import logging
import pickle
import zlib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.torch import SYMBOLIC_TYPES, tree_leaves

_logger = logging.getLogger("lightning_fxpipe")


class NotFillable(Exception):
    """The value has tensors where they cannot be exchanged."""


@dataclass(frozen=True, slots=True)
class _Hole:
    """Stands for a tensor, or for a symbolic size."""

    index: int
    is_size: bool = False


@dataclass(frozen=True, slots=True)
class _Plain:
    """A string or a type by its value."""

    value: Any


class _Reference:
    """An object that every filled value shares: a module, a function, what cannot be copied."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reference) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True)
class Structure:
    """A value without its tensors; equal for values that differ in their tensors only.

    Attributes:
        num_tensors: How many tensors fill it.
    """

    num_tensors: int
    num_sizes: int
    skeleton: bytes = field(repr=False)
    slots: tuple[_Hole | _Plain | _Reference, ...]

    def fill(self, tensors: Sequence[Any], sizes: Sequence[Any] = ()) -> Any:
        """A new value of this structure."""
        if len(tensors) != self.num_tensors or len(sizes) != self.num_sizes:
            raise ValueError(f"{len(tensors)} tensors and {len(sizes)} sizes for {self.num_tensors} and {self.num_sizes}")

        if self.is_one_tensor:
            return tensors[0]

        def value_of(slot: _Hole | _Plain | _Reference) -> Any:
            if isinstance(slot, _Hole):
                return sizes[slot.index] if slot.is_size else tensors[slot.index]
            return slot.value

        return _Reader(io.BytesIO(self.skeleton), [value_of(slot) for slot in self.slots]).load()

    @cached_property
    def is_one_tensor(self) -> bool:
        """True if the value is a tensor, and nothing around it."""
        return self == _ONE_TENSOR

    def digest(self) -> int:
        """Returns a number that tells structures with other plain values apart, in this process."""
        digest = zlib.crc32(self.skeleton)
        for slot in self.slots:
            if isinstance(slot, _Plain):  # arrays are bytes
                digest = zlib.crc32(slot.value if isinstance(slot.value, bytes) else repr(slot.value).encode(), digest)
        return digest

    @property
    def references(self) -> tuple[Any, ...]:
        """Objects that the filled values share with the value that the structure was taken from."""
        return tuple(slot.value for slot in self.slots if isinstance(slot, _Reference))


@dataclass(frozen=True)
class Template:
    """A value taken apart.

    Attributes:
        structure: The value without its tensors.
        tensors: The tensors in it, each once, in the order in which they are found.
        sizes: Symbolic sizes in it, one for each place.
    """

    structure: Structure
    tensors: tuple[Tensor, ...]
    sizes: tuple[Any, ...] = ()

    @classmethod
    def of(cls, value: Any, *, shared: Container[int] = ()) -> Template:
        """Takes a value apart, whatever it is made of.

        Args:
            value: The value.
            shared: ``id`` of objects that are not looked into: every filled value has the very same.

        Raises:
            NotFillable: A function in it holds a tensor.
        """
        file = io.BytesIO()
        writer = _Writer(file, shared)
        writer.dump(value)
        structure = Structure(len(writer.tensors), len(writer.sizes), file.getvalue(), tuple(writer.slots))
        return cls(structure, tuple(writer.tensors), tuple(writer.sizes))

    def fill(self, tensors: Sequence[Any]) -> Any:
        """A new value of the same structure with each tensor exchanged."""
        return self.structure.fill(tensors, self.sizes)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """A value of the same structure with ``function`` applied to each tensor, once where it occurs twice."""
    template = Template.of(value)
    return template.fill([function(tensor) for tensor in template.tensors])


def graft(target: Any, source: Any) -> None:
    """Makes ``target`` what ``source`` is, in place: whoever holds an object inside it sees the change."""
    if target is source or isinstance(target, (Tensor, *_BY_REFERENCE)) or type(target) is not type(source):
        return
    if isinstance(target, (list, tuple)):
        for one, other in zip(target, source, strict=False):
            graft(one, other)
        if isinstance(target, list):
            target[:] = [_graft(*pair) for pair in zip(target, source, strict=False)] + source[len(target) :]
    elif isinstance(target, dict):
        _graft_entries(target, source)
    if hasattr(target, "__dict__"):
        _graft_entries(vars(target), vars(source))


def _graft_entries(target: dict[Any, Any], source: dict[Any, Any]) -> None:
    entries = {key: _graft(target[key], value) if key in target else value for key, value in source.items()}
    target.clear()
    target.update(entries)


def _graft(target: Any, source: Any) -> Any:
    """The object that belongs where ``target`` was: itself, made equal, if it can be."""
    if type(target) is type(source) and (isinstance(target, (list, dict)) or hasattr(target, "__dict__")):
        if isinstance(target, (Tensor, *_BY_REFERENCE)):
            return source
        graft(target, source)
        return target
    return source


def describe(value: Any) -> str:
    """A value for a message: tensors by their shapes only."""
    try:
        return repr(map_tensors(lambda tensor: _Shown(f"tensor{tuple(tensor.shape)}"), value))[:500]
    except Exception:  # an object that checks what it is made of
        _logger.debug("A %s has no usable repr", type(value).__name__, exc_info=True)
        return f"an object of type {type(value).__name__}"


class _Shown(str):
    """A text without quotes, for a tensor."""

    __repr__ = str.__str__


_BY_VALUE = (str, bytes, torch.dtype, torch.device, torch.Size)
_BY_REFERENCE = (type, FunctionType, BuiltinFunctionType, ModuleType, nn.Module, torch.Generator)


def _itself(value: Any) -> Any:
    return value


class _Writer(pickle.Pickler):
    """Writes a structure; what pickle must not look into becomes a number of a slot."""

    def __init__(self, file: io.BytesIO, shared: Container[int]) -> None:
        super().__init__(file, protocol=5)
        self._shared = shared
        self.slots: list[_Hole | _Plain | _Reference] = []
        self.tensors: list[Tensor] = []
        self.sizes: list[Any] = []
        self._slot_of: dict[Any, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        """The number of the object's slot, or None where pickle goes on as usual."""
        if isinstance(obj, Tensor):
            if id(obj) not in self._slot_of:
                self._slot_of[id(obj)] = self._add(_Hole(len(self.tensors)))
                self.tensors.append(obj)
            return self._slot_of[id(obj)]
        if isinstance(obj, SYMBOLIC_TYPES):
            self.sizes.append(obj)
            return self._add(_Hole(len(self.sizes) - 1, is_size=True))
        if type(obj) in _BY_VALUE and not (isinstance(obj, torch.Size) and any(isinstance(n, SYMBOLIC_TYPES) for n in obj)):
            # A size with symbols has no value yet, and is taken apart as tuples are.
            # pickle would write the second of two equal strings as a string or as a reference, whether or not they are one
            return self._once(_Plain(obj))
        if isinstance(obj, _Reference):  # from below
            return self._once(obj)
        if isinstance(obj, _BY_REFERENCE) or id(obj) in self._shared:
            if isinstance(obj, FunctionType) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(closure_of(obj))):
                raise NotFillable(f"the function {obj.__qualname__} captures a tensor from the enclosing code")
            return self._once(_Reference(obj))
        return None

    def reducer_override(self, obj: Any) -> Any:
        """How pickle takes an object apart: as it says itself, and not at all where it cannot be."""
        if type(obj) in copyreg.dispatch_table:
            return NotImplemented
        try:
            reduced = obj.__reduce_ex__(4)
        except Exception:
            _logger.debug("A %s cannot be flattened", type(obj).__name__, exc_info=True)
            return _itself, (_Reference(obj),)
        return (_itself, (_Reference(obj),)) if isinstance(reduced, str) else reduced

    def _once(self, slot: _Plain | _Reference) -> int:
        if slot not in self._slot_of:
            self._slot_of[slot] = self._add(slot)
        return self._slot_of[slot]

    def _add(self, slot: _Hole | _Plain | _Reference) -> int:
        self.slots.append(slot)
        return len(self.slots) - 1


class _Reader(pickle.Unpickler):
    """Reads a structure with the slots' values put in."""

    def __init__(self, file: io.BytesIO, values: list[Any]) -> None:
        super().__init__(file)
        self._values = values

    def persistent_load(self, pid: Any) -> Any:
        """The value of a slot."""
        return self._values[pid]


def closure_of(function: FunctionType) -> dict[str, Any]:
    """Returns the variables that a function captures, by name, except those that are not assigned yet."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:  # no `suppress`, which takes longer than all else here
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


_ONE_TENSOR = Template.of(torch.empty(0)).structure  # made here: a run that counts torch's calls would count this one
