"""Other stages' values and gradients, which hooks of user code see as on one device.

Code outside the steps reads the whole model: a total gradient norm, clipping by hand, a histogram of weights, an average of
weights. This rank holds one stage; of the others it has placeholders. The first use of any stage's tensor brings copies of all
stages' here, until the hook is over. Every rank sees the same, so what the code does with them is what it does on one device,
and where it changes them the rank that holds them makes the same change to the real ones.

A rank's own tensors count as well: the copies are then made before any rank has changed what it holds. If they were made at
the first use of a placeholder, a rank whose own tensors come first in a loop would already have changed these.

A rank cannot know what the others' hooks read, and code may be for one rank only (``rank_zero_only``). So each read is a vote,
and a hook ends with votes until no rank needs anything: ranks that need nothing take part, too, and no rank waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe._compat.torch import tree_map
from lightning_fxpipe.distributed.agreement import fingerprint
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.distributed.values import broadcast_tensor, broadcast_value
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.hooks.rank_zero_changes import followed
from lightning_fxpipe.planner.cost import canonical_fqns
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.stages.holders import first_held
from lightning_fxpipe.user_code.exchange import named_tensors
from lightning_fxpipe.user_code.frames import user_source
from lightning_fxpipe.user_code.members import Members

# torch's stubs give the types of the values, not of the properties.
_PROPERTIES: dict[str, Any] = {name: value for name in dir(Tensor) if hasattr(value := getattr(Tensor, name, None), "__set__")}
# What a placeholder answers itself: it has the shape and dtype of what it stands for.
_DESCRIBING_METHODS = (
    *("size", "dim", "numel", "nelement", "stride", "element_size", "storage_offset", "is_contiguous", "ndimension"),
    *("is_floating_point", "is_complex", "is_signed", "requires_grad_", "register_hook", "__len__", "__hash__", "type"),
    *("register_post_accumulate_grad_hook", "retain_grad", "get_device", "is_inference"),
)
_DESCRIBING_PROPERTIES = (
    *("shape", "dtype", "requires_grad", "is_leaf", "ndim", "layout", "is_meta", "itemsize", "nbytes", "grad_fn", "is_cuda"),
    *("is_cpu", "is_sparse", "is_quantized", "is_nested", "output_nr", "retains_grad", "is_mps", "is_xpu"),
)
_DESCRIBING = frozenset(
    [getattr(Tensor, name) for name in _DESCRIBING_METHODS if hasattr(Tensor, name)]
    + [_PROPERTIES[name].__get__ for name in _DESCRIBING_PROPERTIES if name in _PROPERTIES]
    + [_PROPERTIES["requires_grad"].__set__, torch.numel, torch.is_floating_point, torch.is_complex]
)
_FREEZING = (_PROPERTIES["requires_grad"].__set__, Tensor.requires_grad_)
_GET_GRAD, _SET_GRAD = _PROPERTIES["grad"].__get__, _PROPERTIES["grad"].__set__
_OF_GRADIENTS = (_GET_GRAD, _SET_GRAD)
_GET_DEVICE = _PROPERTIES["device"].__get__

# Functions that read a module's tensors past torch's functions, where no mode can answer.
TRACERS = (
    (torch.jit, "trace"),
    (torch.jit, "trace_module"),
    (torch.jit, "script"),
    (torch.export, "export"),
    (torch.onnx, "export"),
)

_VALUE, _GRADIENT, _FLAG = "value of", "gradient of", "requires_grad of"  # names of entries
_ABSENT, _STRIDED, _SPARSE = range(3)  # layouts of gradients, in messages


@dataclass(frozen=True, kw_only=True)
class Held:
    """Tensors of one rank, by identity.

    Attributes:
        missed: Those that other ranks have placeholders for.
        common: Those that every rank has.
    """

    missed: Mapping[int, Tensor] = field(default_factory=dict)
    common: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Used:
    """Functions to call before user code uses what a model has.

    Attributes:
        values: At a value that some rank lacks; returns those of placeholders.
        gradients: At a gradient that some rank lacks; returns those of placeholders.
        common: At a tensor that every rank has, and at a change of ``requires_grad``.
    """

    values: Callable[[], Mapping[int, Tensor]]
    gradients: Callable[[], dict[int, Tensor | None]]
    common: Callable[[], None]


class WholeModel:
    """Brings what other stages hold to every rank. All methods but the constructor are called by every rank.

    Args:
        module: The module, with placeholders.
        plan: Which stage holds what.
        topology: This rank's place.
        dropped: Placeholders of parameters that were dropped, by the parameter's identity: user code may still have these.

    Attributes:
        fingerprints: Those of this rank's tensors when copies of them were last made, by name.
    """

    def __init__(
        self, module: nn.Module, plan: PartitionPlan, topology: Topology, dropped: Mapping[int, Tensor] | None = None
    ) -> None:
        self._module = module
        self._plan = plan
        self._topology = topology
        found = [(owner, name, tensor) for owner, name, _, tensor in named_tensors(module) if tensor.is_meta]
        self._first = found[0] if found else None
        self._in_state: list[Tensor] = []
        self._own_in_state: dict[int, Tensor] = {}
        self._members = Members(module)
        self._listed: object = None  # the members that `_held` is of
        self._held = Held()
        self.fingerprints: dict[Hashable, str] = {}
        # Kept alive, so that no other tensor gets the identity of one.
        self._placeholders = {id(tensor): tensor for *_, tensor in found}
        self._placeholders |= dropped or {}

    def placeholders(self) -> Mapping[int, Tensor]:
        """This rank's placeholders, by their identity and that of what they stand for; none once the module is whole."""
        return {} if self._first is None or self._is_whole else self._placeholders

    def show_state(self, state: Mapping[str, Any]) -> None:
        """Has hooks see what a ``state_dict()`` of the module lacks, until the next one: its tensors are other objects."""
        for entry in self._in_state:
            self._placeholders.pop(id(entry), None)
        found = [(state[fqn], tensor) for *_, fqn, tensor in named_tensors(self._module) if isinstance(state.get(fqn), Tensor)]
        self._in_state = [entry for entry, tensor in found if tensor.is_meta]  # kept alive as the placeholders are
        self._placeholders.update((id(entry), tensor) for entry, tensor in found if tensor.is_meta)
        self._own_in_state = {id(entry): entry for entry, tensor in found if not tensor.is_meta}
        self._listed = None

    def held(self) -> Held:
        """This rank's tensors; none once the module is whole."""
        if self._is_whole:
            return Held()
        members = self._members.renewed()
        if self._listed is not members.parameters:
            self._listed, names = members.parameters, canonical_fqns(self._module)
            mine = [(names[fqn], t) for fqn, t in (*members.parameters.items(), *members.buffers.items()) if not t.is_meta]
            missed = {id(tensor): tensor for fqn, tensor in mine if self._is_missed(fqn)}
            common = {id(tensor): tensor for fqn, tensor in mine if not self._is_missed(fqn)}
            self._held = Held(missed=missed | self._own_in_state, common=common)
        return self._held

    @property
    def _is_whole(self) -> bool:
        if self._first is None:
            return False
        owner, name, tensor = self._first
        return getattr(owner, name, None) is not tensor

    def _is_missed(self, fqn: str) -> bool:
        """True if a stage holds the tensor, and some rank does not."""
        stages = self._plan.stages_of(fqn)
        return bool(stages) and len(self._topology.ranks_of(stages)) < self._topology.num_ranks

    def values(self) -> dict[int, Tensor]:
        """The values of this rank's placeholders, by the placeholder's identity."""
        found = {}
        for owner, named in self._by_owner():
            tensors, mine = [*named.values()], dist.get_rank() == owner
            self._note(named if mine else {}, _VALUE)
            sent = self._broadcast(owner, [t.detach() if mine else _like(t, self._topology.device) for t in tensors])
            for tensor, value in zip(tensors, sent, strict=True):
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                found[id(tensor)] = value
        return {key: value for key, value in found.items() if key in self._placeholders}

    def gradients(self) -> dict[int, Tensor | None]:
        """The gradients of this rank's placeholders, by the placeholder's identity."""
        found: dict[int, Tensor | None] = {}
        for owner, named in self._by_owner():
            parameters = [tensor for tensor in named.values() if isinstance(tensor, nn.Parameter)]
            mine = dist.get_rank() == owner
            self._note({fqn: t.grad for fqn, t in named.items() if mine and isinstance(t, nn.Parameter)}, _GRADIENT)
            own = [parameter.grad if mine else None for parameter in parameters]
            layouts = torch.tensor([_layout(gradient) for gradient in own])
            dist.broadcast(layouts, src=owner, group=self._topology.control_group)
            found |= dict.fromkeys(map(id, parameters))
            forms = list(zip(parameters, own, layouts.tolist(), strict=True))
            strided, sparse = ([(p, g) for p, g, layout in forms if layout == wanted] for wanted in (_STRIDED, _SPARSE))
            sent = self._broadcast(owner, [_like(p, self._topology.device) if g is None else g for p, g in strided])
            if sparse:
                values = broadcast_value([gradient for _, gradient in sparse], owner, self._topology.control_group)
                sent += [value.to(self._topology.device) for value in values]
            found |= {id(p): value for (p, _), value in zip((*strided, *sparse), sent, strict=True)}
        return {key: value for key, value in found.items() if key in self._placeholders}

    def gradients_in(self, seen: dict[int, Tensor | None]) -> dict[int, Tensor | None]:
        """Returns the gradients as :meth:`gradients`, copied into the tensors that it returned before. Called by every rank."""
        for key, gradient in (now := self.gradients()).items():
            earlier = seen.get(key)
            if gradient is None or earlier is None or _layout(gradient) != _layout(earlier) or _layout(gradient) != _STRIDED:
                continue
            with torch.no_grad():
                earlier.copy_(gradient)
            now[key] = earlier
        return now

    def _note(self, tensors: Mapping[str, Tensor | None], kind: str) -> None:
        self.fingerprints.update(((kind, fqn), fingerprint(tensor)) for fqn, tensor in tensors.items())

    def entries(
        self, values: Mapping[int, Tensor] | None, gradients: Mapping[int, Tensor | None] | None, *, common: bool
    ) -> dict[Hashable, Any]:
        """Tensors and flags by name: on rank 0 of all that ranks have copies of, else of what is here.

        Args:
            values: Copies of values, if they have been brought; ``gradients`` likewise.
            gradients: Copies of gradients.
            common: True adds what every rank has.
        """
        names, found = canonical_fqns(self._module), dict[Hashable, Any]()
        for *_, name, tensor in named_tensors(self._module):
            fqn, is_missed, is_parameter = names[name], self._is_missed(names[name]), isinstance(tensor, nn.Parameter)
            if common and is_parameter:
                found[_FLAG, fqn] = tensor.requires_grad
            if values is not None if is_missed else common:
                copies = {id(tensor): tensor} if not tensor.is_meta else (values or {})
                if id(tensor) in copies:
                    found[_VALUE, fqn] = copies[id(tensor)].detach()
            if is_parameter and (gradients is not None if is_missed else common):
                own = {id(tensor): tensor.grad} if not tensor.is_meta else (gradients or {})
                if id(tensor) in own:
                    found[_GRADIENT, fqn] = own[id(tensor)]
        return found

    def follow_changes(self, changes: Mapping[Any, Any]) -> None:
        """Takes over changed entries."""
        tensors = {fqn: tensor for *_, fqn, tensor in named_tensors(self._module)}
        for (kind, fqn), value in changes.items():
            tensor = tensors[fqn]
            if kind == _FLAG:
                tensor.requires_grad_(value)
            elif kind == _GRADIENT:
                tensor.grad = followed(tensor.grad, value, tensor.device)
            else:
                tensor.data = followed(tensor.detach(), value, tensor.device)

    def _by_owner(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Each rank that has something which another has not, and that in the same order everywhere."""
        topology = self._topology
        for stage, tensors in first_held(self._module, self._plan).items():
            wanted = {fqn: tensor for fqn, tensor in tensors.items() if self._is_missed(fqn)}
            if wanted:
                yield topology.rank_of(stage), wanted

    def _broadcast(self, owner: int, tensors: list[Tensor]) -> list[Tensor]:
        """The owner's tensors on every rank: one message for each dtype."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        received = list(tensors)
        for indices in by_dtype.values():
            flat = torch.cat([tensors[index].reshape(-1) for index in indices])
            broadcast_tensor(flat, owner, self._topology.group)
            parts = torch.split(flat, [tensors[index].numel() for index in indices])
            for index, part in zip(indices, parts, strict=True):
                # A copy: each tensor may be changed in place, and has memory of its own on one device.
                received[index] = part.clone().view(tensors[index].shape)
        return received


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _layout(gradient: Tensor | None) -> int:
    if gradient is None:
        return _ABSENT
    return _STRIDED if gradient.layout is torch.strided else _SPARSE


class WholeView(TorchFunctionMode):
    """While it is active, torch calls on placeholders get what these stand for.

    Args:
        placeholders: The placeholders, by their identity and by that of what they stand for.
        held: Returns this rank's tensors.
        used: Called at each use of these or of placeholders.
        device: What a placeholder answers when asked for its device.
    """

    def __init__(
        self,
        placeholders: Mapping[int, Tensor],
        held: Callable[[], Held],
        used: Used,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._placeholders = placeholders
        self._held = held
        self._used = used
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FREEZING and id(args[0]) in self._placeholders:
            func(self._placeholders[id(args[0])], *args[1:], **kwargs)  # of a parameter that was dropped, too
        if func in _FREEZING:
            self._used.common()
        if func in _DESCRIBING:
            return func(*args, **kwargs)
        if not self._has_any(self._placeholders, args, kwargs):
            if func != _GET_DEVICE:
                self._note_use(func, args, kwargs)
            return func(*args, **kwargs)
        if func == _GET_GRAD:
            return self._used.gradients().get(id(self._placeholders[id(args[0])]))
        if func == _SET_GRAD:
            self._used.gradients()[id(self._placeholders[id(args[0])])] = args[1]
            return None
        if func == _GET_DEVICE:
            return self._device
        if torch.jit.is_tracing() or torch.compiler.is_compiling():  # type: ignore[attr-defined,no-untyped-call]
            raise _in_trace()
        stood_for: dict[int, Tensor] = {}
        result = func(*self._replace(args, stood_for), **self._replace(kwargs, stood_for))
        # What changes a tensor in place returns that very tensor: `module.weight /= 2` puts it back into the module.
        return stood_for.get(id(result), result)

    def _note_use(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        held = self._held()
        if self._has_any(held.missed, args, kwargs):
            _ = self._used.gradients() if func in _OF_GRADIENTS else self._used.values()
        if held.common and self._has_any(held.common, args, kwargs):
            self._used.common()

    def _has_any(self, tensors: Mapping[int, Tensor], args: Any, kwargs: dict[str, Any]) -> bool:
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, (list, tuple)):
                if any(id(entry) in tensors for entry in argument):
                    return True
            elif id(argument) in tensors:
                return True
        return False

    def _replace(self, arguments: Any, stood_for: dict[int, Tensor]) -> Any:
        """The arguments with values; ``stood_for`` gets, by their identity, what stands for them."""
        values = self._used.values()

        def value_of(leaf: Any) -> Any:
            placeholder = self._placeholders.get(id(leaf))
            if placeholder is None:
                return leaf
            value = values[id(placeholder)]
            if isinstance(value, nn.Parameter) and not isinstance(leaf, nn.Parameter):
                value, placeholder = value.detach(), leaf  # of a state_dict
            stood_for[id(value)] = placeholder
            return value

        return tree_map(value_of, arguments)


def take_accumulated(values: Mapping[int, Tensor] | None) -> dict[int, Tensor]:
    """Takes from copies of parameters the gradients that a hook's own backward pass has accumulated in them."""
    found = {}
    with unwatched_torch():
        for key, value in (values or {}).items():
            if value.is_leaf and value.grad is not None:
                found[key], value.grad = value.grad, None
    return found


def add_accumulated(gradients: dict[int, Tensor | None] | None, values: Mapping[int, Tensor] | None) -> None:
    """Adds what :func:`take_accumulated` takes to gradients of other stages' parameters, if these have been brought."""
    if gradients is None:
        return
    for key, new in take_accumulated(values).items():
        before = gradients.get(key)
        with unwatched_torch(), torch.no_grad():
            gradients[key] = new if before is None else before.add_(new)


@contextmanager
def in_place(module: nn.Module, values: Mapping[int, Tensor]) -> Iterator[None]:
    """In the block, the module has other tensors in some places.

    Args:
        module: The module.
        values: The other tensors, by the identity of those that they replace.
    """
    places = [(owner, name, tensor) for owner, name, _, tensor in named_tensors(module) if id(tensor) in values]
    for owner, name, tensor in places:
        setattr(owner, name, values[id(tensor)])
    try:
        yield
    finally:
        for owner, name, tensor in places:
            setattr(owner, name, tensor)


def _in_trace() -> UnsupportedError:
    return UnsupportedError(
        "A hook traces the model with a tracer that cannot access other stages' tensors.",
        where=user_source(),
        observed="use of another stage's tensor during tracing",
        expected=f"one of {', '.join(f'{owner.__name__}.{name}' for owner, name in TRACERS)}",
        todo="Use one of these tracers, or trace a copy that was made beforehand with copy.deepcopy(module).",
    )
