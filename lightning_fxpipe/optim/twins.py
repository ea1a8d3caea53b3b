"""A copy of an optimizer over other parameters: it has the options, counters and states, and shares nothing that it changes.

Whatever an optimizer refers to is followed: attributes, containers, objects, the variables of functions, optimizers inside it.
What cannot stand for something else is refused: other parameters, modules, and tensors that are one for each parameter, such as
the copies of weights that Lookahead keeps in a list. They would go with the wrong parameters in a stage.
"""

from __future__ import annotations

import copy
import enum
import functools
import logging
import math
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fxpipe._compat.torch import tree_map

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, type, range, slice, enum.Enum, logging.Logger, types.ModuleType),
    *(types.BuiltinFunctionType, torch.dtype, torch.device, torch.Size),
)
_MAX_ELEMENTS = 1024  # of a table


class CannotTryError(Exception):
    """The optimizer does not run on other parameters than its own."""


def twin_of(optimizer: Optimizer, stand_ins: Mapping[int, nn.Parameter]) -> Optimizer:
    """A copy that holds other parameters, and calls no hooks.

    Args:
        optimizer: The optimizer, which stays as it is.
        stand_ins: What stands for each of its parameters, by the parameter's identity; the copy lacks those that have none.

    Raises:
        CannotTryError: It holds something that nothing can stand for.
    """
    twin: Optimizer = _Copier(optimizer, stand_ins).copy_of(optimizer, type(optimizer).__name__)
    return twin


class _Copier:
    def __init__(self, optimizer: Optimizer, stand_ins: Mapping[int, nn.Parameter]) -> None:
        self._made: dict[int, Any] = dict(stand_ins)
        self._stand_ins = stand_ins
        groups = [group["params"] for group in optimizer.param_groups]
        self._shapes = [[parameter.shape for parameter in group] for group in (*groups, sum(groups, []))]
        self._known = {id(parameter) for group in groups for parameter in group}
        self._kinds: dict[str, str] = {}

    def copy_of(self, value: Any, path: str) -> Any:
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, int) and value in self._stand_ins:
            return id(self._stand_ins[value])  # a key that stands for a parameter
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, Tensor):
            made: Any = self._tensor(value, path)
        elif isinstance(value, nn.Module):
            raise CannotTryError(f"{path} is a module")
        elif isinstance(value, Optimizer):
            return self._optimizer(value, path)
        elif isinstance(value, (list, dict, set, deque)):
            return self._container(value, path)
        elif isinstance(value, tuple):
            self._check_not_one_each(value, path)
            entries = [self.copy_of(entry, f"{path}[{index}]") for index, entry in enumerate(value)]
            made = type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
        elif isinstance(value, frozenset):
            made = frozenset(self.copy_of(entry, path) for entry in value)
        elif isinstance(value, types.FunctionType):
            made = self._function(value, path)
        elif isinstance(value, types.MethodType):
            made = types.MethodType(self.copy_of(value.__func__, path), self.copy_of(value.__self__, path))
        elif isinstance(value, functools.partial):
            arguments = self.copy_of(value.args, f"{path}.args"), self.copy_of(value.keywords, f"{path}.keywords")
            made = functools.partial(self.copy_of(value.func, path), *arguments[0], **arguments[1])
        elif isinstance(value, weakref.ref):
            referent = value()
            made = value if referent is None else weakref.ref(self.copy_of(referent, path))
        elif isinstance(value, torch.Generator):
            made = torch.Generator(value.device)
            made.set_state(value.get_state())
        else:
            return self._object(value, path)
        self._made[id(value)] = made
        return made

    # ------------------------------------------------------------------ tensors

    def _tensor(self, value: Tensor, path: str) -> Tensor:
        if isinstance(value, nn.Parameter) and id(value) not in self._known:
            raise CannotTryError(f"{path} is a parameter that is not in its groups")
        if id(value) in self._known:
            return nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=value.requires_grad)  # the copy lacks it
        total = {sum(math.prod(shape) for shape in shapes) for shapes in self._shapes}
        if value.numel() > 1 and (
            value.is_meta or value.numel() > _MAX_ELEMENTS or (value.dim() == 1 and value.numel() in total)
        ):
            raise CannotTryError(f"{path} is a tensor of shape {tuple(value.shape)}")
        return value.detach().clone()

    def _check_not_one_each(self, value: Any, path: str) -> None:
        """Refuses copies of the parameters, and whatever else has the shape of each."""
        entries = list(value.values() if isinstance(value, dict) else value)
        tensors = [
            entry for entry in entries if isinstance(entry, Tensor) and id(entry) not in self._known and entry.numel() > 1
        ]
        if not tensors:
            return
        shapes = [tensor.shape for tensor in tensors]
        is_ordered = not isinstance(value, dict) or not all(isinstance(key, str) for key in value)
        every = {shape for of_group in self._shapes for shape in of_group}
        if shapes in self._shapes or (is_ordered and len(shapes) > 1 and every.issuperset(shapes)):
            raise CannotTryError(f"{path} holds {len(tensors)} tensors with the parameters' shapes")

    # ------------------------------------------------------------------ what holds others

    def _container(self, value: Any, path: str) -> Any:
        self._check_not_one_each(value, path)
        made = copy.copy(value)
        made.clear()
        self._made[id(value)] = made
        if isinstance(value, defaultdict):
            made.default_factory = self.copy_of(value.default_factory, path)
        if isinstance(value, dict):
            for key, entry in list(value.items()):
                made[self.copy_of(key, path)] = self.copy_of(entry, f"{path}[{key!r}]" if isinstance(key, str) else path)
            return made
        for index, entry in enumerate(value):
            (made.add if isinstance(value, set) else made.append)(self.copy_of(entry, f"{path}[{index}]"))
        return made

    def _function(self, value: types.FunctionType, path: str) -> Any:
        cells = []
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                cells.append(types.CellType(self.copy_of(cell.cell_contents, f"{path}, {name}")))
            except ValueError:  # it has no value yet
                cells.append(types.CellType())
        made = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, self.copy_of(value.__defaults__, path), tuple(cells)
        )
        made.__kwdefaults__ = self.copy_of(value.__kwdefaults__, path)
        return made

    def _object(self, value: Any, path: str) -> Any:
        if not hasattr(value, "__dict__"):
            return value
        try:
            made = object.__new__(type(value))
        except TypeError:  # it is not made of Python alone
            return value
        self._made[id(value)] = made
        for name, entry in list(vars(value).items()):
            object.__setattr__(made, name, self.copy_of(entry, f"{path}.{name}"))
        return made

    # ------------------------------------------------------------------ optimizers

    def _optimizer(self, value: Optimizer, path: str) -> Optimizer:
        made: Optimizer = type(value).__new__(type(value))
        self._made[id(value)] = made
        for name, entry in list(vars(value).items()):
            if name == "param_groups":
                groups = [self._group(group, f"{path}.{name}[{index}]") for index, group in enumerate(entry)]
                made.param_groups = self._made.setdefault(id(entry), groups)
            elif name == "state":
                made.state = self._made[id(entry)] if id(entry) in self._made else self._state(entry, f"{path}.state")
            elif name.startswith("_optimizer_") and name.endswith("hooks"):
                setattr(made, name, OrderedDict())
            elif name == "step":
                if (own := own_step(value)) is not None:
                    made.step = self.copy_of(own, f"{path}.step")  # type: ignore[method-assign]
            else:
                setattr(made, name, self.copy_of(entry, f"{path}.{name}"))
        return made

    def _group(self, group: dict[str, Any], path: str) -> dict[str, Any]:
        if id(group) in self._made:
            return self._made[id(group)]  # type: ignore[no-any-return]
        made: dict[str, Any] = {}
        self._made[id(group)] = made
        places = [place for place, parameter in enumerate(group["params"]) if id(parameter) in self._stand_ins]
        for key, value in group.items():
            if key in ("params", "param_names") and len(value) == len(group["params"]):
                made[key] = [self.copy_of(value[place], path) for place in places]
            else:
                made[key] = self.copy_of(value, f"{path}[{key!r}]")
        if "lr" in made and not made["lr"]:  # a warmup begins
            made["lr"] = made.get("initial_lr") or 1e-2
        return made

    def _state(self, state: Any, path: str) -> Any:
        made: Any = defaultdict(dict)
        self._made[id(state)] = made
        for key, value in sorted(state.items(), key=lambda item: isinstance(item[0], Tensor) and item[0].is_meta):
            if not isinstance(key, Tensor):
                made[self.copy_of(key, path)] = self.copy_of(value, path)
            elif id(key) in self._stand_ins:
                stand_in = self._stand_ins[id(key)]
                made[stand_in] = (
                    {name: self._of_parameter(entry, key, stand_in, f"{path}[{name!r}]") for name, entry in value.items()}
                    if isinstance(value, dict)
                    else self._of_parameter(value, key, stand_in, path)
                )
        return made

    def _of_parameter(self, value: Any, parameter: Tensor, stand_in: nn.Parameter, path: str) -> Any:
        """A parameter's state: what has its shape gets that of the other, and is as it is here, a copy or a constant."""

        def like(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.shape != parameter.shape:
                return self.copy_of(leaf, path)
            if not leaf.is_meta and not parameter.is_meta:
                self._kinds[path] = _kind_of(leaf, parameter)
            kind = self._kinds.get(path, "0.0")
            dtype = stand_in.dtype if leaf.is_floating_point() else leaf.dtype
            if kind == "copy":
                return stand_in.detach().clone().to(dtype)
            if kind == "other":
                return torch.rand_like(stand_in, dtype=torch.float64).to(dtype).detach()
            return torch.full_like(stand_in, float(kind), dtype=dtype).detach()

        return tree_map(like, value)


def _kind_of(value: Tensor, parameter: Tensor) -> str:
    if value.numel() == 0:
        return "0.0"
    if torch.equal(value.to(parameter.dtype), parameter.detach()):
        return "copy"
    first = value.reshape(-1)[0]
    return str(float(first)) if bool((value == first).all()) and not value.is_complex() else "other"


def own_step(optimizer: Optimizer) -> Any:
    """Returns the step set on this very optimizer; None if it is that of its class.

    Learning rate schedulers put their own around a step, to see whether it is called.
    """
    step: Any = vars(optimizer).get("step")
    while hasattr(step, "_wrapped_by_lr_sched"):
        step = types.MethodType(step.__wrapped__, optimizer)
    return None if getattr(step, "__func__", step) is type(optimizer).step else step
