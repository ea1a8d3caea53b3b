"""The one reader of Python's bytecode, whose instructions change from version to version."""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from types import CodeType
from typing import Any

_STORES = frozenset({"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"})
_LOADS = frozenset({"LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"})
_SETTERS = frozenset({"setattr", "delattr", "__setattr__", "__delattr__", "__dict__", "vars"})
_CHANGING_METHODS = frozenset(
    {
        *("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "add", "discard", "update", "setdefault"),
        *("popitem", "appendleft", "extendleft", "popleft", "rotate", "subtract", "fill", "put", "copyto", "__setitem__"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An instruction, in terms that hold for all versions of Python.

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
    """Yields the operations of a function's code, in order. Python 3.11-3.13.

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


def assigned_names(code: CodeType) -> frozenset[str]:
    """Returns names of attributes and variables that are not local, which code and functions defined in it may assign."""
    names = set[str]()
    for inner in codes_in(code):
        stores = (each for each in operations(inner) if each.name in _STORES)
        names |= {str(each.argument) for each in stores}
        if _SETTERS & {*inner.co_names}:
            names |= {constant for constant in inner.co_consts if isinstance(constant, str) and constant.isidentifier()}
    return frozenset(names)


def names_used(code: CodeType) -> frozenset[str]:
    """Returns names of attributes and variables, and texts, in code and functions defined in it."""
    texts = (constant for inner in codes_in(code) for constant in inner.co_consts if isinstance(constant, str))
    return frozenset(name for inner in codes_in(code) for name in (*inner.co_names, *inner.co_freevars)).union(texts)


def names_read(code: CodeType) -> frozenset[str]:
    """Returns names as :func:`names_used`, but for those that code only assigns, or of which it only calls ``clear``.

    Those in functions defined in it are not among them.
    """
    names = {constant for constant in code.co_consts if isinstance(constant, str)}
    done = [*operations(code)]
    for operation, following in zip_longest(done, done[1:]):
        is_cleared = following is not None and (following.name, following.argument) == ("LOAD_ATTR", "clear")
        if operation.name in _LOADS and not is_cleared:
            names.add(str(operation.argument))
    return frozenset(names)


def changes_containers(code: CodeType) -> bool:
    """True if code, or a function defined in it, may change what is in a list, a dict or the like."""
    for inner in codes_in(code):
        if _CHANGING_METHODS & {*inner.co_names}:
            return True
        instructions = [*dis.get_instructions(inner)]
        if any(each.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") for each in instructions):
            return True
        if any(each.opname == "BINARY_OP" and each.argrepr.endswith("=") for each in instructions):  # `x |= {1}`
            return True
    return False


def attribute_line(code: CodeType, name: str, operation: str) -> int | None:
    """Returns the first line in which code sets (``STORE_ATTR``) or reads (``LOAD_ATTR``) an attribute of such a name."""
    for inner in codes_in(code):
        for instruction in dis.get_instructions(inner):
            if _plain(instruction.opname) == operation and instruction.argval == name and instruction.positions is not None:
                return instruction.positions.lineno
    return None


def first_line_with(code: CodeType, argument: str) -> int | None:
    """Returns the first line whose instructions are about a variable, an attribute or a text."""
    for inner in codes_in(code):
        for instruction in dis.get_instructions(inner):
            if instruction.argval == argument and instruction.positions is not None:
                return instruction.positions.lineno
    return None


def _plain(name: str) -> str:
    if name.startswith("LOAD_FAST") and name != "LOAD_FAST_AND_CLEAR":  # that one makes room for a comprehension's variable
        return "LOAD_FAST"
    return "LOAD_ATTR" if name == "LOAD_METHOD" else name
