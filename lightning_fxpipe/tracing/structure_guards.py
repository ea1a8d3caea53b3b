"""The guard for what a graph is made of: the modules that it calls, and the code and hooks of those whose inside it has.

User code may put another activation into a model, a hook on a layer or a function in place of a forward, at any time. What
lies inside a module that stays whole runs as it is then; what was recorded would go on as it was.
"""

from __future__ import annotations

import inspect
import weakref
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import count
from types import MethodType
from typing import Any

from torch import fx, nn

from lightning_fxpipe._compat.torch import has_hooks, registries

_numbers = count()
_numbered: dict[int, tuple[Callable[[], Any], int]] = {}


@dataclass(frozen=True)
class StructureKey:
    """The modules of a graph.

    Attributes:
        opened: Paths of those whose inside is recorded.
        called: By the path of what holds them, the names of those that are called as they are.
    """

    opened: tuple[str, ...]
    called: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def of_graph(cls, graph: fx.Graph, opened: Collection[str]) -> StructureKey:
        """The key of a graph's modules; ``opened`` are the paths of those whose inside is recorded."""
        paths = [str(node.target) for node in graph.nodes if node.op == "call_module"] + [path for path in opened if path]
        called: dict[str, dict[str, None]] = {}
        for path in paths:
            holder, _, name = path.rpartition(".")
            called.setdefault(holder, {})[name] = None
        return cls(opened=tuple(opened), called=tuple((holder, tuple(names)) for holder, names in called.items()))

    def __str__(self) -> str:
        return "its submodules, hooks or a forward"

    def value(self, root: nn.Module) -> Any:
        """Returns the present values, in numbers."""
        found: list[int] = []
        for path in self.opened:
            module = submodule_at(root, path)
            found += [_number_of(_forward_of(module)), module is not None and has_hooks(module)]
        for path, names in self.called:
            holder = submodule_at(root, path)
            found += [_number_of(getattr(holder, name, None)) for name in names]
        return array("q", found).tobytes()


def submodule_at(root: nn.Module, path: str) -> Any:
    """The submodule that a module has at a path; None where there is none. ``get_submodule`` takes five times as long."""
    module = root
    for name in path.split(".") if path else ():
        inside, *_ = registries(module)
        if name not in inside or inside[name] is None:
            return None
        module = inside[name]
    return module


@dataclass(frozen=True, slots=True)
class InPlaceOf:
    """A forward of the package's in place of a module's own, which is what counts.

    Attributes:
        original: The forward that was set on the module; None where its class has it.
        forward: The forward of the package's.
    """

    original: Callable[..., Any] | None
    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the package's."""
        return self.forward(*args, **kwargs)


def _forward_of(module: Any) -> Any:
    """Returns a module's forward: the one set on the module, or its class's, which may make a new one for each read."""
    if module is None:
        return None
    own = vars(module).get("forward")
    if isinstance(own, InPlaceOf):
        own = own.original
    if own is None:
        return inspect.getattr_static(type(module), "forward", None)
    return own.__func__ if isinstance(own, MethodType) and own.__self__ is module else own  # a method is that of the class


def _number_of(thing: Any) -> int:
    """A number that no other object has or will have, as an ``id`` may be that of another one later; -1 for nothing."""
    if thing is None:
        return -1
    known = _numbered.get(id(thing))
    if known is None or known[0]() is not thing:
        known = _numbered[id(thing)] = (_reference_to(thing), next(_numbers))
    return known[1]


def _reference_to(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing  # kept, so that nothing else gets its id
