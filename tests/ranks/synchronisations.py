"""Counts what would make the host wait for a CUDA device, without one: a device is played by renamed memory of the CPU.

The Trainer's device is ``cpu:0``, which no other code names: what is moved there, or made there, is the device's, and so is
what an operator makes of it. All else is the host's. A tensor of the device says ``cpu:0`` when asked for its device, and has
memory of its own: ``.cpu()`` and ``.to("cpu")`` copy. What counts is what ``torch.cuda.set_sync_debug_mode`` counts: reading a
value (``.item()``, ``.tolist()``, ``bool()``, ``float()``, ``.numpy()``), a copy from the device to the host or from there to
the device unless it is ``non_blocking``, and operators whose result's shape depends on values (``nonzero``, an index that is a
mask). And where ranks talk: objects through the device's process group, and its barrier.

What would be an error on a CUDA device is one here: tensors of both kinds in one operator, a tensor of the device in a process
group for the host's, and the reverse.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from lightning.fabric.utilities import apply_func
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import lightning_fxpipe.distributed.topology as topology
from lightning_fxpipe._compat.torch import FakeTensor, patched_attributes, tree_leaves

DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")

_aten = torch.ops.aten
# Operators that read values of the device's tensors.
_READING = {"_local_scalar_dense", "equal", "is_nonzero", "allclose", "_linalg_check_errors"}
_READING |= {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "argwhere"}
# Operators that take a number for all elements from a tensor of the host, or copy between both.
_TAKES_HOST = {"copy_", "fill_", "_to_copy", "set_", "index", "index_put_", "_index_put_impl_", "lift_fresh"}
_TENSOR_COLLECTIVES = ("all_reduce", "broadcast", "send", "recv", "isend", "irecv", "reduce", "all_gather")
_OBJECT_COLLECTIVES = ("broadcast_object_list", "all_gather_object", "gather_object", "send_object_list", "recv_object_list")
_OF_HOST = "for tensors of the host"
_MODES = ("writes.py", "known_numbers.py", "modes.py")  # which see what others do
_SOURCES = {"lightning_fxpipe": "", "lightning": "lightning/", "torchmetrics": "torchmetrics/"}


@dataclasses.dataclass(frozen=True)
class Synchronisation:
    """Something for which the host waits.

    Attributes:
        what: The operator or function.
        where: The line of this package, Lightning or user code that has asked for it.
    """

    what: str
    where: str

    @property
    def is_ours(self) -> bool:
        """Whether it is a line of this package's."""
        return not self.where.startswith(("lightning/", "torchmetrics/", "user "))


class RenamedDevice(TorchDispatchMode):
    """Knows which tensors are the device's, and notes what the host would wait for, batch by batch.

    Attributes:
        batches: What was noted in each training batch so far, from its beginning to that of the next one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[Synchronisation]] = [[]]
        self._is_reading = False
        self._storages: dict[int, StorageWeakRef] = {}  # which are the device's; an address is not used again while it is here

    # ------------------------------------------------------------------ whose a tensor is

    def has(self, tensor: Any) -> bool:
        """Whether a tensor is the device's."""
        return _is_real(tensor) and tensor.untyped_storage()._cdata in self._storages

    def take(self, tensor: Any) -> Any:
        """Makes a tensor the device's; leaves what is none."""
        if _is_real(tensor):
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = StorageWeakRef(storage)
            if len(self._storages) > 20_000:
                self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}
        return tensor

    def _give(self, tensor: Tensor) -> Tensor:
        """A copy of the host's."""
        copy = tensor.clone()
        self._storages.pop(copy.untyped_storage()._cdata, None)
        return copy

    # ------------------------------------------------------------------ operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)
        is_device = [self.has(tensor) for tensor in tensors]
        name = func._schema.name.partition("::")[2]
        if any(is_device):
            self._look(name, args, kwargs, tensors, is_device)
        result = func(*args, **kwargs)
        if name != "copy_" and (any(is_device) or kwargs.get("device") == DEVICE):
            for leaf in tree_leaves(result):
                self.take(leaf)
        return result

    def _look(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor], is_device: list[bool]) -> None:
        if name in _READING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.note(name)
        elif name in ("index", "index_put_", "_index_put_impl_"):
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.note(f"{name} with a mask")
            elif any(not self.has(index) for index in indices):
                self.note(f"{name} with an index on the host")
        elif name == "copy_" and not all(is_device) and not (args[2:] and args[2]) and not kwargs.get("non_blocking"):
            self.note("copy_ to the host" if is_device[1] else "copy_ to the device")
        elif name not in _TAKES_HOST and any(_is_real(t) and t.dim() and not self.has(t) for t in tensors):
            raise RuntimeError(f"{name} gets tensors of the device and of the host: {[tuple(t.shape) for t in tensors]}")

    def note(self, what: str) -> None:
        """Notes that the host waits."""
        self.batches[-1].append(Synchronisation(what, _where()))

    # ------------------------------------------------------------------ methods of tensors that no operator shows

    def patches(self) -> list[tuple[Any, str, Any]]:
        """What makes them show."""
        device: Any = Tensor.device
        methods = {name: getattr(Tensor, name) for name in ("tolist", "numpy", "__array__")}

        def asked(tensor: Tensor) -> torch.device:
            found: torch.device = device.__get__(tensor)
            return DEVICE if self.has(tensor) and not _has_fakes() else found

        def reading(name: str) -> Callable[..., Any]:
            @functools.wraps(methods[name])
            def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                is_outer, self._is_reading = not self._is_reading, True  # a function mode comes here once more
                try:
                    if is_outer and self.has(tensor):
                        self.note(name)
                    return methods[name](tensor, *args, **kwargs)
                finally:
                    self._is_reading = not is_outer

            return read

        to, cpu, group = Tensor.to, Tensor.cpu, clip_grad._group_tensors_by_device_and_dtype

        def grouped(lists: Any, *args: Any) -> Any:  # by C++, which knows no names of ours
            return {(asked(found[0][0][0]), key[1]): found for key, found in group(lists, *args).items()}

        @functools.wraps(to)
        def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            target, others = _target(args, kwargs)
            if target is None or not _is_real(tensor) or target.type != "cpu" or _has_fakes():
                return to(tensor, *args, **kwargs)
            waits = not others.pop("non_blocking", False)
            converted = to(tensor, **others) if others else tensor
            if self.has(tensor) == (target == DEVICE):
                return converted
            if waits:
                self.note("to(device)" if target == DEVICE else "to(cpu)")
            return self.take(converted.clone()) if target == DEVICE else self._give(converted)

        @functools.wraps(cpu)
        def to_host(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return moved(tensor, HOST) if _is_real(tensor) else cpu(tensor, *args, **kwargs)

        def making(name: str) -> Callable[..., Any]:
            original = getattr(torch, name)

            @functools.wraps(original)
            def make(data: Any, *args: Any, **kwargs: Any) -> Tensor:
                target = kwargs.pop("device", None)
                made: Tensor = original(data, *args, **kwargs)
                return made if target is None or _has_fakes() else made.to(target)

            return make

        return [
            *((torch, name, making(name)) for name in ("tensor", "as_tensor")),
            (Tensor, "device", property(asked)),
            (clip_grad, "_group_tensors_by_device_and_dtype", grouped),
            *((Tensor, name, reading(name)) for name in methods),
            (Tensor, "to", moved),
            (Tensor, "cpu", to_host),
        ]


class RenamedGroups:
    """Process groups: those of the device, and those that are made for the host's tensors."""

    def __init__(self, device: RenamedDevice) -> None:
        self._device = device

    def patches(self) -> list[tuple[Any, str, Any]]:
        """What tells them apart."""
        new_group, make, barrier = dist.new_group, topology.make_topology, dist.barrier

        def noted(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
            return new_group(*args, backend=backend, group_desc=_OF_HOST if backend == "gloo" else None, **kwargs)

        def made(device: torch.device, timeout: Any = None, *args: Any) -> Any:
            found = make(device, timeout, *args)
            order = dist.get_process_group_ranks(found.group)
            control = dist.new_group(order, timeout, backend="gloo", sort_ranks=False)
            topology.closed_with(found, [control])
            object.__setattr__(found, "control_group", control)  # a copy would end the groups of the original
            return found

        def waiting(*args: Any, **kwargs: Any) -> Any:
            self._device.note("barrier")
            return barrier(*args, **kwargs)

        functions = {name: self._of_tensors(getattr(dist, name)) for name in _TENSOR_COLLECTIVES}
        functions |= {name: self._of_objects(getattr(dist, name)) for name in _OBJECT_COLLECTIVES}
        functions |= {"new_group": noted, "barrier": waiting}
        patches = [(owner, name, found) for owner in (dist, torch.distributed) for name, found in functions.items()]
        return [(topology, "make_topology", made), *patches]

    def _of_tensors(self, function: Any) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = tree_leaves((args, kwargs))
            is_of_host = any(map(_is_of_host, leaves))
            inside = sys._getframe(1).f_globals is vars(dist)  # of objects, which are noted as such
            for leaf in leaves:
                if isinstance(leaf, Tensor) and not inside and self._device.has(leaf) == is_of_host:
                    raise RuntimeError(f"{function.__name__}: the group is the {'host' if is_of_host else 'device'}'s")
            return function(*args, **kwargs)

        return call

    def _of_objects(self, function: Any) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not any(map(_is_of_host, (*args, *kwargs.values()))):
                self._device.note(f"{function.__name__} through the device")
            return function(*args, **kwargs)

        return call


@contextmanager
def renamed_device() -> Iterator[RenamedDevice]:
    """In the block the Trainer's CPU devices are no CPU; yields what notes, batch by batch, what the host would wait for."""
    device = RenamedDevice()
    advance = _TrainingEpochLoop.advance

    def batch(loop: Any, *args: Any) -> Any:
        device.batches.append([])
        return advance(loop, *args)

    def devices(devices: Any) -> list[torch.device]:
        return [DEVICE] * int(devices)

    patches = [
        (CPUAccelerator, "get_parallel_devices", staticmethod(devices)),
        (_TrainingEpochLoop, "advance", batch),
        (apply_func, "_BLOCKING_DEVICE_TYPES", ()),  # batches go there as they go to a CUDA device
        *device.patches(),
        *RenamedGroups(device).patches(),
    ]
    with patched_attributes(*patches), device:
        yield device


def counted(found: list[Synchronisation]) -> dict[str, int]:
    """How often each was noted, most often first."""
    return {f"{each.where}: {each.what}": count for each, count in Counter(found).most_common()}


def _is_of_host(value: Any) -> bool:
    return isinstance(value, dist.ProcessGroup) and value.group_desc == _OF_HOST


def _is_real(tensor: Any) -> bool:
    is_tensor = isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor)
    return is_tensor and not tensor.is_meta and tensor.layout is torch.strided  # others' memory cannot be told apart


def _has_fakes() -> bool:
    return any(type(mode).__name__ == "FakeTensorMode" for mode in _get_current_dispatch_mode_stack())


def _target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.device | None, dict[str, Any]]:
    """The device in the arguments of ``Tensor.to``, None where there is none; and the others, by name."""
    others = dict(kwargs)
    if args and not isinstance(args[0], torch.dtype):
        names = ("device", "dtype", "non_blocking", "copy")
        if isinstance(args[0], Tensor):
            names, others["device"], others["dtype"] = ("tensor", *names[2:]), args[0].device, args[0].dtype
        others |= {name: value for name, value in zip(names, args, strict=False) if name != "tensor"}
    target = others.pop("device", None)
    return None if target is None else torch.device(target), {k: v for k, v in others.items() if v is not None}


def _where() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None:
        root, inside = _place_of(frame.f_code.co_filename)
        if root is not None:
            return f"{root}{inside}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "user code"


@functools.cache
def _place_of(filename: str) -> tuple[str | None, str]:
    parts = Path(filename).parts
    if Path(filename) == Path(__file__) or "torch" in parts or parts[-1] in _MODES or not filename.endswith(".py"):
        return None, ""
    for name, prefix in _SOURCES.items():
        if name in parts:
            position = len(parts) - 1 - parts[::-1].index(name)
            return prefix, "/".join(parts[position + 1 :])
    return ("user ", parts[-1]) if "tests" in parts else (None, "")
