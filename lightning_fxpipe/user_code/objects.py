"""Objects with tensors inside, such as a key-value cache, on their way through a graph.

Only tensors cross a cut. So a module that takes such an object gets a new one of the same structure, filled with the tensors
that it looks at; what it put into the object is taken out again afterwards.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import SYMBOLIC_TYPES, FakeTensor, outside_fakes
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.pytree.structure import Structure, Template
from lightning_fxpipe.user_code.frames import user_source
from lightning_fxpipe.user_code.kinds import kinds_of
from lightning_fxpipe.user_code.snapshot import MAX_WALKED

# Constants that an fx node can hold as they are.
PLAIN_TYPES = (int, float, bool, str, complex, torch.dtype, torch.device, torch.layout, torch.memory_format, range)

# Classes of tensors that know nothing but their values.
PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)

# Calls that only move a tensor around: what frameworks do with every tensor that they see.
_MOVES = frozenset((Tensor.detach, Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.clone, torch.clone, torch.detach))


def is_value(value: Any) -> bool:
    """Returns True if an argument has nothing in it that a module could change, or fail to look at."""
    return value is None or isinstance(value, (Tensor, *PLAIN_TYPES, *SYMBOLIC_TYPES, torch.Size))


def is_plain(value: Any) -> bool:
    """Returns True if an argument can be part of a graph as it is."""
    if isinstance(value, (tuple, list)):
        return all(map(is_plain, value))
    if type(value) in (dict, OrderedDict):
        return all(map(is_plain, value.values()))
    known = (type(Ellipsis), slice, torch.Generator)
    return is_value(value) or isinstance(value, known) or (isinstance(value, (np.ndarray, np.generic)) and value.shape == ())


class Unsent(Tensor):
    """Placeholder of a tensor that another stage has and that was not sent. Reading it raises an error."""

    stands_for: str

    @classmethod
    def with_name(cls, name: str) -> Unsent:
        """A stand-in; ``name`` says in messages what it stands for."""
        with outside_fakes():
            unsent: Unsent = torch.empty(0, device="meta").as_subclass(cls)
        unsent.stands_for = name
        return unsent

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every use but a move is an error."""
        if func in _MOVES:
            return args[0]
        unsent = next((arg for arg in args if isinstance(arg, cls)), None)
        raise UnsupportedError(
            f"{unsent.stands_for if unsent is not None else 'A tensor'} is used here, but it is on another stage.",
            where=user_source(),
            observed=f"a call of {getattr(func, '__qualname__', func)} that was not made when the model was traced",
            expected="uses as in the traced call",
            todo="Use the tensor in every batch, or store the call's result in a local variable before choosing a part of it.",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Unsent({self.stands_for})"


def refill(structure: Structure, sent: Sequence[int]) -> Callable[..., Any]:
    """A function that makes a new object from the tensors at ``sent`` and the sizes; the others' places get stand-ins."""
    missing = sorted(set(range(structure.num_tensors)) - set(sent))
    stand_ins: dict[int, Unsent] = {}  # they cannot change, so the same do for every call

    def refilled(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Any:
        if not stand_ins:
            stand_ins.update({index: Unsent.with_name("A tensor of an argument") for index in missing})
        values = stand_ins | dict(zip(sent, tensors, strict=True))
        return structure.fill([values[index] for index in range(structure.num_tensors)], sizes)

    refilled.structure = structure  # type: ignore[attr-defined]
    return refilled


def structure_made(node: fx.Node) -> Structure | None:
    """Returns the structure of the containers or objects that a node makes anew; None for a node that makes none."""
    made = getattr(node.target, "structure", None)
    return made if isinstance(made, Structure) else None


def makes_objects(node: fx.Node) -> bool:
    """True if a node makes containers or objects anew, which the calls that get them may change."""
    return structure_made(node) is not None


def tensor_of(index: int, count: int) -> Callable[[Any], Tensor]:
    """A function that takes the tensor at ``index`` of ``count`` out of an object."""

    def tensor_inside(value: Any) -> Tensor:
        tensors = Template.of(value).tensors
        if len(tensors) != count:
            raise UnsupportedError(
                f"A {type(value).__name__} holds a different number of tensors than when the model was traced.",
                observed=f"{len(tensors)} tensors",
                expected=f"{count} tensors",
                todo="Make the object's contents independent of tensor values.",
            )
        return tensors[index]

    return tensor_inside


def same_answer(expected: bool, source: str | None) -> Callable[[Tensor], None]:
    """A function that checks that the model's Python would take the path that was traced."""

    def checked(value: Tensor) -> None:
        if bool(value) != expected:
            raise UnsupportedError(
                "The model would take a different path than when it was traced.",
                where=source,
                observed=f"a condition on tensor values that is {not expected} for this microbatch",
                expected=f"{expected}, as for the first microbatch",
                todo="Move the code with the condition into a separate submodule, which is then not split.",
            )

    return checked


def lasting_objects(root: nn.Module, depth: int = 4) -> dict[int, Any]:
    """By ``id``, the objects that modules hold as attributes: what is put into them is there in the next step."""
    found: dict[int, Any] = {}

    def visit(value: Any, left: int) -> None:
        if id(value) in found or isinstance(value, (Tensor, nn.Module, type)) or not kinds_of(value) or callable(value):
            return
        if isinstance(value, dict):
            inside = list(value.values())
        elif isinstance(value, (list, tuple, set)):
            inside = list(value)
        elif hasattr(value, "__dict__"):
            inside = list(vars(value).values())
        else:
            return
        found[id(value)] = value
        for item in inside if left and len(inside) <= MAX_WALKED else ():
            visit(item, left - 1)

    for module in root.modules():
        for value in vars(module).values():
            visit(value, depth)
    return found


def keep_attributes(copy: Tensor, original: Tensor) -> Tensor:
    """Returns a copy of a tensor with its class and attributes: torch's functions keep neither of every class."""
    if type(original) not in PLAIN_TENSORS:
        copy = copy if type(copy) is type(original) else copy.as_subclass(type(original))
        vars(copy).update(vars(original))
    return copy
