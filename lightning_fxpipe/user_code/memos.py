"""Functions with a cache, which user code remembers tensors in.

While a model runs on fakes, such a cache is filled with fakes, which no real run may find there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_fxpipe.user_code.code_contents import CACHED
from lightning_fxpipe.user_code.code_names import function_of, is_followed


@contextmanager
def no_fakes_remembered(root: nn.Module) -> Iterator[None]:
    """After the block, the cached functions in the files and classes of the modules do not know what they were called with."""
    misses = [(function, function.cache_info().misses) for function in _cached_functions(root)]
    try:
        yield
    finally:
        for function, before in misses:
            if function.cache_info().misses != before:
                function.cache_clear()  # it can compute all again


def _cached_functions(root: nn.Module) -> list[Any]:
    classes = {cls for module in root.modules() for cls in type(module).__mro__}
    own = [cls for cls in classes if is_followed(cls.__module__)]
    files = {cls.__module__: sys.modules[cls.__module__] for cls in own if cls.__module__ in sys.modules}
    values = [value for space in (*own, *files.values()) for value in vars(space).values()]
    return [function for function in map(function_of, values) if isinstance(function, CACHED)]
