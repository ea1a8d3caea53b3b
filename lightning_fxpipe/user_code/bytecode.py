"""The one reader of Python's bytecode, whose instructions change from version to version."""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What an instruction does, in words that hold for all versions of Python.

    Attributes:
        name: Name of the instruction in Python 3.11; ``LOAD_FAST`` for each read of a local variable, ``LOAD_ATTR`` for methods
            as well.
        argument: The variable, attribute or constant that it is about.
        offset: Place in the code, comparable with ``tb_lasti``.
    """

    name: str
    argument: Any
    offset: int


def operations(code: CodeType) -> Iterator[Operation]:
    """What a function's code does, in order. Python 3.11-3.13.

    Python 3.13 has instructions for two local variables (``LOAD_FAST_LOAD_FAST``, ``STORE_FAST_LOAD_FAST``), which are two
    operations here; later ones also read a variable in other ways (``LOAD_FAST_BORROW``).
    """
    for instruction in dis.get_instructions(code):
        names, arguments = [instruction.opname], [instruction.argval]
        if "_FAST" in instruction.opname and isinstance(instruction.argval, tuple):
            names, arguments = re.split("_(?=LOAD_|STORE_)", instruction.opname), list(instruction.argval)
        for name, argument in zip(names, arguments, strict=True):
            yield Operation(name=_plain(name), argument=argument, offset=instruction.offset)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def loaded_variables(code: CodeType) -> frozenset[str]:
    """The local variables that a function reads."""
    return frozenset(operation.argument for operation in operations(code) if operation.name == "LOAD_FAST")


def attribute_line(code: CodeType, name: str, operation: str) -> int | None:
    """Returns the first line in which code sets (``STORE_ATTR``) or reads (``LOAD_ATTR``) an attribute of such a name."""
    for inner in codes_in(code):
        for instruction in dis.get_instructions(inner):
            if _plain(instruction.opname) == operation and instruction.argval == name and instruction.positions is not None:
                return instruction.positions.lineno
    return None


def _plain(name: str) -> str:
    if name.startswith("LOAD_FAST") and name != "LOAD_FAST_AND_CLEAR":  # that one makes room for a comprehension's variable
        return "LOAD_FAST"
    return "LOAD_ATTR" if name == "LOAD_METHOD" else name
