"""Paths from a root to an object that user code reaches, and differences at their ends."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_fxpipe.user_code.code_contents import CLASS, Globals, functions_of
from lightning_fxpipe.user_code.contents import ATTRIBUTES, CONTEXT, Kind
from lightning_fxpipe.user_code.kinds import kinds_of

# From the name of a root over (kind, key) to an object.
Path = tuple[Any, ...]
# The last step of a path where what is in an object has changed as a whole; with it goes the name of the kind.
CONTENTS = "contents"


@dataclass(frozen=True)
class Difference:
    """Something that has changed.

    Attributes:
        path: The name of a root, then (kind, key) for each step to what has changed; to a list that has grown or shrunk.
        start: For such a list, the index of the first new entry; else None.
        value: What it is now, or the new entries; ``ABSENT`` where it is gone.
    """

    path: Path
    start: int | None
    value: Any


def look(owner: Any, step: tuple[str, Any]) -> Any:
    """Takes one step of a path, from an object to another.

    Raises:
        KeyError, IndexError, AttributeError: There is nothing.
    """
    kind, key = step
    if kind == "mro":
        return type(owner).__mro__[key]
    if kind == "code":
        return functions_of(owner)[key] if isinstance(owner, type) else owner.__wrapped__
    if kind == "globals":
        return Globals(key, vars(sys.modules[key]), frozenset())
    if kind == "member":
        return next((entry for entry in owner if entry is key or entry == key), None)
    return kind_of_step(owner, kind).look(owner, key)


def kind_of_step(owner: Any, name: str) -> Kind:
    """How an object is handled in a step of a path.

    Raises:
        KeyError: It has no such contents: another object is there now.
    """
    return {kind.name: kind for kind in kinds_at(owner) or (ATTRIBUTES, CONTEXT)}[name]


def kinds_at(owner: Any) -> tuple[Kind, ...]:
    """Returns how an object on a path is handled; nothing for what cannot change or is left alone."""
    return (CLASS,) if isinstance(owner, type) else kinds_of(owner)


def at_path(roots: Mapping[str, Any], path: Path) -> Any:
    """The object that a path leads to.

    Raises:
        KeyError, IndexError, AttributeError: There is nothing.
    """
    owner = roots[path[0]]
    for step in path[1:]:
        owner = look(owner, step)
    return owner


def name_of(path: Path) -> str:
    """A path as its code would write it, up to the first name after a root, a class or a module: ``self.stats``."""
    name = path[0]
    for kind, key in path[1:]:
        if kind in ("attribute", "slot", "global", "class", "function"):
            return f"{name}.{key if isinstance(key, str) else key[-1]}"
        if kind == "globals":
            name = str(key)
        elif kind == "mro":
            name = f"type({path[0]})"
    return str(name)
