"""Remembers what user code may change, puts it back, and says what has changed.

A dry run of a step must leave nothing behind: no count, no list entry, no tensor without data, wherever it is. So everything
that is reached from the module is remembered: what its attributes hold, at any depth, what its classes hold, and the global
variables that its code names (``user_code.contents`` says how, and what is left alone). Objects keep their identity;
only what is in them is put back. Values of tensors are not looked at here, see ``user_code.writes``.

What is remembered is bounded, because data may hang on a module: of a container with more than ``MAX_WALKED`` entries the
entries are remembered, and not what is in them; with more than ``contents.MAX_ENTRIES`` it is left alone, and so are arrays of
more than ``contents.MAX_ARRAY_BYTES``. After ``MAX_OBJECTS`` objects, those nearest to the module first, no more are looked
at. The functions of installed libraries are not searched for global variables.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import is_
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from lightning_fxpipe._compat.loops import LOADER_NAMES, loaders_of
from lightning_fxpipe._compat.torch import is_in_memory, modules_inside, version_of
from lightning_fxpipe.user_code.code_contents import CLASS, Globals, functions_of, globals_of
from lightning_fxpipe.user_code.code_names import names_of
from lightning_fxpipe.user_code.contents import (
    ABSENT,
    ATTRIBUTES,
    GENERATOR,
    LIST,
    MODULE,
    Kind,
    changed_in_module,
    changed_keys,
    with_changes,
)
from lightning_fxpipe.user_code.iterators import ITERATOR, Mark, Rewindable, is_iterator
from lightning_fxpipe.user_code.kinds import is_unchanging, is_users, kinds_of
from lightning_fxpipe.user_code.paths import CONTENTS, Difference, Path, at_path, look, name_of

_logger = logging.getLogger("lightning_fxpipe")

MAX_OBJECTS = 50_000
MAX_WALKED = 10_000

_UNCHANGING = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type(Ellipsis), slice, range, type(NotImplemented), type(len)}
)

# Roots that hold a run's data, which is looked at only if code names one of these attributes.
_IF_NAMED = {f"trainer.{name}": frozenset({name, "fit_loop"}) for name in LOADER_NAMES}

# Of optimizers: a root, and the place of a group's parameters in it.
_GROUPS, _PARAMETERS = ".param_groups", ("key", "params")


@dataclass(slots=True)
class _Record:
    """Former contents of an object; the object is kept, so that its ``id`` stays its own."""

    owner: Any
    kind: Kind
    contents: Any
    parent: int  # index of the record in whose contents it was found first; -1 for a root
    key: Any  # there; the name of a root

    @property
    def is_large(self) -> bool:
        """True for contents that are not compared around each call of a module."""
        size = getattr(self.contents, "nbytes", None)  # of an array
        return (len(self.contents) if size is None and hasattr(self.contents, "__len__") else size or 0) > MAX_WALKED

    def has_changed(self) -> bool:
        """True if something else is in the object now."""
        return not self.kind.is_still(self.owner, self.contents)


@dataclass(frozen=True, slots=True)
class _Space:
    """A class, or the global variables of a file: code in it may name what was not there when it was searched.

    Attributes:
        names: What is there, by name.
        known: The values of a class; the names of global variables, whose values change.
    """

    names: Mapping[str, Any]
    known: list[Any]

    def is_current(self) -> bool:
        """True if the same is there now."""
        if isinstance(self.names, dict):
            return len(self.names) == len(self.known)
        return len(self.names) == len(self.known) and all(map(is_, self.names.values(), self.known))


def _differ_in_plain_values(kind: Kind, before: Any, now: Any) -> bool:
    """True if each object that can be looked into is where it was."""
    old, new = dict(kind.entries(before)), dict(kind.entries(now))
    changed = [key for key in {**old, **new} if old.get(key, ABSENT) is not new.get(key, ABSENT)]
    return all(type(value) in _UNCHANGING for key in changed for value in (old.get(key), new.get(key)))


def _same_objects(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if two mappings have the same objects; a method is another object each time it is asked for."""
    return one.keys() == other.keys() and all(
        value is other[name] or (isinstance(value, MethodType) and value == other[name]) for name, value in one.items()
    )


class Snapshot:
    """Objects that can be reached from others, at one moment.

    Args:
        roots: The objects, by name. Instances are looked into whatever they are.
        shallow: Objects of which only the attributes themselves are remembered, by name.
        enters_modules: Whether modules that are reached are looked into; if not, the roots only.

    Attributes:
        modules_met: The modules that were reached and not looked into.
        left_alone: The classes of objects that may change and that nothing is known of.
    """

    def __init__(
        self, roots: Mapping[str, Any], *, shallow: Mapping[str, Any] | None = None, enters_modules: bool = True
    ) -> None:
        self._roots, self._shallow = dict(roots), dict(shallow or {})
        self._spaces: list[_Space] = []
        self._records: list[_Record] = []
        self._seen: dict[int, Any] = {}  # by id, which no other object can get so
        self._seen_types: set[type] = set()
        self._first: dict[int, int] = {}  # by id of an object, its first record
        self._enters_modules = enters_modules
        self.modules_met: list[nn.Module] = []
        self.left_alone: set[type] = set()
        self._tensors: list[tuple[Tensor, int, int, Any]] = []  # with their versions, and where they are
        self._iterators: list[tuple[Any, int, Any]] = []  # that cannot go back, and where they are
        self._marks: list[Mark] = []
        self._parameter_lists: set[int] = set()  # records of those in optimizers' groups, whose entries are the module's
        for name, value in (shallow or {}).items():
            self._seen[id(value)] = value
            self._records.append(_Record(value, ATTRIBUTES, ATTRIBUTES.take(value), -1, name))
        self._named: set[str] = set()
        self._waiting: list[tuple[Any, int, Any]] = [
            (value, -1, name) for name, value in roots.items() if name not in _IF_NAMED
        ]
        for value, parent, key in self._waiting:  # which grows meanwhile
            if id(value) not in self._seen and len(self._records) < MAX_OBJECTS:
                self._seen[id(value)] = value
                self._reach(value, parent, key)
        self._waiting.clear()

    def renew(self, roots: Mapping[str, Any], shallow: Mapping[str, Any]) -> bool:
        """Makes it one of this moment, where only plain values have changed. This takes an eighth of the time.

        Returns:
            Whether it is; it is no snapshot of any moment otherwise.
        """
        if self._iterators or self._marks or not (_same_objects(roots, self._roots) and _same_objects(shallow, self._shallow)):
            return False
        if not all(space.is_current() for space in self._spaces):
            return False
        for record in self._records:
            now = record.kind.take(record.owner)
            if now is ABSENT or record.kind is ITERATOR:
                return False
            if not record.kind.is_same(now, record.contents):
                if not _differ_in_plain_values(record.kind, record.contents, now):
                    return False
                record.contents = now
        self._tensors = [(tensor, version_of(tensor), parent, key) for tensor, _, parent, key in self._tensors]
        return True

    def restore(self) -> bool:
        """Makes all objects what they were; returns whether one was not."""
        changed = [record for record in self._records if record.has_changed()]
        for record in changed:
            record.kind.put(record.owner, record.contents)
        return bool(changed)

    def take_back(self) -> Callable[[], None]:
        """Restores; returns a function that makes the same changes again, to what the objects are by then."""
        changed = [(record, record.kind.take(record.owner)) for record in self._records if record.has_changed()]
        self.restore()

        def again() -> None:
            for record, after in changed:
                kind, now = record.kind, record.kind.take(record.owner)
                is_unchanged = now is not ABSENT and kind.is_same(now, record.contents)
                if after is not ABSENT:
                    kind.put(record.owner, after if is_unchanged else with_changes(now, record.contents, after))

        return again

    def is_current(self) -> bool:
        """True if all objects are still what they were."""
        return not any(record.has_changed() for record in self._records)

    def has_changed(self, owner: Any) -> bool:
        """True if an object that was reached has other contents now."""
        index = self._first.get(id(owner), len(self._records))
        return any(record.owner is owner and record.has_changed() for record in self._records[index : index + 2])

    def records(self) -> Iterable[_Record]:
        """The contents remembered, one for each object."""
        return self._records

    def records_with_paths(self) -> Iterator[tuple[_Record, Path]]:
        """Yields the contents remembered, and where each was reached first."""
        return ((record, self._path(index)) for index, record in enumerate(self._records))

    def reached_from(self, *roots: str) -> Iterator[tuple[int, _Record]]:
        """Yields the contents of objects reached from roots, by how their names begin, with numbers for :meth:`differences`."""
        from_root: list[bool] = []
        for index, record in enumerate(self._records):
            from_root.append(str(record.key).startswith(roots) if record.parent < 0 else from_root[record.parent])
            if from_root[index]:
                yield index, record

    def differences(self, indices: Iterable[int] | None = None) -> Iterator[Difference]:
        """Differences from now, where it can still be reached as before; of all records, or those with some numbers."""
        for index in range(len(self._records)) if indices is None else indices:
            record = self._records[index]
            if not record.has_changed():
                continue
            now = record.kind.take(record.owner)
            if now is not ABSENT and record.kind.is_same(now, record.contents):
                continue
            if self._is_reached(index):
                yield from _differing(record, now, self._path(index))

    def passing_over(self) -> AbstractContextManager[None]:
        """Passes over as the function :func:`passing_over`."""
        return passing_over([self])

    @property
    def has_iterators(self) -> bool:
        """True if iterators were reached, which :meth:`restore` puts back only after :meth:`keep_items`."""
        return bool(self._iterators) or any(record.kind is ITERATOR for record in self._records)

    def make_iterators_rewindable(self) -> bool:
        """Exchanges iterators that cannot go back for such as can; returns whether there were any."""
        made: dict[int, Rewindable] = {}
        for iterator, parent, name in self._iterators:
            record = self._records[parent]
            record.kind.set(record.owner, name, made.setdefault(id(iterator), Rewindable(iterator)))
        return bool(made)

    def keep_items(self) -> None:
        """Lets :meth:`restore` put back what is drawn from iterators."""
        self._marks = [record.owner.mark(self) for record in self._records if record.kind is ITERATOR]

    def is_drawn_from(self) -> bool:
        """True if an iterator is at another place now."""
        return any(record.kind is ITERATOR and record.owner.position != record.contents for record in self._records)

    def place_of(self, tensor: Tensor) -> Path | None:
        """Returns the path to a tensor that is neither a parameter nor a buffer; None if it was not reached."""
        places = ((*self._path(parent), key) for found, _, parent, key in self._tensors if found is tensor)
        return next(places, None)

    def tensors(self) -> list[Tensor]:
        """The tensors that were reached, but for parameters and buffers."""
        return [tensor for tensor, *_ in self._tensors]

    def tensors_reached_from(self, root: str) -> Iterator[Tensor]:
        """Yields the tensors, except parameters and buffers, that were reached from a root, by its name."""
        return (tensor for tensor, _, parent, _ in self._tensors if parent >= 0 and self._path(parent)[0] == root)

    def written_tensors(self, memory: Collection[int] = ()) -> Iterator[Difference]:
        """Tensors that have been changed in place, as far as their version tells, and are still where they were.

        Args:
            memory: That has been written to: ``.data`` is another tensor, with a version of its own.
        """
        for tensor, version, parent, key in self._tensors:
            is_written = version_of(tensor) != version or is_in_memory(tensor, memory)
            if is_written and self._is_at(tensor, parent, key) and self._is_reached(parent):
                yield Difference((*self._path(parent), key), None, tensor)

    def changed_names(self, known: Collection[str] = ()) -> list[str]:
        """Names of what has changed, as code would write it up to the first attribute: ``self.stats``.

        Args:
            known: Attributes of the first root that may change.
        """
        names = {name_of(difference.path): None for difference in self.differences()}
        return [name for name in names if name not in {f"self.{attribute}" for attribute in known}]

    def owner_of(self, path: Path) -> Any:
        """The object in which a place is."""
        return at_path({str(record.key): record.owner for record in self._records if record.parent < 0}, path[:-1])

    def has_reached(self, value: Any) -> bool:
        """True if an object was reached, looked into or not."""
        return id(value) in self._seen

    def path_of(self, value: Any) -> Path | None:
        """Returns the path to an object; None if it was not reached, or has changed and :meth:`differences` does not tell."""
        index = first = self._first.get(id(value), len(self._records))
        while index < len(self._records) and (record := self._records[index]).owner is value:
            if record.has_changed() and not self._is_reached(index):
                return None
            index += 1
        return None if index == first else self._path(first)

    # ------------------------------------------------------------------ reaching

    def _reach(self, value: Any, parent: int, key: Any) -> None:
        cls: Any = type(value)
        if parent >= 0 and not self._enters_modules and isinstance(value, nn.Module):
            self.modules_met.append(value)
            return
        if issubclass(cls, type):
            if is_users(value):
                self._spaces.append(_Space(vars(value), list(vars(value).values())))
                index = self._remember(value, CLASS, parent, key)
                self._waiting += [(f, index, ("code", position)) for position, f in enumerate(functions_of(value))]
            return
        if isinstance(value, Tensor):
            if not value.is_inference() and parent not in self._parameter_lists:
                self._tensors.append((value, version_of(value), parent, key))
            return
        kinds = kinds_of(value)
        if not kinds and parent < 0 and hasattr(value, "__dict__"):
            kinds = (ATTRIBUTES,)
        indices = [index for kind in kinds if (index := self._remember(value, kind, parent, key)) >= 0]
        if not indices:
            if not is_unchanging(cls):
                self.left_alone.add(cls)
            return
        if isinstance(value, Globals):
            self._spaces.append(_Space(value.values, list(value.values)))
        if isinstance(value, FunctionType):
            self._look_for_names(value)
            self._waiting += [(found, indices[0], ("globals", found.module)) for found in globals_of(value)]
            if (wrapped := getattr(value, "__wrapped__", None)) is not None:
                self._waiting.append((wrapped, indices[0], ("code", 0)))
        elif cls not in self._seen_types:
            self._seen_types.add(cls)
            bases = enumerate(cls.__mro__)
            self._waiting += [(base, indices[0], ("mro", position)) for position, base in bases if is_users(base)]

    def _look_for_names(self, function: FunctionType) -> None:
        named = names_of(function.__code__)[0]
        for root in _IF_NAMED.keys() - self._named:
            if root in self._roots and not _IF_NAMED[root].isdisjoint(named):
                self._named.add(root)
                self._waiting.append((self._roots[root], -1, root))

    def _remember(self, value: Any, kind: Kind, parent: int, key: Any) -> int:
        """The number of the record; -1 where there is none."""
        try:
            contents = kind.take(value)
        except Exception as error:  # such as of a generator for which the system draws
            _logger.debug("A %s is not saved: %s", type(value).__name__, error)
            contents = ABSENT
        if contents is ABSENT:
            return -1
        index = len(self._records)
        if parent >= 0 and key == _PARAMETERS and self._path(parent)[0].endswith(_GROUPS):
            self._parameter_lists.add(index)
        self._first.setdefault(id(value), index)
        self._records.append(_Record(value, kind, contents, parent, key))
        if kind is MODULE or not hasattr(contents, "__len__") or len(contents) <= MAX_WALKED:
            for name, entry in kind.entries(contents):
                if is_iterator(entry):
                    self._iterators.append((entry, index, name))
                elif type(entry) not in _UNCHANGING and id(entry) not in self._seen:
                    self._waiting.append((entry, index, (kind.name, name)))
        return index

    # ------------------------------------------------------------------ paths

    def _path(self, index: int) -> Path:
        steps: list[Any] = []
        while index >= 0:
            record = self._records[index]
            steps.append(record.key)
            index = record.parent
        return tuple(reversed(steps))

    def _is_reached(self, index: int) -> bool:
        """True if each object on the way is still where it was."""
        while (record := self._records[index]).parent >= 0:
            if not self._is_at(record.owner, record.parent, record.key):
                return False
            index = record.parent
        return True

    def _is_at(self, value: Any, parent: int, key: Any) -> bool:
        try:
            found = look(self._records[parent].owner, key)
            return found.values is value.values if isinstance(value, Globals) else found is value
        except (KeyError, IndexError, AttributeError):
            return False


@contextmanager
def passing_over(snapshots: Iterable[Snapshot]) -> Iterator[None]:
    """Makes changes of the block no difference to any of the snapshots: :meth:`Snapshot.restore` does not put them back, but
    for entries of lists and the like in which something was different before.
    """
    records: dict[tuple[int, int], list[_Record]] = {}
    for snapshot in snapshots:
        for record in snapshot.records():
            records.setdefault((id(record.owner), id(record.kind)), []).append(record)
    # What is in an object that has not changed since it was remembered is remembered already.
    before = [same[0].kind.take(same[0].owner) if same[0].has_changed() else same[0].contents for same in records.values()]
    try:
        yield
    finally:
        for same, earlier in zip(records.values(), before, strict=True):
            kind, owner = same[0].kind, same[0].owner
            if earlier is ABSENT or kind.is_still(owner, earlier):
                continue
            now = kind.take(owner)
            for record in same if now is not ABSENT else ():
                is_as_taken = kind.is_same(earlier, record.contents)
                record.contents = now if is_as_taken else with_changes(record.contents, earlier, now)


def user_state(root: nn.Module, *functions: Any, enters_modules: bool = True) -> Snapshot:
    """Snapshot of all that a module's code may change: the module, what hangs on it, and what it reaches through its Trainer.

    Args:
        root: The module.
        *functions: Code that runs beside its methods.
        enters_modules: Whether its submodules are looked into.
    """
    roots, shallow = roots_of(root, *functions)
    found = Snapshot(roots, shallow=shallow, enters_modules=enters_modules)
    if found.make_iterators_rewindable():
        found = Snapshot(roots, shallow=shallow, enters_modules=enters_modules)
    found.keep_items()
    return found


def state_of_opened(module: nn.Module) -> Snapshot:
    """Snapshot of all that a module's own code reaches but for modules, and of those inside it the attributes."""
    below = {f"self.{path}": inside for path, inside in modules_inside(module).items() if path}
    return Snapshot({"self": module}, shallow=below, enters_modules=False)


def roots_of(root: nn.Module, *functions: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The objects that a module's code begins from, by name, and those of which it changes attributes only.

    Of a Trainer these are its callbacks, its datamodule, and what says how fast the optimizers learn.
    """
    roots: dict[str, Any] = {"self": root}
    trainer: Any = vars(root).get("_trainer")
    if trainer is not None:
        callbacks: list[Any] = getattr(trainer, "callbacks", [])
        roots |= {f"trainer.callbacks[{i}]": each for i, each in enumerate(callbacks) if kinds_of(each)}
        roots |= {f"trainer.{name}": loaders for name, loaders in loaders_of(trainer).items()}
        roots["trainer.datamodule"] = getattr(trainer, "datamodule", None)
        strategy = trainer.strategy  # the Trainer itself would give what stands for optimizers that are yet to come
        roots |= {f"optimizers[{i}]{_GROUPS}": each.param_groups for i, each in enumerate(strategy.optimizers)}
        schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
        roots |= {f"lr_schedulers[{i}]": each for i, each in enumerate(schedulers)}
    roots |= {f"step {i}": function for i, function in enumerate(functions)}
    return roots, {} if trainer is None else {"trainer": trainer}


def _differing(record: _Record, now: Any, path: Path) -> Iterator[Difference]:
    kind, before = record.kind, record.contents
    as_a_whole = (*path, (CONTENTS, kind.name))
    if now is ABSENT:  # it has become too large to look at
        yield Difference(as_a_whole, None, record.owner)
    elif kind is MODULE:
        for key in changed_in_module(before, now):
            found = now[0].get(key, ABSENT) if isinstance(key, str) else now[1].get(key[0], {}).get(key[1], ABSENT)
            yield Difference((*path, (kind.name, key)), None, found)
    elif kind is LIST:
        common = min(len(before), len(now))
        for index in range(common):
            if now[index] is not before[index]:
                yield Difference((*path, (kind.name, index)), None, now[index])
        if len(now) != len(before):
            yield Difference(path, common, now[common:])
    elif isinstance(before, dict) and kind is not GENERATOR:
        keys = changed_keys(before, now)
        for key in keys:
            yield Difference((*path, (kind.name, key)), None, now.get(key, ABSENT))
        if not keys:  # another order
            yield Difference(as_a_whole, None, now)
    else:
        yield Difference(as_a_whole, None, now)
