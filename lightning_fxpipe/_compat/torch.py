"""The only home of private names of torch; ``_compat.lightning`` is that of Lightning's.

Each name is listed with the reason why no public one does, and the versions it was seen in. ``tests/_compat/test_torch.py``
has a canary for each: it fails, by name, on the first release that changes one of them.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

# Tensors with shapes and dtypes but no data, on which the model's own Python runs during a trace. torch 2.9-2.15.
from torch._dispatch.python import enable_python_dispatcher

# A symbolic batch dimension needs a source for each symbol; no public constructor gives one. torch 2.9-2.15.
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    _maybe_evaluate_static_worker,
    free_unbacked_symbols,
)

# The public ``torch.utils.pytree`` forwards to this module; two of these are only here. torch 2.9-2.15.
from torch.nn.utils import parametrize
from torch.utils._pytree import SUPPORTED_NODES as SUPPORTED_NODES
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

from lightning_fxpipe._compat.fake_calls import repeated_calls
from lightning_fxpipe._compat.fake_sizes import Sizes
from lightning_fxpipe._compat.modes import TorchDispatchMode as TorchDispatchMode

# Kernels that cannot run without data: the size of their result depends on it, or they read it. torch 2.9-2.15.
NEEDS_VALUES = (DynamicOutputShapeException, DataDependentOutputException)

# What ``torch.nn.utils.rnn`` packs and pads sequences with. torch 2.9-2.15.
PACK_PADDED: Callable[..., Any] = torch._VF._pack_padded_sequence
PAD_PACKED: Callable[..., Any] = torch._VF._pad_packed_sequence

# The attributes in which recurrent layers keep a second list of their weights. torch 2.9-2.15.
RECURRENT_WEIGHT_LISTS = ("_flat_weights", "_flat_weight_refs")

# The attributes in which ``nn.Module`` lists the user hooks around its forward. torch 2.9-2.15.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

SYMBOLIC_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)

_META = torch.device("meta")


class FakeWorld:
    """One trace's fake tensors, with the symbols of their sizes and the guards on those symbols."""

    def __init__(self) -> None:
        self.shape_env = Sizes()
        self.mode = FakeTensorMode(shape_env=self.shape_env, allow_non_fake_inputs=True)
        self._num_inputs = 0
        self._group_sizes: dict[int, Any] = {}

    def input(self, tensor: Tensor, dynamic_dims: Iterable[int], groups: Mapping[int, int] | None = None) -> Tensor:
        """A fake of ``tensor``.

        Args:
            tensor: A tensor with data.
            dynamic_dims: Dimensions whose sizes become symbols, the same one for the same size.
            groups: Other dimensions whose sizes become symbols, the same one for the same group.
        """
        groups = groups or {}
        kinds = dict.fromkeys(dynamic_dims, DimDynamic.DUCK) | dict.fromkeys(groups, DimDynamic.DYNAMIC)
        self._num_inputs += 1
        fake = self.mode.from_tensor(
            tensor,
            source=ConstantSource(f"input_{self._num_inputs}"),
            symbolic_context=StatelessSymbolicContext(
                dynamic_sizes=[kinds.get(dim, DimDynamic.STATIC) for dim in range(tensor.dim())]
            ),
        )
        for dim, group in groups.items():
            # Each has a symbol of its own, and the comparison tells torch that they are the same.
            if self._group_sizes.setdefault(group, fake.shape[dim]) != fake.shape[dim]:
                raise ValueError(
                    f"dimension {dim} of input {self._num_inputs} differs from those of the other microbatches in group {group}"
                )
        return fake

    def static(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """A fake of a parameter or buffer, as if it were on ``device``, if that is given."""
        if device is not None and device not in (tensor.device, _META):
            if tensor.layout is torch.strided:
                with torch._C._DisableTorchDispatch():  # a model has thousands, and the mode takes half a millisecond for each
                    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
                    fake: Tensor = FakeTensor(self.mode, meta, device)
            else:
                with self.mode, torch.no_grad():
                    fake = self.mode.from_tensor(tensor.detach(), static_shapes=True).to(device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, requires_grad=tensor.requires_grad)
            return fake.requires_grad_(tensor.requires_grad)
        return self.mode.from_tensor(tensor, static_shapes=True)

    @contextmanager
    def active(self) -> Iterator[None]:
        """During the block all new tensors are this world's fakes."""
        # Without the python dispatcher, F.pad and interpolate specialise the batch size.
        try:
            with enable_python_dispatcher(), self.mode, repeated_calls(self.mode):
                yield
        finally:
            self.shape_env.results.clear()

    def guards(self) -> list[Any]:
        """Sympy conditions on the symbols that the recorded graph relies on."""
        return [guard.expr for guard in self.shape_env.guards]

    def is_contiguous(self, tensor: Tensor) -> bool:
        """Returns True if a fake is laid out contiguously; asking adds no guard."""
        with self.shape_env.suppress_guards():
            return tensor.is_contiguous()

    def replacements(self) -> dict[Any, Any]:
        """Symbols that the trace found equal to something else, a number included."""
        found = dict(self.shape_env.replacements)
        # What a symbol was replaced by may have been replaced later on.
        for _ in found:
            found = {symbol: value.xreplace(found) for symbol, value in found.items()}
        return found


def forget_fakes() -> None:
    """Frees what torch keeps of all fake tensors and sizes of the process, some of it for ever.

    That is the shapes that operators gave, and each trace's symbols, in caches of ``ShapeEnv``'s methods. A trace has
    symbols of its own, so that what is kept of others is never used again. No public name frees it. torch 2.9-2.15.
    """
    FakeTensorMode.cache_clear()
    for kept in (*vars(ShapeEnv).values(), _maybe_evaluate_static_worker):
        if hasattr(kept, "cache_clear"):
            kept.cache_clear()


def symbolic_expression(value: Any) -> Any:
    """The sympy expression behind a SymInt, SymFloat or SymBool; other values as they are."""
    expression = value.node.expr if isinstance(value, SYMBOLIC_TYPES) else value
    # A symbol that the trace had to fix is a number now.
    return int(expression) if getattr(expression, "is_Integer", False) else expression


@contextmanager
def outside_fakes() -> Iterator[None]:
    """Leaves the active fake mode for the block, so that tensors have data. torch 2.9-2.15."""
    with unset_fake_temporarily():
        yield


class StandIns:
    """Makes tensors with shape, dtype and device but no data; an operation on one and a real tensor is an error."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()

    def make(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool) -> Tensor:
        """A tensor without data."""
        with self._mode:
            return torch.empty(shape, dtype=dtype, device=device).requires_grad_(requires_grad)


def depends_on_data(value: Any) -> bool:
    """Returns True if a symbolic number was taken out of a tensor, so that no input's shape gives it."""
    return bool(free_unbacked_symbols(value))


def size_hint(value: int | torch.SymInt) -> int:
    """The size that the trace ran with."""
    if isinstance(value, torch.SymInt):
        hint = value.node.hint
        if hint is None:
            raise ValueError(f"{value} depends on data, not on the inputs' shapes")
        return int(hint)
    return int(value)


def symbol_hints(size: torch.SymInt) -> dict[Any, int]:
    """Every symbol of a size that follows from the inputs' sizes, at the value that the trace ran with.

    No public name asks for a symbol. torch 2.9-2.15; ``size_hint`` is deprecated since 2.13, and 2.11 has no other.
    """
    environment = size.node.shape_env
    hint_of = getattr(environment, "guarding_hint_or_throw", None) or environment.size_hint
    return {symbol: int(hint_of(symbol)) for symbol in size.node.expr.free_symbols}


def size_of_symbol(symbol: Any, like: Any, hint: int) -> torch.SymInt:
    """A symbol as a size in the world of a fake tensor, with its value there. No public name makes one. torch 2.9-2.15."""
    size: torch.SymInt = like.fake_mode.shape_env.create_symintnode(symbol, hint=hint)
    return size


def unknown_size(like: Any) -> torch.SymInt:
    """A new size in the world of a fake tensor that depends on data, as that of ``nonzero``. torch 2.9-2.15."""
    from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

    size: torch.SymInt = like.fake_mode.shape_env.create_unbacked_symint()
    _constrain_range_for_size(size)
    return size


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that share memory. No public identity of a storage works for fake tensors. torch 2.9-2.15."""
    return int(tensor.untyped_storage()._cdata)


def is_in_memory(tensor: Tensor, storages: Collection[int]) -> bool:
    """Returns True if a tensor's memory is one of those that :func:`storage_key` names."""
    return bool(storages) and tensor.layout is torch.strided and storage_key(tensor) in storages


def registries(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """The dictionaries in which a module has its submodules, parameters and buffers.

    The public iterators walk through the whole module, which takes too long to be done at each batch. torch 2.9-2.15.
    """
    return module._modules, module._parameters, module._buffers


def modules_inside(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Returns what ``named_modules`` yields, in a sixth of the time if reads of attributes are watched. torch 2.9-2.15."""
    found, seen = dict[str, torch.nn.Module](), set[int]()

    def visit(path: str, inside: torch.nn.Module) -> None:
        if id(inside) not in seen:
            seen.add(id(inside))
            found[path] = inside
            for name, child in vars(inside)["_modules"].items():
                if child is not None:
                    visit(f"{path}.{name}" if path else name, child)

    visit("", module)
    return found


def version_of(tensor: Tensor) -> int:
    """Grows with every in-place change of a tensor or of a view of it. torch 2.9-2.15."""
    return int(tensor._version)


def unscaling_watched(scaler: Any, after: Callable[[dict[torch.device, Tensor]], None]) -> tuple[Any, str, Any]:
    """Returns a patch with which ``after`` sees, and changes, the result of a ``GradScaler``'s search for infinite gradients.

    That is a flag for each device. Whether a step is skipped and how the scale goes on follow from these flags; no public
    method has them. torch 2.9-2.15.
    """
    unscale = scaler._unscale_grads_

    def watched(optimizer: Any, inv_scale: Tensor, found_inf: Tensor, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = unscale(optimizer, inv_scale, found_inf, *args, **kwargs)
        # A stage without gradients has found none; the scaler wants at least one flag.
        found.setdefault(found_inf.device, found_inf)
        after(found)
        return found

    return scaler, "_unscale_grads_", watched


@contextmanager
def tracing_friendly_torch() -> Iterator[None]:
    """Stops torch's own code from reading memory that fakes do not have.

    nn.Transformer's fast path and its causal-mask detection compare mask values; recorded on fake tensors either would end the
    trace or bake the example's answer into the graph. ``copy.deepcopy`` of a tensor, as of a metric's default, would copy the
    bytes of a storage that has none. torch 2.9-2.15.
    """
    import torch.nn.modules.transformer as transformer

    # It reports each kernel that cannot run without data, although another way is found then.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    patch = (transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: bool(is_causal))
    try:
        with patched_attributes(patch, (FakeTensor, "__deepcopy__", _deepcopied)):
            yield
    finally:
        log.setLevel(level)
        torch.backends.mha.set_fastpath_enabled(fastpath)


def _deepcopied(tensor: FakeTensor, memo: dict[int, Any]) -> Any:
    if not tensor.is_leaf:  # as torch says it of tensors with data
        raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol")
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


def patched_attributes(*patches: tuple[Any, str, Any]) -> AbstractContextManager[None]:
    """Sets (object, name, value) for the duration of the block; restores them in reverse."""
    return _Patched(patches)


class _Patched:
    # No generator: some of these blocks are around each microbatch.
    def __init__(self, patches: Sequence[tuple[Any, str, Any]]) -> None:
        self._patches = patches
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        try:
            for owner, name, value in self._patches:
                previous = vars(owner).get(name, _ABSENT)
                setattr(owner, name, value)
                self._before.append((owner, name, previous))
        except BaseException:
            _restore(self._before)
            raise

    def __exit__(self, *exception: object) -> None:
        _restore(self._before)


_ABSENT: Any = object()


def _restore(before: list[tuple[Any, str, Any]]) -> None:
    """Sets what was there before, in reverse; the others, too, where an object does not let it."""
    while before:
        owner, name, previous = before.pop()
        try:
            if previous is _ABSENT:
                _remove(owner, name)
            else:
                setattr(owner, name, previous)
        except BaseException:
            _restore(before)
            raise


def _remove(owner: Any, name: str) -> None:
    """Deletes an attribute without the object's own ``__delattr__``, after which a mock has none of that name any more."""
    if not isinstance(owner, type) and name in vars(owner):
        del vars(owner)[name]
    else:
        delattr(owner, name)


def checkpoints_replaced(replacement: Callable[[dict[str, Any]], AbstractContextManager[None] | None]) -> tuple[Any, str, Any]:
    """Returns a patch with which functions under ``checkpoint(use_reentrant=False)`` run in a block of ours instead.

    ``checkpoint`` is imported by name everywhere, so it cannot be replaced; the generator that it calls can. torch 2.9-2.15;
    since 2.14 it has another name, and takes the function's arguments as a tuple and a dict.

    Args:
        replacement: Gets what ``checkpoint`` was called with, but for the function and its arguments. Returns the block, None
            where the call is to do what it does without us.
    """
    module = torch.utils.checkpoint
    ordered = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
    name = "_checkpoint_without_reentrant_generator_impl"
    by_name = hasattr(module, name)
    name = name if by_name else name.removesuffix("_impl")
    original = getattr(module, name)

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        block = replacement(dict(kwargs) if by_name else dict(zip(ordered, args[1:], strict=False)))
        if block is None:
            yield from original(*args, **kwargs)
            return
        with block:
            yield

    return module, name, generator


def tensors_moved_along(root: nn.Module) -> list[Tensor]:
    """The tensors that ``root.to(...)`` moves besides parameters and buffers, such as the states of metrics: those that a class
    asks about in an ``_apply`` of its own. Nothing is moved. torch 2.9-2.15.
    """
    moved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        moved.append(tensor)
        return tensor

    def of_torch(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        return module

    asked = [module for module in root.modules() if type(module)._apply is not nn.Module._apply]
    asked = [module for module in asked if not type(module)._apply.__module__.startswith("torch.nn")]
    with patched_attributes((nn.Module, "_apply", of_torch)):
        for module in asked:
            before = dict(vars(module))
            module._apply(note)  # type: ignore[no-untyped-call]
            vars(module).update(before)
    return moved


def has_hooks(module: nn.Module) -> bool:
    """Returns True if user hooks run around the module's forward."""
    own = vars(module)
    return any(own[name] if name in own else getattr(module, name) for name in _HOOKS)


def hooks_of(module: nn.Module) -> list[Any]:
    """The user hooks that run around the module's forward."""
    return [hook for name in _HOOKS for hook in getattr(module, name).values()]


def is_saved_buffer(module: nn.Module, name: str) -> bool:
    """True if a module's own buffer is part of its state dict; making a state dict would run hooks. torch 2.9-2.15."""
    return name not in module._non_persistent_buffers_set


def takes_device(operator: Any) -> bool:
    """True if an operator has an argument for the device of its result; no public name tells. torch 2.9-2.15."""
    return any(argument.name == "device" for argument in operator._schema.arguments)


def num_results_of(operator: Any) -> int:
    """How many values an operator returns. torch 2.9-2.15."""
    return len(operator._schema.returns)


def parametrizations_are_cached() -> bool:
    """True in a block of ``torch.nn.utils.parametrize.cached()``, which no public name tells. torch 2.9-2.15."""
    return parametrize._cache_enabled > 0


def return_memory() -> None:
    """Gives freed memory back to the system, which glibc keeps for later where blocks are small; no public name does."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def unprofiled() -> Iterator[None]:
    """Within, profilers do not note what this thread begins, such as a message that may arrive much later.

    torch's profiler frees a cycle's notes at its end, and what a transfer that began in that cycle then notes of its own end is
    written into freed memory. No public name keeps a transfer out of the notes. torch 2.9-2.15.
    """
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def abort_process_groups() -> None:
    """Makes calls that wait on a device for other ranks give up; ``ProcessGroup.abort`` is for one group. torch 2.9-2.15."""
    from torch.distributed.distributed_c10d import _abort_process_group

    _abort_process_group()


def end_workers(loader: Any) -> None:
    """Ends the worker processes that a dataloader keeps for its next epoch; it has no public way to. torch 2.9-2.15."""
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None


def standard_normals(draw: Any) -> list[tuple[Any, str, Any]]:
    """Returns the patches by which ``torch.distributions`` draw by one call, not by one in place. torch 2.9-2.15."""
    owners = (torch.distributions.normal, torch.distributions.multivariate_normal, torch.distributions.studentT)
    return [(owner, "_standard_normal", draw) for owner in (*owners, torch.distributions.lowrank_multivariate_normal)]
