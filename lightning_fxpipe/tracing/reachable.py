"""Which code can reach an object, and names of the places in it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_fxpipe._compat.torch import has_hooks, modules_inside, tree_leaves
from lightning_fxpipe.tracing.guards import GuardKey, name_of_guard
from lightning_fxpipe.user_code.code_contents import Globals
from lightning_fxpipe.user_code.kinds import is_users
from lightning_fxpipe.user_code.paths import CONTENTS, Difference, Path, at_path
from lightning_fxpipe.user_code.snapshot import Snapshot

_NAMED = ("attribute", "slot", "global", "class", "function")
AROUND = "the code around them"
NEW = "new"  # last step of the path to the entries that a list has got
_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, bytearray, set, frozenset, type(None), Enum, np.generic)


class Readers:
    """Reachable objects of the code in one recording: whole modules, and what is recorded.

    Args:
        roots: Objects that paths begin at.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = roots
        self._by_module: dict[int, Snapshot] = {}

    def owner(self, place: Path) -> Any:
        """Returns the object that a place is in; None where it is gone."""
        with suppress(KeyError, IndexError, AttributeError):
            return at_path(self._roots, place[:-1])

    def module_reaches(self, module: nn.Module, place: Path) -> bool:
        """True if a whole module's code can reach a place."""
        owner = self.owner(place)
        if any(owner is inside for inside in modules_inside(module).values()):
            return True
        if id(module) not in self._by_module:
            self._by_module[id(module)] = reached_from(module)
        return owner is not None and reaches(self._by_module[id(module)], owner, str(place[-1][1]))

    def recorded_code(
        self, modules: Mapping[str, nn.Module], read: Collection[GuardKey], opened: Iterable[str], function: Any
    ) -> list[Snapshot]:
        """Returns what the code that is recorded can reach: its classes, and what it has read from modules.

        Args:
            modules: All modules, by path.
            read: The attributes that it has read.
            opened: Paths of the modules whose forward is recorded.
            function: The function that is recorded.
        """
        classes = {str(base): base for path in opened for base in type(modules[path]).__mro__ if is_users(base)}
        values = {
            name_of_guard(key): vars(modules[str(key[0])]).get(key[1])
            for key in read
            if isinstance(key, tuple) and key[0] in modules
        }
        found = [Snapshot({**classes, "function": function}, enters_modules=False)]
        return found + [Snapshot({"value": value}, enters_modules=False) for value in values.values()]


def has_own_code(module: nn.Module) -> bool:
    """True for a module with code that is not torch's own, in it or in hooks."""
    return any(is_users(type(each)) or has_hooks(each) for each in modules_inside(module).values())


def is_plain_value(value: Any) -> bool:
    """True for a value without tensors and modules in it."""
    return not any(isinstance(leaf, (Tensor, nn.Module)) for leaf in tree_leaves(value))


def reached_from(module: nn.Module, arguments: Any = None) -> Snapshot:
    """Returns what a module's code reaches: attributes of other modules, too, as where a hook has the LightningModule."""
    inside = {**modules_inside(module), "arguments": arguments}
    found = Snapshot(inside, enters_modules=False)
    others = {f"other {number}": each for number, each in enumerate(found.modules_met)}
    return Snapshot({**inside, **others}, enters_modules=False) if others else found


def reaches(snapshot: Snapshot, owner: Any, name: str) -> bool:
    """True if code from which ``snapshot`` was taken reaches an object; of global variables, the one with this name."""
    if isinstance(owner, Globals):
        found = (record.owner for record in snapshot.records() if isinstance(record.owner, Globals))
        return any(each.values is owner.values and name in each.names for each in found)
    return snapshot.has_reached(owner)


def place_of(difference: Difference) -> Path:
    """Returns where something has changed; of a list that has grown, with its former length."""
    return difference.path if difference.start is None else (*difference.path, (NEW, difference.start))


def written_place(place: Path) -> str:
    """Returns a place as code would write it."""
    name = str(place[0])
    for kind, key in place[1:]:
        if kind == "globals":
            name = str(key)
        elif kind == "mro":
            name = f"type({name})"
        elif kind in _NAMED:
            name = f"{name}.{key if isinstance(key, str) else key[-1]}"
        elif kind not in ("code", CONTENTS, NEW):
            name = f"{name}[{key!r}]"
    return name


def names_on_the_way(place: Path) -> list[str]:
    """Returns the names by which code that is no module's comes to a place: from the root, a forward hook or a variable on.

    Empty for a place in a submodule.
    """
    names: list[str] = []
    variable, is_in_module = "", False
    for kind, key in place[1:]:
        if kind in _NAMED and isinstance(key, tuple):  # a submodule, or one of the hooks of one
            names, is_in_module = [], key[0] == "_modules"
        elif kind == "function":  # a variable of a hook, which may have another name elsewhere
            names, variable = [], str(key)
        elif kind in _NAMED:
            names.append(str(key))
    return [] if is_in_module else names or [variable]


def is_same_value(one: Any, other: Any) -> bool:
    """True for the same object, equal plain values, and containers of such."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same_value, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same_value(value, other[key]) for key, value in one.items())
    if isinstance(one, np.ndarray):
        return bool(one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes())
    return isinstance(one, _PLAIN) and bool(one == other)
