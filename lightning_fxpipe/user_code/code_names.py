"""Which global variables code names, and whose code is looked at for that."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from types import CodeType, MethodType
from typing import Any

from lightning_fxpipe.user_code.bytecode import codes_in, operations

# No state of user code is in what these make: the machinery of a run, data, and what writes or shows it.
_OTHERS_OWN = frozenset(
    {
        *("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "lightning_fxpipe"),
        *("torch", "torchmetrics"),
        *("numpy", "scipy", "sympy", "triton", "pandas", "polars", "pyarrow", "datasets", "h5py", "zarr", "PIL", "cv2"),
        *("sklearn", "matplotlib", "wandb", "mlflow", "tensorboard", "tokenizers", "tqdm", "rich"),
    }
)
_PYTHONS_OWN = sys.stdlib_module_names - {"__main__"}


def function_of(value: Any) -> Any:
    """The function of a bound, static or class method; anything else as it is: objects of the user's are asked for nothing."""
    return value.__func__ if isinstance(value, (MethodType, staticmethod, classmethod)) else value


@lru_cache(maxsize=1024)
def is_followed(module: str) -> bool:
    """Returns True if objects of a module, by its name, are those of user code or of a library of models."""
    top = module.partition(".")[0]
    return bool(top) and top not in _OTHERS_OWN and top not in _PYTHONS_OWN


@lru_cache(maxsize=1024)
def is_own_code(module: str) -> bool:
    """Returns True if the code of a module is the user's own, and not that of an installed library."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return is_followed(module) and not {"site-packages", "dist-packages"} & {*Path(file).parts}


@lru_cache(maxsize=4096)
def globals_read(code: CodeType) -> frozenset[str]:
    """The names that code, and functions defined in it, take from the globals, or from Python's own names."""
    return _arguments_of(code, "LOAD_GLOBAL", "LOAD_NAME")


@lru_cache(maxsize=4096)
def names_of(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names that code, and functions defined in it, may take from the globals, and those that it assigns there.

    Names of attributes are among the first: they are looked up in modules, and others do no harm.
    """
    named = frozenset(name for inner in codes_in(code) for name in inner.co_names)
    return named, _arguments_of(code, "STORE_GLOBAL", "DELETE_GLOBAL")


def _arguments_of(code: CodeType, *instructions: str) -> frozenset[str]:
    return frozenset(str(each.argument) for inner in codes_in(code) for each in operations(inner) if each.name in instructions)
