"""``lightning`` and ``pytorch_lightning`` are the same code under two names, each with classes of its own.

This package is written for ``lightning``; what it asks of objects of the other is asked with the classes of both. Whether the
other is imported is the user's choice, so nothing here imports it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Packages of `lightning`, and what they are called elsewhere.
_OTHER_NAMES = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}


def in_all_roots(kind: Any) -> tuple[Any, ...]:
    """A class or function of ``lightning``, and the same one of ``pytorch_lightning`` where that has been imported."""
    for name, other in _OTHER_NAMES.items():
        if kind.__module__.startswith(name):
            module = sys.modules.get(other + kind.__module__.removeprefix(name))
            twin = getattr(module, kind.__name__, None)
            return (kind,) if twin is None else (kind, twin)
    return (kind,)


def of_root(kind: Any, thing: Any) -> Any:
    """The class of ``lightning``, or that of ``pytorch_lightning`` where ``thing`` is an instance of it."""
    return next((found for found in in_all_roots(kind) if isinstance(thing, found)), kind)


def root_name(thing: Any) -> str | None:
    """The package whose Lightning an object, or its class, comes from; None for neither."""
    tops = (base.__module__.split(".")[0] for base in type(thing).__mro__)
    return next((top for top in tops if top in ("lightning", "pytorch_lightning")), None)


def when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Calls ``act`` with a module: now, if it has been imported, else when it is. It is not imported for that."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Waiting(name, act))


class _Waiting(MetaPathFinder):
    """Finds one module as the others would, and acts once it has been executed."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = partial(self._execute, loader)
        return spec

    def _execute(self, loader: Any, module: ModuleType) -> None:
        del loader.exec_module  # that of its class is there again
        loader.exec_module(module)
        self._act(module)
