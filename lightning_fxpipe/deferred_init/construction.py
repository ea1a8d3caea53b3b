"""Construction without memory: what makes and initialises tensors is written down, and done later for those that are needed.

While a :class:`Construction` records, new tensors have no data: they lie on the meta device, and say that they do not. Each
torch call on them is written down. Made again later, the calls that some tensors depend on give these the very values that they
would have got at once: one that draws random numbers has the generator's state of the moment, and the generator goes on as if
it had drawn. Where the construction looks at a value (``item``, ``tolist``), that one is computed at once.

What the block itself asks to lie on the meta device does so as ever, and is written down as well; random numbers for it are
drawn only if it is wanted in the end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from lightning_fxpipe._compat.operators import written_arguments
from lightning_fxpipe._compat.torch import (
    TorchDispatchMode,
    num_results_of,
    storage_key,
    takes_device,
    tree_map,
    version_of,
)
from lightning_fxpipe.deferred_init.remake import Recording, is_empty_memory, is_random, on_device, tensors_in

_logger = logging.getLogger("lightning_fxpipe")

# Tensors up to this size that are no random numbers are made at once: tables, masks, states of metrics.
_SMALL = 64 * 1024
_META = torch.device("meta")


class Construction(Recording):
    """Records how tensors without data get their values, and makes them.

    Args:
        device: Device that the tensors are made on.
        draws: Whether random numbers are drawn while steps are recorded, so that the generator goes on; else in
            :meth:`catch_up`.
    """

    def __init__(self, device: torch.device, *, draws: bool = True) -> None:
        super().__init__(device)
        self._draws = draws
        self._pretending: set[int] = set()  # storages whose tensors say that they are not on the meta device
        self._registered: dict[int, tuple[Tensor, int]] = {}  # with their versions
        self._changed: set[int] = set()  # tensors that have changed between two recordings

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Torch calls of the block are recorded; what modules register in it belongs to this construction."""
        found: list[Tensor] = []
        self._changed |= {key for key, (tensor, version) in self._registered.items() if version_of(tensor) != version}

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
            self.forget_values()
            for tensor in [*found, *(tensor for tensor, _ in self._registered.values())]:
                self._registered[id(tensor)] = tensor, version_of(tensor)

    def has(self, tensor: Tensor) -> bool:
        """Returns True if a tensor was made, or first registered, while this was recording."""
        return id(tensor) in self._registered or self.knows(tensor)

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Returns True if a tensor has not changed while this was not recording."""
        _, version = self._registered.get(id(tensor), (tensor, version_of(tensor)))
        return self.knows(tensor) and version == version_of(tensor) and id(tensor) not in self._changed

    def pretends(self, tensor: Tensor) -> bool:
        """Returns True if a tensor on the meta device is one that the block takes for a real one."""
        return storage_key(tensor) in self._pretending

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Treats tensors without data from elsewhere as if this had made them."""
        for tensor in tensors:
            self.know(tensor)
            self._pretending.add(storage_key(tensor))

    def set_data(self, tensor: Tensor, data: Tensor) -> None:
        """Notes the value of a tensor that was just made without."""
        self._note(torch.ops.aten.copy_.default, (tensor, data), {}, None, [tensor], pretends=False)

    def operate(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator of the block."""
        tensors = tensors_in((args, kwargs))
        if not any(tensor.is_meta for tensor in tensors):
            if tensors or not takes_device(function):
                return function(*args, **kwargs)
            return self._make_new(function, args, kwargs)
        changed = written_arguments(function, args, kwargs)
        device = kwargs.get("device")
        moves = device is not None and device.type != "meta"  # the result is asked to be elsewhere
        if not any(tensor.is_meta and self.pretends(tensor) for tensor in tensors) and (not moves or _copies(function)):
            return self._note(function, args, kwargs, function(*args, **kwargs), changed, pretends=False)
        # What is changed with data, or moved elsewhere, needs values; so does what torch cannot do without.
        if all(tensor.is_meta for tensor in changed) and not (moves and _copies(function)):
            try:
                result = _without_data(function, args, kwargs)
            except Exception:
                _logger.debug("%s runs with real data, because it failed on tensors without data", function, exc_info=True)
                result = None
            else:
                if changed or tensors_in(result):
                    return self._note(function, args, kwargs, result, changed)
        return self._with_data(function, args, kwargs, [tensor for tensor in changed if tensor.is_meta])

    def _make_new(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device") or torch.device("cpu")
        if device.type not in ("meta", "cpu", self.device.type):
            return function(*args, **kwargs)
        result = _without_data(function, args, kwargs)
        size = sum(tensor.nbytes for tensor in tensors_in(result))
        is_table = not is_random(function) and not is_empty_memory(function) and size <= _SMALL
        if device != _META and (is_table or not size):  # what is empty may get a storage from elsewhere
            return function(*args, **kwargs)
        return self._note(function, args, kwargs, result, [], pretends=device != _META)

    def _note(
        self, function: Any, args: Any, kwargs: Any, result: Any, changed: Sequence[Tensor], *, pretends: bool = True
    ) -> Any:
        """Writes a call down; returns its result."""
        draws = self.add(function, args, kwargs, result, changed)
        if pretends:
            self._pretending.update(map(storage_key, tensors_in(result)))
            if draws and self._draws:
                self.catch_up()
        return result

    def _with_data(self, function: Any, args: Any, kwargs: Any, changed: Sequence[Tensor]) -> Any:
        """A call that needs values: they are computed. Where it changes tensors without data, it becomes a step."""
        if len(changed) == 1 == num_results_of(function):
            self._note(function, args, kwargs, None, changed)
            return changed[0]
        given = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_meta]
        values = dict(zip(map(id, given), self.data_of(given), strict=True))
        if changed:
            self._note(function, args, kwargs, None, changed)
            self.forget_values()
        real_args, real_kwargs = tree_map(lambda leaf: values.get(id(leaf), leaf), (args, on_device(kwargs, self.device)))
        return function(*real_args, **real_kwargs)

    def data_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The values of tensors at this moment of the recording."""
        self.catch_up()
        for tensor in tensors:
            self.know(tensor)
        return self.values(tensors)

    def catch_up(self, wanted: Iterable[Tensor] = ()) -> None:
        """Draws the random numbers that the construction has drawn, in its order, if that has not been done.

        Args:
            wanted: Tensors that may lie on the meta device because the block asked for that, and are to have data all the same.
        """
        self.draw(None if self.needs_draws(wanted) else self._pretending)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands the operators of a block to a construction."""

    def __init__(self, construction: Construction) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._construction = construction

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (Tensor, nn.Parameter, nn.Buffer) for kind in types):
            return func(*args, **kwargs)
        return self._construction.operate(func, args, kwargs)


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_IS_META, _DEVICE, _IS_CPU, _IS_CUDA = (getattr(Tensor, name).__get__ for name in ("is_meta", "device", "is_cpu", "is_cuda"))
# With them comes data; asked to make tensors without, they forget it.
_TAKE_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)
_GIVE_DATA = (Tensor.tolist, Tensor.numpy, Tensor.__array__)


class Calls(TorchFunctionMode):
    """Tensors without data say that they are where they will be; code would leave out their initialisation otherwise."""

    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = self._construction.device
        if func in _TAKE_DATA and not tensors_in(args):
            made = func(*args, **kwargs)
            if made.is_meta:
                self._construction.set_data(made, func(*args, **{**kwargs, "device": device}))
            return made
        if func == _SET_DATA and not args[0].is_meta and args[1].is_meta and self._construction.pretends(args[1]):
            # Lazy modules do so once they know their sizes: they have memory from then on.
            return func(args[0], self._construction.data_of(args[1:])[0])
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


def _copies(function: Any) -> bool:
    return bool(function.overloadpacket.__name__ == "_to_copy")


def _without_data(function: Any, args: Any, kwargs: Any) -> Any:
    """The result of a call, without data."""

    def blank(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_META)
        return None if isinstance(leaf, torch.Generator) else leaf

    options = on_device(kwargs, _META)
    if takes_device(function) and not tensors_in((args, kwargs)):
        options["device"] = _META
    blank_args, blank_kwargs = tree_map(blank, (args, options))
    return function(*blank_args, **blank_kwargs)
