"""Tensors of a class of their own (labels, images, boxes, with what these know): the model receives plain ones in their place.

In a step and in hooks they are what the loader has made. A stage computes with plain tensors, as do most models; one whose code
names the class, or what tensors have from it, would do something else than on one device, and is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from types import CodeType
from typing import Any

from torch import Tensor, nn

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.pytree.containers import leaves_with_path
from lightning_fxpipe.user_code.bytecode import attribute_line, codes_in
from lightning_fxpipe.user_code.code_contents import functions_of
from lightning_fxpipe.user_code.code_names import is_followed
from lightning_fxpipe.user_code.objects import PLAIN_TENSORS
from lightning_fxpipe.user_code.step_code import code_of

_logger = logging.getLogger(__name__)


def check_tensor_classes(root: nn.Module, example: Any) -> None:
    """Refuses a model whose code names what its inputs have from a class of their own.

    Args:
        root: The module.
        example: Inputs of the part that is recorded.

    Raises:
        UnsupportedError: It does.
    """
    tensors = [leaf for _, leaf in leaves_with_path(example) if isinstance(leaf, Tensor) and type(leaf) not in PLAIN_TENSORS]
    for tensor in {type(tensor): tensor for tensor in tensors}.values():
        names, classes = _own_names(tensor), {kind.__name__ for kind in _own_classes(tensor)}
        named = [
            (kind, name, code) for kind in _kinds(root) for code in _codes(_functions(kind)) for name in _names(code, names)
        ]
        named += [(type(root), name, code) for code in _codes([type(root).forward]) for name in _names(code, names)]
        if _is_of_results(tensor):  # of which the rest of the step receives plain ones, too
            codes = _codes(_functions(type(root)))
            named += [(type(root), name, code) for code in codes for name in _names(code, classes)]
        for kind, name, code in named:
            line = attribute_line(code, name, "LOAD_ATTR") or code.co_firstlineno
            raise _named(type(tensor), name, f"{kind.__name__}, {code.co_filename}:{line}")


def _kinds(root: nn.Module) -> list[type[nn.Module]]:
    return [kind for kind in dict.fromkeys(type(module) for module in root.modules()) if kind is not type(root)]


def _functions(kind: type) -> list[Any]:
    return [function for base in kind.__mro__ if is_followed(base.__module__) for function in functions_of(base)]


def _codes(functions: Iterable[Any]) -> Iterator[CodeType]:
    return (code for function in functions if (code := code_of(function)) is not None)


def _names(code: CodeType, names: Collection[str]) -> list[str]:
    """Returns which of some names code has, also as constants, as for ``hasattr``."""
    found = {name for each in codes_in(code) for name in (*each.co_names, *each.co_consts) if isinstance(name, str)}
    return sorted(found.intersection(names))


def _own_classes(tensor: Tensor) -> list[type]:
    return [kind for kind in type(tensor).__mro__ if issubclass(kind, Tensor) and kind not in PLAIN_TENSORS]


def _own_names(tensor: Tensor) -> set[str]:
    """Names that code uses for a tensor of this class only."""
    names = {name for kind in _own_classes(tensor) for name in (kind.__name__, *vars(kind))} | {*vars(tensor)}
    return {name for name in names if not hasattr(Tensor, name)}


def _is_of_results(tensor: Tensor) -> bool:
    """True if what torch computes from the tensor is of its class."""
    try:
        return isinstance(tensor.detach() * 1, type(tensor))
    except Exception:
        _logger.debug("%s does not compute", type(tensor).__name__, exc_info=True)
        return False


def _named(kind: type, name: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"Code in the model uses members of its inputs' tensor class {kind.__name__}.",
        where=where,
        observed=f"the name {name!r}; stages compute with plain tensors",
        expected=f"a model that computes with torch.Tensor; the step may use attributes of {kind.__name__} in its batch",
        todo=f"Pass the values that the model needs from {kind.__name__} as separate arguments, and convert the input with "
        ".as_subclass(torch.Tensor), for example in on_before_batch_transfer.",
    )
