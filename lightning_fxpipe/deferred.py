"""Construction without memory: what makes and initialises tensors is written down, and done later for those that are needed.

While a :class:`Construction` records, new tensors have no data: they lie on the meta device, and say that they do not. Each torch
call on them becomes a step. Later the steps that some tensors depend on are made again, in order, and give these the very values
that they would have got at once: a step that draws random numbers has the generator's state of the moment, and the generator goes
on as if it had drawn. Where the construction looks at a value (``item``, ``tolist``), that one is computed at once.

What the block itself asks to lie on the meta device does as on any day, and is recorded as well; random numbers for it are drawn
only if it is wanted in the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from lightning_fxpipe._compat import TorchDispatchMode, storage_key, tree_leaves, tree_map, version_of
from lightning_fxpipe.drawing import generator_of, kept_generators, spend

# Tensors up to this size that are no random numbers are made at once: tables, masks, states of metrics.
_SMALL = 64 * 1024
# Larger tensors with data that a step takes are not copied.
_LARGE = 1024 * 1024
_META = torch.device("meta")
# They set all of the tensor that they change, whatever it was.
_OVERWRITE = frozenset(
    ("uniform_", "normal_", "fill_", "zero_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_", "copy_")
)
_FACTORY_OF = {"rand": torch.ops.aten.uniform_.default, "randn": torch.ops.aten.normal_.default}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tensor lies: its storage, and its shape in there."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """That of a tensor."""
        return cls(
            storage=storage_key(tensor),
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=tensor.storage_offset(),
        )

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor at this place of a storage with data."""
        with torch.no_grad():
            empty = torch.empty(0, dtype=self.dtype, device=storage.device)
            return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, eq=False)
class _Constant:
    """A tensor with data that a step takes."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Constant:
        kept = tensor.detach() if tensor.nbytes > _LARGE else tensor.detach().clone()
        return cls(kept, version_of(kept))

    def value(self) -> Tensor:
        if version_of(self.tensor) != self.version:
            raise RuntimeError("A tensor that weights are initialised from was changed after that.")
        return self.tensor


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A torch call.

    Attributes:
        function: What is called.
        args: Its arguments, with places for tensors without data.
        kwargs: Its keyword arguments.
        results: Places of the tensors that it returns.
        reads: Storages that it needs.
        writes: Storages that it makes or changes.
        overwritten: The storage of which nothing older is left afterwards.
        is_random: Whether it draws random numbers.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Place, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    overwritten: int | None
    is_random: bool

    @property
    def name(self) -> str:
        """Name of the operator."""
        return str(self.function.overloadpacket.__name__)


class Construction:
    """Records how tensors without data get their values, and makes them.

    Args:
        device: Device that the tensors are made on.
        draws: Whether random numbers are drawn while steps are recorded, so that the generator goes on; else in
            :meth:`catch_up`.
    """

    def __init__(self, device: torch.device, *, draws: bool = True) -> None:
        self.device = device
        self._draws = draws
        self._steps: list[_Step] = []
        self._undrawn: list[int] = []  # steps whose random numbers are still to be drawn
        self._states: dict[int, Tensor] = {}  # of the generator, before a step
        self._storages: dict[int, torch.UntypedStorage] = {}  # without data; kept, so that no other gets the same key
        self._pretending: set[int] = set()  # storages whose tensors say that they are not on the meta device
        self._written: dict[int, int] = {}  # elements that steps have set, by storage
        self._registered: dict[int, tuple[Tensor, int]] = {}
        self._recent: dict[int, torch.UntypedStorage] = {}  # what was computed last while recording
        self._recent_until = 0

    # ------------------------------------------------------------------ recording

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Torch calls of the block are recorded; what modules register in it belongs to this construction."""
        found: list[Tensor] = []

        def note(module: nn.Module, name: str, tensor: Tensor | None) -> None:
            if tensor is not None:
                found.append(tensor)

        handles = [register_module_parameter_registration_hook(note), register_module_buffer_registration_hook(note)]
        try:
            with self.device, Calls(self), _Operators(self):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._recent = {}
            for tensor in [*found, *(tensor for tensor, _ in self._registered.values())]:
                self._registered[id(tensor)] = tensor, version_of(tensor)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor was made, or first registered, while this was recording."""
        return id(tensor) in self._registered or storage_key(tensor) in self._storages

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether nobody has changed a tensor while this was not recording."""
        _, version = self._registered.get(id(tensor), (tensor, version_of(tensor)))
        return storage_key(tensor) in self._storages and version == version_of(tensor)

    def is_written(self, tensor: Tensor) -> bool:
        """Whether the tensor has got values."""
        return self._written.get(storage_key(tensor), 0) >= tensor.numel()

    def pretends(self, tensor: Tensor) -> bool:
        """Whether a tensor on the meta device is one that the block takes for a real one."""
        return storage_key(tensor) in self._pretending

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been recorded."""
        return not self._storages

    def needs_draws(self, tensors: Iterable[Tensor]) -> bool:
        """Whether tensors depend on random numbers that have not been drawn yet."""
        needed = self._needed({storage_key(tensor) for tensor in tensors}, len(self._steps), {}, 0)
        return not set(self._undrawn).isdisjoint(needed)

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Treats tensors without data from elsewhere as if this had made them."""
        for tensor in tensors:
            self._storages.setdefault(storage_key(tensor), tensor.untyped_storage())
            self._pretending.add(storage_key(tensor))

    def set_data(self, tensor: Tensor, data: Tensor) -> None:
        """Notes the value of a tensor that was just made without."""
        self._note(torch.ops.aten.copy_.default, (tensor, data), {}, None, [tensor], pretends=False)

    def operate(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator of the block."""
        tensors = _tensors((args, kwargs))
        if not any(tensor.is_meta for tensor in tensors):
            if tensors or not _takes_device(function):
                return function(*args, **kwargs)
            return self._make_new(function, args, kwargs)
        changed = _changed(function, args, kwargs)
        moves = _moves(kwargs)
        if not any(tensor.is_meta and self.pretends(tensor) for tensor in tensors) and (not moves or _copies(function)):
            return self._note(function, args, kwargs, function(*args, **kwargs), changed, pretends=False)
        # What is changed with data, or moved elsewhere, needs values; so does what torch cannot do without.
        if all(tensor.is_meta for tensor in changed) and not (moves and _copies(function)):
            try:
                result = _without_data(function, args, kwargs)
            except Exception:
                result = None
            else:
                if changed or _tensors(result):
                    return self._note(function, args, kwargs, result, changed)
        return self._with_data(function, args, kwargs, [tensor for tensor in changed if tensor.is_meta])

    def _make_new(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device") or torch.device("cpu")
        if device.type not in ("meta", "cpu", self.device.type):
            return function(*args, **kwargs)
        result = _without_data(function, args, kwargs)
        size = sum(tensor.nbytes for tensor in _tensors(result))
        is_table = not _is_random(function) and "empty" not in str(function) and size <= _SMALL
        if device != _META and (is_table or not size):  # what is empty may get a storage from elsewhere
            return function(*args, **kwargs)
        return self._note(function, args, kwargs, result, [], pretends=device != _META)

    def _note(
        self, function: Any, args: Any, kwargs: Any, result: Any, changed: Sequence[Tensor], *, pretends: bool = True
    ) -> Any:
        """Writes a step down; returns its result."""
        used = [tensor for tensor in _tensors((args, kwargs)) if tensor.is_meta]
        made = _tensors(result)
        for tensor in (*used, *made):
            self._storages.setdefault(storage_key(tensor), tensor.untyped_storage())
        if pretends:
            self._pretending.update(map(storage_key, made))
        reads = {storage_key(tensor) for tensor in used}
        new = [tensor for tensor in made if storage_key(tensor) not in reads]
        if not changed and (not new or "empty" in str(function)):
            return result  # a view, or memory that nothing is written to
        overwritten = None
        if len(changed) == 1 and function.overloadpacket.__name__ in _OVERWRITE and _fills_storage(changed[0]):
            overwritten = storage_key(changed[0])
        self._steps.append(
            _Step(
                function=function,
                args=tree_map(_frozen, args),
                kwargs=tree_map(_frozen, kwargs),
                results=tuple(map(Place.of, made)),
                reads=frozenset(reads - {overwritten}),
                writes=frozenset(storage_key(tensor) for tensor in (*changed, *new)),
                overwritten=overwritten,
                is_random=_is_random(function),
            )
        )
        for tensor in (*changed, *new):
            key = storage_key(tensor)
            self._written[key] = self._written.get(key, 0) + tensor.numel()
        if _is_random(function):
            self._undrawn.append(len(self._steps) - 1)
            if self._draws and pretends:
                self.catch_up()
        return result

    def _with_data(self, function: Any, args: Any, kwargs: Any, changed: Sequence[Tensor]) -> Any:
        """A call that needs values: they are computed. Where it changes tensors without data, it becomes a step."""
        if len(changed) == 1 == len(function._schema.returns):
            self._note(function, args, kwargs, None, changed)
            return changed[0]
        given = [tensor for tensor in _tensors((args, kwargs)) if tensor.is_meta]
        values = dict(zip(map(id, given), self.data_of(given), strict=True))
        if changed:
            self._note(function, args, kwargs, None, changed)
            self._recent = {}
        real_args, real_kwargs = tree_map(lambda leaf: values.get(id(leaf), leaf), (args, _on(kwargs, self.device)))
        return function(*real_args, **real_kwargs)

    def data_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The values of tensors at this moment of the recording."""
        self.catch_up()
        for tensor in tensors:
            self._storages.setdefault(storage_key(tensor), tensor.untyped_storage())
        found = self._run({storage_key(tensor) for tensor in tensors}, keeps_all=True)
        self._recent, self._recent_until = found, len(self._steps)
        # The caller may change what it gets.
        return [Place.of(tensor).view(found[storage_key(tensor)]).clone() for tensor in tensors]

    # ------------------------------------------------------------------ making

    def catch_up(self, wanted: Iterable[Tensor] = ()) -> None:
        """Draws the random numbers of steps for which they have not been drawn, and throws them away.

        Args:
            wanted: Tensors that may lie on the meta device because the block asked for that, and are to have data all the same.
        """
        draws_all = self.needs_draws(wanted)
        undrawn, self._undrawn = self._undrawn, []
        for index in undrawn:
            step = self._steps[index]
            if not draws_all and self._pretending.isdisjoint(step.writes):
                self._undrawn.append(index)
                continue
            self._states[index] = generator_of(step.kwargs, self.device).get_state()
            with torch.no_grad():
                self._spend(index, step)

    def _spend(self, index: int, step: _Step) -> None:
        generator = {key: value for key, value in step.kwargs.items() if key == "generator"}
        if step.name in _OVERWRITE and isinstance(step.args[0], Place):
            spend(step.function, step.args[1:], step.kwargs, _blank(step.args[0]), self.device)
        elif step.name in _FACTORY_OF:
            spend(_FACTORY_OF[step.name], (), generator, _blank(step.results[0]), self.device)
        else:
            places = [leaf for leaf in tree_leaves((step.args, step.kwargs)) if isinstance(leaf, Place)]
            is_like = step.name.endswith("_like")
            found = {} if is_like else self._run({place.storage for place in places}, until=index)
            self._repeat(step, dict(found), {})

    def make(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors with their data; those that share memory still do. Generators stay as they are."""
        found = self._run({storage_key(tensor) for tensor in tensors})
        return [Place.of(tensor).view(found[storage_key(tensor)]) for tensor in tensors]

    def _run(
        self, wanted: Collection[int], *, until: int | None = None, keeps_all: bool = False
    ) -> dict[int, torch.UntypedStorage]:
        """Makes the steps that storages depend on.

        Args:
            wanted: The storages.
            until: Number of steps after which their values are wanted; None for all.
            keeps_all: Whether what is computed on the way stays; it then goes on from what was computed last.

        Returns:
            Storages with data, by key.
        """
        until = len(self._steps) if until is None else until
        found = dict(self._recent) if keeps_all else {}
        chosen = self._needed(wanted, until, found, self._recent_until)
        if found and chosen and chosen[0] < self._recent_until:  # it would need what has been changed since
            found = {}
            chosen = self._needed(wanted, until, {}, 0)
        last_use = {key: index for index in chosen for key in self._steps[index].reads | self._steps[index].writes}
        generators = {generator_of(self._steps[index].kwargs, self.device) for index in chosen if index in self._states}
        with torch.no_grad(), kept_generators(generators):
            for index in chosen:
                step = self._steps[index]
                if index in self._states:
                    generator_of(step.kwargs, self.device).set_state(self._states[index])
                self._repeat(step, found, last_use)
                for key in () if keeps_all else (step.reads | step.writes) - set(wanted):
                    if last_use[key] == index:
                        found.pop(key, None)
        for key in wanted:
            self._allocate(key, found)
        return found

    def _needed(self, wanted: Collection[int], until: int, known: Mapping[int, Any], since: int) -> list[int]:
        """The steps that storages depend on, where some are known as they are after the first ``since`` steps."""
        needed, chosen = set(wanted), []
        for index in reversed(range(until)):
            if index == since - 1:
                needed -= known.keys()
            step = self._steps[index]
            if not needed.isdisjoint(step.writes):
                chosen.append(index)
                needed |= step.reads
                needed -= {step.overwritten}
        return chosen[::-1]

    def _allocate(self, key: int, found: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
        if key not in found:
            empty = torch.zeros(self._storages[key].nbytes(), dtype=torch.uint8, device=self.device)
            found[key] = empty.untyped_storage()
        return found[key]

    def _repeat(self, step: _Step, found: dict[int, torch.UntypedStorage], last_use: Mapping[int, int]) -> None:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, Place):
                return leaf.view(self._allocate(leaf.storage, found))
            return leaf.value() if isinstance(leaf, _Constant) else leaf

        args, kwargs = tree_map(real, (step.args, _on(step.kwargs, self.device)))
        made = _tensors(step.function(*args, **kwargs))
        for place, tensor in zip(step.results, made, strict=False):
            if place.storage in found:
                continue
            if (tensor.stride(), tensor.storage_offset()) == (place.stride, place.offset):
                found[place.storage] = tensor.untyped_storage()
            else:
                place.view(self._allocate(place.storage, found)).copy_(tensor)


class _Operators(TorchDispatchMode):
    """Hands the operators of a block to a construction."""

    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(not _is_plain(kind) for kind in types):
            return func(*args, **kwargs)
        return self._construction.operate(func, args, kwargs)


_IS_META, _DEVICE, _IS_CPU, _IS_CUDA = (getattr(Tensor, name).__get__ for name in ("is_meta", "device", "is_cpu", "is_cuda"))
# With them comes data; asked to make tensors without, they forget it.
_TAKE_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)
_GIVE_DATA = (Tensor.tolist, Tensor.numpy, Tensor.__array__)


class Calls(TorchFunctionMode):
    """Tensors without data say that they are where they will be; code would leave out their initialisation otherwise.

    Args:
        construction: What records.
    """

    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = self._construction.device
        if func in _TAKE_DATA and not _tensors(args):
            made = func(*args, **kwargs)
            if made.is_meta:
                self._construction.set_data(made, func(*args, **{**kwargs, "device": device}))
            return made
        if not args or not isinstance(args[0], Tensor) or not args[0].is_meta or not self._construction.pretends(args[0]):
            return func(*args, **kwargs)
        if func == _IS_META:
            return False
        if func == _DEVICE:
            return device
        if func in (_IS_CPU, _IS_CUDA):
            return device.type == ("cpu" if func == _IS_CPU else "cuda")
        if func in _GIVE_DATA:
            return func(*self._construction.data_of(args[:1]), *args[1:], **kwargs)
        if func == Tensor.to:
            return func(args[0], *_staying(args[1:], device), **_staying(kwargs, device))
        if func == getattr(Tensor, device.type, None):
            return args[0]
        return func(*args, **kwargs)


def _staying(arguments: Any, device: torch.device) -> Any:
    """Arguments of ``Tensor.to`` that leave a tensor without data where it is, if it is asked to where it will be."""

    def stay(argument: Any) -> Any:
        is_device = isinstance(argument, torch.device) or (
            isinstance(argument, str) and argument.partition(":")[0] == device.type
        )
        if is_device and torch.device(argument).type == device.type:
            return _META
        return torch.empty(0, dtype=argument.dtype, device=_META) if isinstance(argument, Tensor) else argument

    return {key: stay(value) for key, value in arguments.items()} if isinstance(arguments, Mapping) else map(stay, arguments)


def _is_plain(kind: type) -> bool:
    return kind in (Tensor, nn.Parameter, nn.Buffer)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _frozen(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return Place.of(leaf) if leaf.is_meta else _Constant.of(leaf)


def _blank(place: Place) -> Tensor:
    return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=_META)


def _is_random(function: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in function.tags


def _takes_device(function: Any) -> bool:
    return any(argument.name == "device" for argument in function._schema.arguments)


def _moves(kwargs: Mapping[str, Any]) -> bool:
    """Whether the result is asked to be elsewhere than on the meta device."""
    device = kwargs.get("device")
    return device is not None and device.type != "meta"


def _copies(function: Any) -> bool:
    return function.overloadpacket.__name__ == "_to_copy"


def _on(kwargs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The keyword arguments with another device."""
    return {key: device if isinstance(value, torch.device) else value for key, value in kwargs.items()}


def _without_data(function: Any, args: Any, kwargs: Any) -> Any:
    """The result of a call, without data."""

    def blank(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_META)
        return None if isinstance(leaf, torch.Generator) else leaf

    options = _on(kwargs, _META)
    if _takes_device(function) and not _tensors((args, kwargs)):
        options["device"] = _META
    blank_args, blank_kwargs = tree_map(blank, (args, options))
    return function(*blank_args, **blank_kwargs)


def _changed(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call changes in place."""
    found: list[Tensor] = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def _fills_storage(tensor: Tensor) -> bool:
    return tensor.nbytes == tensor.untyped_storage().nbytes() and 0 not in tensor.stride()
