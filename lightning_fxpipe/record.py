"""Records a module call as a ``torch.fx.Graph`` by running the module's own Python on fake tensors.

``torch.fx.Tracer`` hands the model proxies, and ordinary code (``if``, ``isinstance``, ``dict(...)``, a loop over a shape)
breaks on them; ``torch.export`` bakes train or eval mode and loses module paths. Here the model sees real tensor objects, fake
only in having no data, and every torch call it makes passes through a ``TorchFunctionMode`` that appends a node. Tensors map to
nodes by identity.

A module that the caller wants whole becomes one ``call_module`` node: its Python still runs (on fakes, to learn the shapes of
its outputs), but nothing inside is recorded, so its hooks, dropout and control flow stay its own.

Sizes stay symbolic: a ``SymInt`` argument is kept in the node as it is, and becomes arithmetic on a tensor's size only when a
stage is built (:mod:`lightning_fxpipe.split`), on whichever tensor that stage has. So no integer ever crosses a cut.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from lightning_fxpipe._compat import (
    SYMBOLIC_TYPES,
    FakeTensor,
    depends_on_data,
    isolated_rng,
    patched_attributes,
    python_rng,
    storage_key,
    tree_leaves,
    tree_map,
    version_of,
)
from lightning_fxpipe.calls import calls_through, is_query, raising_source, user_source
from lightning_fxpipe.exchange import Attributes, assigned_tensors
from lightning_fxpipe.probe import ProbeFailed, probe_result
from lightning_fxpipe.randomness import DRAWN_AHEAD, Draw, LikeTensor, drawn_now_or_ahead
from lightning_fxpipe.recurrent import shaped
from lightning_fxpipe.sizes import as_size

CONSTANT_PREFIX = "_fxpipe_constant_"
DRAW_PREFIX = "region_draw_"

# torch changes running statistics without marking them as changed: its kernels' schemas do not say so.
_NORMALISATIONS = frozenset({torch.batch_norm, torch.instance_norm, nn.functional.batch_norm, nn.functional.instance_norm})

# Constants that an fx node can hold as they are.
_PLAIN_TYPES = (int, float, bool, str, complex, torch.dtype, torch.device, torch.layout, torch.memory_format, range)


class RecordError(BaseException):
    """A call cannot become a node. A ``BaseException``, so that a model's own ``except Exception`` does not hide it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.source = user_source()


class HiddenTensor(RecordError):
    """A tensor is used that no recorded call has made."""


class MustStayWhole(BaseException):
    """The Python of an opened module cannot be recorded; the trace starts again with the module whole."""

    def __init__(self, path: str, reason: str, source: str | None) -> None:
        super().__init__(path)
        self.path, self.reason, self.source = path, reason, source


class CallContext(NamedTuple):
    """The modes that a call was recorded under."""

    grad_enabled: bool
    device_type: str
    autocast_enabled: bool
    autocast_dtype: torch.dtype | None

    @classmethod
    def current(cls, device_type: str) -> CallContext:
        """The modes of this moment."""
        autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocast else None
        return cls(torch.is_grad_enabled(), device_type, autocast, dtype)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Runs the block under these modes."""
        with (
            torch.set_grad_enabled(self.grad_enabled),
            torch.autocast(self.device_type, enabled=self.autocast_enabled, dtype=self.autocast_dtype),
        ):
            yield


@dataclass(frozen=True, kw_only=True)
class RecorderSettings:
    """What a recorder must know of the module.

    Attributes:
        module_paths: Path of each module, by ``id``.
        tensor_fqns: FQN of each (fake) parameter and buffer, by ``id``.
        is_whole: Whether a module, given its path and itself, stays whole.
        device_type: Device whose autocast state is part of a node's context.
    """

    module_paths: Mapping[int, str]
    tensor_fqns: Mapping[int, str]
    is_whole: Callable[[str, nn.Module], bool]
    device_type: str


class Recorder(TorchFunctionMode):
    """The mode that writes the graph.

    Args:
        settings: What it must know of the module.
        region_path: Path of the module whose forward is recorded.
    """

    def __init__(self, settings: RecorderSettings, region_path: str = "") -> None:
        super().__init__()
        self.sides: dict[tuple[str, str], Tensor] = {}  # tensors left on modules: by path and attribute
        self.drawing: set[str] = set()  # whole modules in which a tensor is drawn that could be drawn ahead
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self._module_paths = settings.module_paths
        self._tensor_fqns = settings.tensor_fqns
        self._is_whole = settings.is_whole
        self._device_type = settings.device_type
        self._nodes: dict[int, fx.Node] = {}
        self._constant_names: dict[int, str] = {}
        self._alive: list[Any] = []  # a freed tensor's id would be given to another
        self._module_stack = [region_path]
        self._paused = False
        self._whole_path: str | None = None
        self._last_input: fx.Node | None = None
        self._ambient = CallContext.current(self._device_type)

    # ------------------------------------------------------------------ tensors to nodes and back

    def add_input(self, name: str, tensor: Tensor) -> fx.Node:
        """Makes a tensor one of the graph's inputs."""
        if self._last_input is not None:
            place: Any = self.graph.inserting_after(self._last_input)
        else:
            place = self.graph.inserting_before(next(iter(self.graph.nodes), None))
        with place:
            node = self._last_input = self.graph.placeholder(name)
        node.meta["module_path"] = ""
        self._bind_tensor(tensor, node)
        return node

    def argument(self, value: Any) -> Any:
        """``value`` as an fx argument: tensors replaced by nodes, containers rebuilt, sizes left symbolic."""
        if isinstance(value, Tensor):
            return self._tensor_argument(value)
        if isinstance(value, SYMBOLIC_TYPES):
            return as_size(value)
        if value is None or value is Ellipsis or isinstance(value, _PLAIN_TYPES):
            return value
        if isinstance(value, torch.Size):
            return tuple(self.argument(size) for size in value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            if not any(isinstance(leaf, (Tensor, *SYMBOLIC_TYPES)) for leaf in tree_leaves(value)):
                return value
            node = self.graph.call_function(type(value), tuple(self.argument(item) for item in value))
            node.meta.update(module_path=self._current_path, source=user_source())
            return node
        if isinstance(value, (tuple, list)):
            return type(value)([self.argument(item) for item in value])
        if isinstance(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        if type(value) is dict or type(value).__name__ == "OrderedDict":
            return {key: self.argument(item) for key, item in value.items()}
        if isinstance(value, torch.Generator):
            return value
        if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a numpy scalar
            return value.item()
        raise RecordError(f"an argument of type {type(value).__name__} cannot be part of the graph")

    def _tensor_argument(self, tensor: Tensor) -> fx.Node:
        node = self._nodes.get(id(tensor))
        if node is not None:
            return node
        fqn = self._tensor_fqns.get(id(tensor))
        if fqn is None:
            if isinstance(tensor, FakeTensor):
                raise HiddenTensor("a tensor computed out of the recorder's sight is used, such as a cached value")
            fqn = self._constant_names.setdefault(id(tensor), f"{CONSTANT_PREFIX}{len(self._constant_names)}")
            self.constants[fqn] = tensor
            self._alive.append(tensor)
        # One node for each use: a parameter that two stages use is then simply two nodes.
        node = self.graph.get_attr(fqn)
        node.meta.update(val=tensor, module_path=self._current_path)
        return node

    def _bind_tensor(self, tensor: Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        # An alias, because a later in-place call may change the tensor's own shape and requires_grad.
        with self.paused():
            node.meta["val"] = tensor.detach().requires_grad_(tensor.requires_grad)

    def _bind_output(self, value: Any, node: fx.Node) -> None:
        """Gives every tensor inside a call's result a node."""
        if isinstance(value, Tensor):
            self._bind_tensor(value, node)
            return
        items: list[tuple[Callable[..., Any], Any, Any]] = []  # (getter, key, item)
        if isinstance(value, (tuple, list)):
            items = [(operator.getitem, index, item) for index, item in enumerate(value)]
        elif isinstance(value, Mapping):
            items = [(operator.getitem, key, item) for key, item in value.items()]
        elif is_dataclass(value):
            items = [(getattr, field.name, getattr(value, field.name)) for field in fields(value)]
        elif value is not None and not isinstance(value, (*_PLAIN_TYPES, *SYMBOLIC_TYPES)):
            raise RecordError(f"{node.target} returns a {type(value).__name__}, which cannot be looked into")
        for getter, key, item in items:
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(item)) or is_dataclass(item):
                child = self.graph.call_function(getter, (node, key))
                child.meta.update(module_path=node.meta["module_path"], source=node.meta.get("source"), part_of=node)
                self._bind_output(item, child)

    # ------------------------------------------------------------------ torch calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or is_query(func):
            if self._whole_path is not None and func in DRAWN_AHEAD:
                self.drawing.add(self._whole_path)
            return shaped(func, args)(*args, **kwargs)
        return self._record_function(func, args, kwargs)

    def _record_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operation, target, extra = _target_of(func)
        ahead: tuple[fx.Node, ...] = ()
        touched = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        with self.paused(), _watch_mutation(touched) as mutated:
            result = shaped(func, args)(*args, **kwargs)
        if func in _NORMALISATIONS:
            statistics = (*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var"))
            mutated.update(storage_key(tensor) for tensor in statistics if isinstance(tensor, Tensor))
        leaves = tree_leaves(result)
        if not mutated and not any(isinstance(leaf, Tensor) for leaf in leaves):
            if any(isinstance(leaf, SYMBOLIC_TYPES) and depends_on_data(leaf) for leaf in leaves):
                raise RecordError(f"{target} takes a number out of a tensor")
            known = (*_PLAIN_TYPES, *SYMBOLIC_TYPES)
            if touched and (not leaves or not all(isinstance(leaf, known) for leaf in leaves)):
                raise RecordError(f"{target} has an effect that a graph cannot hold")
            return result
        if func in DRAWN_AHEAD and isinstance(result, Tensor) and "out" not in kwargs:
            target, ahead = drawn_now_or_ahead(func), (self._add_draw(func, args, kwargs, result),)
        node_args = (*ahead, *(self.argument(arg) for arg in args), *extra)
        node_kwargs = {key: self.argument(value) for key, value in kwargs.items()}
        self._append(operation, target, node_args, node_kwargs, self._current_path, mutated, result)
        for tensor in self._alive if mutated else ():
            # Written into without a result of its own, as by `t[i] = x`: the same node, which now has a gradient.
            node = self._nodes.get(id(tensor))
            if node is not None and tensor.requires_grad and storage_key(tensor) in mutated:
                node.meta["val"].requires_grad_(True)
        return result

    def _add_draw(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> fx.Node:
        """An input for a tensor that may be drawn before the region runs, see :mod:`lightning_fxpipe.randomness`."""
        with self.paused():
            node = self.add_input(f"{DRAW_PREFIX}{len(self._alive)}", torch.empty_like(result))
        node.meta["draw"] = Draw(function=func, args=_without_data(args), kwargs=_without_data(kwargs))
        return node

    def _append(
        self,
        operation: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        path: str,
        mutated: set[int],
        result: Any,
    ) -> fx.Node:
        node = self.graph.create_node(operation, target, args, kwargs)
        node.meta.update(module_path=path, source=user_source(), mutated_storages=mutated)
        context = CallContext.current(self._device_type)
        if context != self._ambient:
            # Kept with the node rather than as enter/exit nodes, so that no cut can fall inside a no_grad block.
            node.meta["context"] = context
        self._bind_output(result, node)
        return node

    # ------------------------------------------------------------------ module calls

    def call_module(self, original_call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls a module: recorded as one node, or inside a node for each of its calls."""
        path = self._module_paths.get(id(module))
        if self._paused or path is None:
            return original_call(module, *args, **kwargs)
        if self._is_whole(path, module):
            return self._record_whole_module(original_call, path, module, args, kwargs)
        self._module_stack.append(path)
        before, attributes = python_rng(), Attributes(module)
        try:
            result = original_call(module, *args, **kwargs)
            if before != python_rng():
                raise RecordError("its Python draws random numbers")
            left = assigned_tensors({path: attributes}) if self._may_leave_tensors() else {}
            others = set(attributes.changed()) - {name for _, name in left}
            if others:
                raise RecordError(f"its forward assigns self.{sorted(others)[0]}")
            self.sides.update(left)
            return result
        except RecordError as error:
            raise MustStayWhole(path, error.reason, error.source) from error
        except Exception as error:
            raise MustStayWhole(path, f"{type(error).__name__}: {_first_line(error)}", raising_source(error)) from error
        finally:
            self._module_stack.pop()

    def _may_leave_tensors(self) -> bool:
        """Whether the opened module that runs may set tensors on itself: where somebody sets them in every run."""
        return False

    def _record_whole_module(
        self, original_call: Callable[..., Any], path: str, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        node_args = tuple(self.argument(arg) for arg in args)
        node_kwargs = {key: self.argument(value) for key, value in kwargs.items()}
        touched = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        own = [*module.parameters(), *module.buffers()]
        # What it draws is its own affair; what opened code draws would decide what is recorded.
        self._whole_path = path
        with self.paused(), isolated_rng(), _watch_mutation([*touched, *own]) as mutated:
            result, sides = self._result_without_data(original_call, path, module, args, kwargs)
        self._whole_path = None
        mutated |= _running_statistics(module)
        returned = (result, tuple(sides.values())) if sides else result
        node = self._append("call_module", path, node_args, node_kwargs, path, mutated, returned)
        if sides:
            node.meta["sides"] = tuple(sides)
            self.sides.update({(f"{path}.{inner}".strip("."), name): side for (inner, name), side in sides.items()})
        node.meta["module_storages"] = frozenset(storage_key(tensor) for tensor in own)
        return result

    @staticmethod
    def _result_without_data(
        original_call: Callable[..., Any], path: str, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, dict[tuple[str, str], Tensor]]:
        """Runs a whole module on fakes or, where it looks at values, on made-up data.

        Returns what it returns and the tensors that it leaves on itself and its submodules, by relative path and attribute.
        """

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            before = {inner: Attributes(child) for inner, child in module.named_modules()}
            return original_call(module, *args, **kwargs), assigned_tensors(before)

        try:
            result: tuple[Any, dict[tuple[str, str], Tensor]] = call(module, *args, **kwargs)
            return result
        except Exception as error:
            try:
                result = probe_result(call, module, args, kwargs)
                for (inner, name), tensor in result[1].items():
                    setattr(module.get_submodule(inner), name, tensor)
                return result
            except ProbeFailed as failure:
                reason = f"{type(error).__name__}: {_first_line(error)}"
                raise RecordError(f"{path} cannot run without data ({reason}), nor {failure}") from error

    # ------------------------------------------------------------------ state

    @property
    def _current_path(self) -> str:
        return self._module_stack[-1]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Records nothing during the block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


def _without_data(value: Any) -> Any:
    """Arguments of a draw: sizes stay symbolic, of tensors the shape, dtype and device are kept."""

    def described(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return LikeTensor(shape=tuple(as_size(size) for size in leaf.shape), dtype=leaf.dtype, device=leaf.device)
        return as_size(leaf) if isinstance(leaf, SYMBOLIC_TYPES) else leaf

    return tree_map(described, tuple(value) if isinstance(value, torch.Size) else value)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Runs the block under ``recorder``."""
    original_len = builtins.len

    def length(value: Any) -> Any:
        # ``len(tensor)`` must be an int, which would fix the batch size for good.
        return value.shape[0] if isinstance(value, FakeTensor) else original_len(value)

    with patched_attributes((builtins, "len", length)), calls_through(recorder):
        yield


@contextmanager
def _watch_mutation(tensors: list[Tensor]) -> Iterator[Any]:
    """Yields a set that holds, after the block, the storages that the block changed in place."""
    before = [(tensor, version_of(tensor)) for tensor in tensors if isinstance(tensor, FakeTensor)]
    mutated: set[int] = set()
    yield mutated
    mutated.update(storage_key(tensor) for tensor, version in before if version_of(tensor) != version)


def _running_statistics(module: nn.Module) -> set[int]:
    """Storages that the module's normalisation layers change; see :data:`_NORMALISATIONS`."""
    layers = [child for child in module.modules() if child.training]
    tensors = [getattr(layer, name, None) for layer in layers for name in ("running_mean", "running_var")]
    return {storage_key(tensor) for tensor in tensors if isinstance(tensor, Tensor)}


def _target_of(func: Callable[..., Any]) -> tuple[str, Any, tuple[Any, ...]]:
    """fx operation, target and extra arguments of a torch function."""
    name = getattr(func, "__name__", None)
    if name == "__get__":
        return "call_function", getattr, (func.__self__.__name__,)  # type: ignore[attr-defined]
    if name == "__set__":
        raise RecordError(f"assigning to Tensor.{func.__self__.__name__} cannot be recorded")  # type: ignore[attr-defined]
    if name is not None and getattr(torch.Tensor, name, None) is func:
        return "call_method", name, ()
    return "call_function", func, ()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]
