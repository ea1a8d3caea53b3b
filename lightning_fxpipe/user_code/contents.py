"""Contents of objects that user code may change: how they are taken out, compared and put back, by the object's type.

Lists, dicts, sets and deques and their subclasses, tuples (for what is in them), arrays, random generators, modules, instances
of classes of user code (``__dict__`` and ``__slots__``), those classes themselves, functions with their closures and default
values, datasets, samplers, dataloaders and callbacks of libraries, and the global variables that functions name. No property or
descriptor of the user's is asked. What torch and Lightning keep for themselves (the Trainer, iterators, optimizers), files,
locks, mocks and whatever else the standard library makes is left alone.
"""

from __future__ import annotations

import array
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, replace
from operator import eq, getitem, is_, setitem
from types import MappingProxyType, MemberDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe._compat.torch import outside_fakes

ABSENT: Any = object()


# A larger container is data; an array or buffer of more bytes too.
MAX_ENTRIES = 2_000_000
MAX_ARRAY_BYTES = 16 * 2**20


def _set_nothing(value: Any, key: Any, new: Any) -> None:
    """Changes nothing, as contents of this kind cannot change."""


@dataclass(frozen=True)
class Kind:
    """How the contents of one kind of object are handled.

    Attributes:
        name: The kind's; with a key it is a step of a path.
        take: A copy of what is in an object; :data:`ABSENT` where it is left alone.
        peek: The same to compare at once, which may be no copy; by default it is one.
        entries: Keys and values in the contents.
        look: ``look(object, key)`` is one of them as it is now. Raises whatever a missing one raises.
        put: Makes an object have such contents again; by default it is left, as what cannot change.
        set: ``set(object, key, value)`` changes one; :data:`ABSENT` removes it.
        is_same: Whether two contents hold the same objects.
    """

    name: str
    take: Callable[[Any], Any]
    _: KW_ONLY
    entries: Callable[[Any], Iterable[tuple[Any, Any]]] = lambda contents: contents.items()
    look: Callable[[Any, Any], Any] = getitem
    put: Callable[[Any, Any], None] = lambda value, contents: None
    set: Callable[[Any, Any, Any], None] = _set_nothing
    is_same: Callable[[Any, Any], bool] = lambda one, other: True
    peek: Callable[[Any], Any] | None = None

    @property
    def can_change(self) -> bool:
        """True where :attr:`set` changes something."""
        return self.set is not _set_nothing

    def is_still(self, owner: Any, contents: Any) -> bool:
        """Returns True if an object still has such contents."""
        now = (self.peek or self.take)(owner)
        return now is not ABSENT and self.is_same(now, contents)


def kind_by_name(
    name: str,
    take: Callable[[Any], dict[str, Any]],
    change: Callable[[Any, str, Any], None],
    look: Callable[[Any, str], Any] | None = None,
) -> Kind:
    """A kind whose contents have names; nothing is touched that has not changed."""

    def put_back(owner: Any, contents: dict[str, Any]) -> None:
        for key in changed_keys(take(owner), contents):
            change(owner, key, contents.get(key, ABSENT))

    return replace(fixed_kind(name, take, look), put=put_back, set=change, is_same=same_mapping)


def fixed_kind(name: str, take: Callable[[Any], dict[str, Any]], look: Callable[[Any, str], Any] | None = None) -> Kind:
    """A kind whose contents have names, and cannot change."""
    return Kind(name, take, look=look or (lambda owner, key: take(owner)[key]))


def slots(cls: type) -> list[tuple[str, MemberDescriptorType]]:
    """The slots of a class and its bases, by name."""
    return [
        (name, member)
        for base in cls.__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    ]


# ------------------------------------------------------------------ comparing and putting back


def _same_sequence(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def same_mapping(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Returns True if two mappings have the same objects, in the same order."""
    if not one and not other:
        return True
    if len(one) != len(other) or not all(map(is_, one.values(), other.values())):
        return False
    return all(map(is_, one, other)) or list(one) == list(other)


def _base_of(mapping: dict[Any, Any]) -> Any:
    """The class whose methods change a dict without those of the user's own class."""
    return OrderedDict if isinstance(mapping, OrderedDict) else dict


def _put_mapping(mapping: dict[Any, Any], contents: Mapping[Any, Any]) -> None:
    base = _base_of(mapping)
    base.clear(mapping)
    for key, value in contents.items():
        base.__setitem__(mapping, key, value)


def set_key(mapping: dict[Any, Any], key: Any, value: Any) -> None:
    """Sets an entry of a dict, or removes it."""
    if value is ABSENT:
        _base_of(mapping).pop(mapping, key, None)
    else:
        _base_of(mapping).__setitem__(mapping, key, value)


def _put_set(target: set[Any], contents: set[Any]) -> None:
    set.clear(target)
    set.update(target, contents)


def _put_deque(target: deque[Any], contents: Iterable[Any]) -> None:
    deque.clear(target)
    deque.extend(target, contents)


def _if_small(take: Callable[[Any], Any], size: Callable[[Any], int] = len, limit: int = MAX_ENTRIES) -> Callable[[Any], Any]:
    return lambda value: take(value) if size(value) <= limit else ABSENT


def no_entries(contents: Any) -> tuple[()]:
    """Returns the entries of an object that holds no other objects."""
    return ()


def _members(contents: Any) -> Iterable[tuple[Any, Any]]:
    return ((member, member) for member in contents)


def _of_dict(instance: Any) -> dict[str, Any]:
    return object.__getattribute__(instance, "__dict__")  # type: ignore[no-any-return]


def _take_slots(instance: Any) -> dict[str, Any]:
    found = {}
    for name, member in slots(type(instance)):
        try:
            found[name] = member.__get__(instance)
        except AttributeError:
            continue  # not set
    return found


def _take_context(variable: ContextVar[Any]) -> dict[str, Any]:
    value = variable.get(ABSENT)
    return {} if value is ABSENT else {"get()": value}


def _set_context(variable: ContextVar[Any], name: str, value: Any) -> None:
    if value is not ABSENT:  # which only the token of whoever has set it does
        variable.set(value)


def _set_slot(instance: Any, name: str, value: Any) -> None:
    member = next(member for own, member in slots(type(instance)) if own == name)
    if value is not ABSENT:
        member.__set__(instance, value)
    elif name in _take_slots(instance):
        member.__delete__(instance)


# ------------------------------------------------------------------ modules

_TORCHS_OWN = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))
_TORCHS_NAMES = frozenset(_TORCHS_OWN)
# Their tensors are looked after by whoever runs the module.
_HOLD_TENSORS = frozenset({"_parameters", "_buffers", "_non_persistent_buffers_set"})

# The attributes, and what is in torch's own dictionaries among them.
ModuleContents = tuple[dict[str, Any], dict[str, Any]]


def _take_module(module: nn.Module) -> ModuleContents:
    attributes = _of_dict(module)
    return dict(attributes), {name: attributes[name].copy() for name in _TORCHS_OWN if name in attributes}


def _peek_module(module: nn.Module) -> ModuleContents:
    attributes = _of_dict(module)
    return attributes, {name: attributes[name] for name in _TORCHS_OWN if name in attributes}


def _put_module(module: nn.Module, contents: ModuleContents) -> None:
    attributes, inside = contents
    _put_mapping(_of_dict(module), attributes)
    for name, before in inside.items():
        owned = attributes[name]
        if not _same_inside(owned, before):
            owned.clear()
            owned.update(before)


def _module_entries(contents: ModuleContents) -> Iterable[tuple[Any, Any]]:
    attributes, inside = contents
    for name, value in attributes.items():
        if name not in _TORCHS_NAMES:
            yield name, value
    for name, owned in inside.items():
        if owned and name not in _HOLD_TENSORS and isinstance(owned, dict):
            for key, value in owned.items():
                yield (name, key), value


def _look_in_module(module: nn.Module, key: Any) -> Any:
    return _of_dict(module)[key] if isinstance(key, str) else _of_dict(module)[key[0]][key[1]]


def _same_module(one: ModuleContents, other: ModuleContents) -> bool:
    return same_mapping(one[0], other[0]) and all(
        _same_inside(inside, other[1].get(name, {})) for name, inside in one[1].items()
    )


def _same_inside(one: Any, other: Any) -> bool:
    if not one and not other:  # as most are, of most modules
        return True
    return same_mapping(one, other) if isinstance(one, dict) else bool(one == other)


def changed_in_module(before: ModuleContents, now: ModuleContents) -> list[Any]:
    """Keys of what is another object, or gone, or new: names of attributes; (dictionary, name) for what torch's own hold."""
    keys = changed_keys(before[0], now[0])
    for name, inside in before[1].items():
        if isinstance(inside, dict):
            keys += [(name, key) for key in changed_keys(inside, now[1].get(name, {}))]
    return keys


def changed_keys(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    """Keys in two mappings of what is another object, or gone, or new."""
    return [key for key in {**before, **now} if before.get(key, ABSENT) is not now.get(key, ABSENT)]


def with_changes(contents: Any, before: Any, now: Any) -> Any:
    """Contents of an object with what has changed between two later moments; as they are where entries have no names."""
    if isinstance(contents, dict):
        keys = changed_keys(before, now)
        kept = {key: value for key, value in contents.items() if key not in keys}
        return kept | {key: now[key] for key in keys if key in now}
    if isinstance(contents, tuple) and isinstance(contents[0], dict):  # a module's
        inside = {name: with_changes(own, before[1].get(name, {}), now[1].get(name, {})) for name, own in contents[1].items()}
        return with_changes(contents[0], before[0], now[0]), inside
    return contents


# ------------------------------------------------------------------ arrays and generators


def _take_array(value: np.ndarray) -> Any:
    is_left = not value.flags.writeable or isinstance(value, np.memmap) or value.nbytes > MAX_ARRAY_BYTES
    return ABSENT if is_left else value.copy()


def _same_array(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype.hasobject:
        return _same_sequence(one.reshape(-1).tolist(), other.reshape(-1).tolist())
    return one.tobytes() == other.tobytes()


def _array_entries(contents: np.ndarray) -> Iterable[tuple[Any, Any]]:
    return enumerate(contents.reshape(-1).tolist()) if contents.dtype.hasobject else ()


def state_of(generator: Any) -> Any:
    """The state of a random generator of Python, torch or numpy."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, torch.Generator):
        with outside_fakes(), unwatched_torch():  # its state is a tensor, which no graph is about
            return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state_of(generator: Any, state: Any) -> None:
    """Inverse of :func:`state_of`."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        with outside_fakes(), unwatched_torch():
            generator.set_state(state)
    else:
        generator.set_state(state)


def _same_state(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return repr(one) == repr(other)
    with outside_fakes(), unwatched_torch():
        return torch.equal(one, other)


def _attributes(of: Callable[[Any], dict[str, Any]]) -> Kind:
    return Kind(
        "attribute",
        lambda value: dict(of(value)),
        peek=of,
        look=lambda value, key: of(value)[key],
        put=lambda value, contents: _put_mapping(of(value), contents),
        set=lambda value, key, new: set_key(of(value), key, new),
        is_same=same_mapping,
    )


ATTRIBUTES = _attributes(_of_dict)
LOCAL = _attributes(vars)  # those of a `threading.local` in this thread
MODULE = Kind(
    "attribute",
    _take_module,
    peek=_peek_module,
    entries=_module_entries,
    look=_look_in_module,
    put=_put_module,
    set=ATTRIBUTES.set,
    is_same=_same_module,
)
SLOTS = kind_by_name("slot", _take_slots, _set_slot)
CONTEXT = kind_by_name("context", _take_context, _set_context)  # compared, and not put back: whoever has set it has a token
MAPPING = Kind(
    "key",
    _if_small(lambda value: value.copy() if type(value) is dict else dict(_base_of(value).items(value))),
    look=lambda value, key: _base_of(value).__getitem__(value, key),
    put=_put_mapping,
    set=set_key,
    is_same=same_mapping,
)
LIST = Kind(
    "index",
    _if_small(lambda value: list.copy(value)),
    entries=enumerate,
    look=list.__getitem__,
    put=lambda value, contents: list.__setitem__(value, slice(None), contents),
    set=list.__setitem__,
    is_same=_same_sequence,
)
DEQUE = Kind("index", _if_small(list), entries=enumerate, put=_put_deque, set=setitem, is_same=_same_sequence)
SET = Kind("member", _if_small(lambda value: set.copy(value)), entries=_members, put=_put_set, is_same=set.__eq__)
TUPLE = Kind("index", _if_small(tuple), entries=enumerate)
FROZEN = Kind("member", _if_small(tuple), entries=_members)
VIEW = Kind("key", dict)
NUMPY = Kind(
    "array",
    _take_array,
    entries=_array_entries,
    look=lambda value, key: value.reshape(-1)[key],
    put=np.copyto,
    is_same=_same_array,
)
BUFFER = Kind(
    "array",
    _if_small(lambda value: value[:], limit=MAX_ARRAY_BYTES),
    entries=no_entries,
    put=lambda value, contents: setitem(value, slice(None), contents),
    set=setitem,
    is_same=eq,
)
# A loader keeps its workers, and the iterator that runs, for itself.
LOADER = replace(
    ATTRIBUTES,
    take=lambda value: {name: each for name, each in _of_dict(value).items() if name != "_iterator"},
    peek=None,
    put=lambda value, contents: _put_mapping(_of_dict(value), {**contents, "_iterator": _of_dict(value).get("_iterator")}),
)
GENERATOR = Kind("generator", state_of, entries=no_entries, put=set_state_of, is_same=_same_state)

# The classes of objects with such contents; a class of the user's that is derived from one of the first has attributes, too.
CONTAINERS: tuple[tuple[type, Kind], ...] = (*((dict, MAPPING), (list, LIST), (set, SET), (deque, DEQUE), (tuple, TUPLE)),)
OTHERS: tuple[tuple[Any, Kind], ...] = (
    *((frozenset, FROZEN), (MappingProxyType, VIEW), (np.ndarray, NUMPY), (nn.Module, MODULE), (DataLoader, LOADER)),
    ((bytearray, array.array), BUFFER),
    (threading.local, LOCAL),
    ((torch.Generator, random.Random, np.random.Generator, np.random.RandomState), GENERATOR),
)
