"""How messages speak of what a user has never seen: nodes of a graph, symbols of sizes, errors of tensors without data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from lightning_fxpipe.user_code.frames import first_line

# What torch raises where code asks for the values of a tensor that has none; by name, as some have no public one.
_ASKS_FOR_VALUES = ("GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException")
_SYMBOL = re.compile(r"(?<![A-Za-z0-9_])[suz]\d+(?![0-9])")
_LENGTH = 60


def error_words(error: BaseException) -> str:
    """An error as the reason why something cannot be done."""
    if type(error).__name__ in _ASKS_FOR_VALUES:
        return "it reads the values of a tensor or a size that depends on them"
    return f"{type(error).__name__}: {first_line(error)}"


def without_symbols(text: str, sizes: Mapping[Any, int]) -> str:
    """A text with the sizes of the example in place of the symbols that stand for them."""
    known = {str(symbol): str(size) for symbol, size in sizes.items()}
    return _SYMBOL.sub(lambda found: known.get(found[0], "?"), text)


def node_words(node: fx.Node) -> str:
    """A node as the call that it was recorded from."""
    if node.op == "placeholder":
        return "an input of the pipelined call"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", type(node.target).__name__)
    kind = "" if node.op in ("call_module", "get_attr") else "the result of "
    source = node.meta.get("source")
    return f"{kind}{name} ({source})" if source else f"{kind}{name}"


def argument_words(argument: Any) -> str:
    """An argument of a call, short."""
    if isinstance(argument, Tensor):
        return "a tensor"
    text = repr(argument)
    return text if len(text) <= _LENGTH and "\n" not in text else f"a {type(argument).__name__}"
