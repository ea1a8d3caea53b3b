"""The modules of these tests, written for ``lightning``, once more for ``pytorch_lightning``.

``other_root.tests.ranks.test_callbacks`` is ``tests.ranks.test_callbacks`` with imports from the other package,
and whatever it imports of the tests likewise. Lightning's own second package is made in the same way.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

PREFIX = "other_root"
_REPLACED = (
    (r"^import lightning as L$", "import pytorch_lightning as L"),
    (r"\blightning\.pytorch\b", "pytorch_lightning"),
    (r"\blightning\.fabric\b", "lightning_fabric"),
    (r"\bL\.pytorch\.", "L."),
    (r"^from tests\.", f"from {PREFIX}.tests."),
    (r"^(from lightning_fxpipe import .*\bFxPipeStrategy\b.*)$", r"\1; from lightning_fxpipe.pl import FxPipeStrategy"),
)


class _Loader(SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        text = bytes(data).decode()
        for pattern, replacement in _REPLACED:
            text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
        return super().source_to_code(text.encode(), path, _optimize=_optimize)

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)  # not from the cache of the original


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.split(".")[0] != PREFIX:
            return None
        place = Path(__file__).parents[1].joinpath(*fullname.split(".")[1:])
        if place.is_dir():
            return ModuleSpec(fullname, None, is_package=True)
        file = place.with_suffix(".py")
        return spec_from_file_location(fullname, file, loader=_Loader(fullname, str(file)))


def in_other_root(module: str) -> Any:
    """A module of the tests, for ``pytorch_lightning``."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    return importlib.import_module(f"{PREFIX}.{module}")
