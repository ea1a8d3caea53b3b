"""Tensors of a class of their own (labels, images, boxes, with what these know): the model receives plain ones in their place.

In a step and in hooks they are what the loader has made. A stage computes with plain tensors, as do most models; one whose code
names the class, or what tensors have from it, would do something else than on one device, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        names = _own_names(tensor)
        for kind in dict.fromkeys(type(module) for module in root.modules()):
            functions = [kind.forward] if kind is type(root) else _functions(kind)
            for code in (code for function in functions if (code := code_of(function)) is not None):
                found = sorted(names & {name for each in codes_in(code) for name in (*each.co_names, *_texts(each))})
                if found:
                    line = attribute_line(code, found[0], "LOAD_ATTR") or code.co_firstlineno
                    raise _named(type(tensor), found[0], f"{kind.__name__}, {code.co_filename}:{line}")


def _texts(code: CodeType) -> Iterator[str]:
    """Yields constants that may be names, as for ``hasattr``."""
    return (constant for constant in code.co_consts if isinstance(constant, str))


def _functions(kind: type) -> list[Any]:
    return [function for base in kind.__mro__ if is_followed(base.__module__) for function in functions_of(base)]


def _own_names(tensor: Tensor) -> set[str]:
    """Names that code uses for a tensor of this class only."""
    kinds = [kind for kind in type(tensor).__mro__ if issubclass(kind, Tensor) and kind not in PLAIN_TENSORS]
    names = {name for kind in kinds for name in (kind.__name__, *vars(kind))} | {*vars(tensor)}
    return {name for name in names if not hasattr(Tensor, name)}


def _named(kind: type, name: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"The model uses what its inputs have from the class {kind.__name__}.",
        where=where,
        observed=f"the name {name!r}; stages compute with plain tensors",
        expected=f"a model that computes with torch.Tensor; code of the step may use {kind.__name__}",
        todo=f"Pass the model what it needs of {kind.__name__} as arguments of their own, and make the input plain by "
        ".as_subclass(torch.Tensor), for example in on_before_batch_transfer.",
    )
