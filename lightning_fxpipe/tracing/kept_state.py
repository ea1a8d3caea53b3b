"""State that a module which stays whole keeps from one of its calls for a later one in the same step.

A reversible normalisation keeps the statistics of its first call and uses them in its second. Each call is one node of the
graph, and a cut may fall between them. So reads and writes of attributes are watched, call by call:

1. A tensor that follows from inputs or weights, and that a call reads before it sets it, is one more operand of that call
   (:data:`KEPT`). The stage sets the attribute before it makes the call.
2. Of anything else that one call sets and another one reads (a number, a flag, a buffer, an entry of a container), another
   stage has its own. Such calls share a stage: each changes memory that is no tensor's, for the reason in ``meta["keeps"]``.
3. What the later call would set to the same by itself, such as the length of a table of positions, each stage may set.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from torch import Tensor, fx, nn

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe._compat.torch import FakeTensor, modules_inside, storage_key, symbolic_expression, tree_leaves, version_of
from lightning_fxpipe.tracing.graph_writer import GraphWriter
from lightning_fxpipe.tracing.guards import TORCHS_OWN
from lightning_fxpipe.tracing.made_tensors import MadeTensors
from lightning_fxpipe.user_code.contents import ABSENT
from lightning_fxpipe.user_code.frames import user_source
from lightning_fxpipe.user_code.kinds import kinds_of
from lightning_fxpipe.user_code.objects import PLAIN_TYPES
from lightning_fxpipe.user_code.step_code import attribute_uses

# Keyword of a module's call in the graph: tensors, by the dotted names of the attributes that are set to them before the call.
KEPT = "_fxpipe_kept"
_MAX_DEPTH = 4

_Key = tuple[int, str]  # identity of a module, name of its attribute


@dataclass(eq=False)
class Call:
    """Reads and writes of one call of a whole module.

    Attributes:
        path: Path of the module.
        modules: The modules inside, by identity.
        paths: Their paths from there.
        before: Their attributes and buffers when it begins.
        reads: Values where the call reads before it writes.
        contents: What was in the containers and tensors among them.
        writes: Where it writes, with the line.
        arguments: What the modules inside were first called with, by identity.
    """

    path: str
    modules: Mapping[int, nn.Module]
    paths: Mapping[int, str]
    before: Mapping[int, Mapping[str, Any]]
    reads: dict[_Key, Any] = field(default_factory=dict)
    contents: dict[_Key, _Contents] = field(default_factory=dict)
    writes: dict[_Key, str | None] = field(default_factory=dict)
    arguments: dict[int, Any] = field(default_factory=dict)
    node: fx.Node | None = None

    def name(self, key: _Key) -> str:
        """Dotted name of an attribute, from the called module."""
        return f"{self.paths[key[0]]}.{key[1]}".lstrip(".")


class KeptState:
    """The calls of whole modules in one recording.

    Args:
        writer: Writes the graph.
        made: The tensors that whole modules have made of inputs or weights.
        when_written: Called when a whole module, or one inside it, sets an attribute.
    """

    def __init__(self, writer: GraphWriter, made: MadeTensors, when_written: Callable[[], None]) -> None:
        self._writer, self._made, self._when_written = writer, made, when_written
        self._writers: dict[_Key, list[Call]] = defaultdict(list)
        self._first_readers: dict[_Key, list[Call]] = defaultdict(list)  # of values from before the recording
        self._harmless: set[_Key] = set()  # read where another call has written, which sets the same
        self._call: Call | None = None
        self._is_watching = False

    @contextmanager
    def of(self, path: str, module: nn.Module) -> Iterator[Call]:
        """The block calls a whole module."""
        inside = modules_inside(module)
        self._call = Call(
            path,
            modules={id(child): child for child in inside.values()},
            paths={id(child): name for name, child in reversed(inside.items())},
            before={id(child): vars(child)["_buffers"] | vars(child) for child in inside.values()},
        )
        try:
            yield self._call
        finally:
            self._call = None

    def watched(self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Makes the module's call. Not watched is what stands around it, such as an exchange of the module's tensors."""
        found = self._call
        if found is None:
            return call(module, *args, **kwargs)
        self.note_arguments(module, args, kwargs)
        self._is_watching = True
        try:
            return call(module, *args, **kwargs)
        finally:
            self._is_watching = False
            for key, contents in found.contents.items():
                if not contents.are_current():
                    found.writes.setdefault(key, None)

    def note_arguments(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The whole module, or one inside it, is called."""
        if self._call is not None:
            self._call.arguments.setdefault(id(module), _kinds_of((args, kwargs)))

    def note_read(self, module: nn.Module, name: str) -> None:
        """Code reads an attribute of a module."""
        call, key = self._call, (id(module), name)
        if call is None or not self._is_watching or key[0] not in call.paths or key in call.reads or key in call.writes:
            return
        if name in TORCHS_OWN:
            return
        value = call.reads[key] = call.before[key[0]].get(name)  # None for what it has from its class
        if not isinstance(value, (*PLAIN_TYPES, type(None))):
            call.contents[key] = _Contents(value)

    def note_write(self, module: nn.Module, name: str) -> None:
        """Code sets an attribute of a module."""
        call, key = self._call, (id(module), name)
        if call is not None and self._is_watching and name not in TORCHS_OWN and name not in vars(module)["_parameters"]:
            call.writes.setdefault(key, user_source())
            self._when_written()

    def permits_answer(self, modules: Mapping[str, nn.Module], read: Iterable[tuple[str, str]]) -> bool:
        """True if a call need not be made that reads these attributes of ``modules``, and is known to set none."""
        keys = {(id(modules[path]), name) for path, name in read}
        return not any(self._writers.get(key) for key in keys - self._harmless)

    def note_answered(self, modules: Mapping[str, nn.Module], read: Iterable[tuple[str, str]]) -> None:
        """Such a call is not made."""
        before, self._is_watching = self._is_watching, True
        for path, name in read:
            self.note_read(modules[path], name)
        self._is_watching = before

    def brings(self, tensor: Tensor) -> bool:
        """True if the call that runs has read a tensor that its node gets as an operand."""
        return self._call is not None and any(tensor is value for value in self.operands(self._call).values())

    def keywords(self, call: Call) -> dict[str, Any]:
        """Keyword arguments that a call's node has besides those that the code gives."""
        operands = self.operands(call)
        return {KEPT: operands} if operands else {}

    def operands(self, call: Call) -> dict[str, Tensor]:
        """The tensors that a call reads and the graph has, by the dotted names of the attributes."""
        return {call.name(key): value for key, value in call.reads.items() if self._is_operand(call, key)}

    def _is_operand(self, call: Call, key: _Key) -> bool:
        value, module = call.reads[key], call.modules[key[0]]
        return isinstance(value, FakeTensor) and key[1] not in vars(module)["_buffers"] and self._travels(value)

    def _travels(self, tensor: Tensor) -> bool:
        """True for a tensor that the graph has, and that a whole module has not made of constants alone."""
        return self._writer.has_from_code(tensor) or (self._writer.has(tensor) and self._made.maker(tensor) is not None)

    def changed_operands(self, call: Call) -> set[int]:
        """Storages of those of a call's operands that it changes in place."""
        return {storage_key(call.reads[key]) for key in call.contents if self._is_operand(call, key) and key in call.writes}

    def add(self, call: Call, node: fx.Node) -> None:
        """Takes note of a call's node, and binds it to those of earlier calls that it must share a stage with."""
        call.node = node
        for key in call.reads:
            writers = self._writers[key]
            if not writers:
                self._first_readers[key].append(call)
            elif self._is_operand(call, key):
                continue
            elif self._sets_the_same(key, writers, call):
                self._harmless.add(key)
            else:
                _share_stage(key, writers[-1], call)
        for key in call.writes:
            for reader in self._first_readers[key]:
                if reader is not call:  # in the next step it reads what this call has set
                    _share_stage(key, call, reader)
            self._writers[key].append(call)
            self._harmless.discard(key)

    def _sets_the_same(self, key: _Key, writers: list[Call], call: Call) -> bool:
        """True for a cache: filled once, by a call that looked first, and with nothing that other arguments would change."""
        first = writers[0]
        written = [other for other in first.writes if other[0] == key[0]]
        own = [vars(call.modules[key[0]]).get(name) for _, name in written]
        return (
            len(writers) == 1
            and any(other in first.reads for other in written)
            and first.arguments.get(key[0]) == call.arguments.get(key[0])
            and not any(self._travels(leaf) for leaf in tree_leaves(own) if isinstance(leaf, FakeTensor))
        )


class _Contents:
    """Contents of an object, to detect changes."""

    def __init__(self, value: Any) -> None:
        self._taken: list[tuple[Any, Any, Any]] = []
        self._tensors: list[tuple[Tensor, int]] = []
        with unwatched_torch():
            self._take(value, _MAX_DEPTH)

    def _take(self, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            if not value.is_inference():
                self._tensors.append((value, version_of(value)))
        elif depth and not isinstance(value, (nn.Module, FunctionType, type, *PLAIN_TYPES)):
            for kind in kinds_of(value):
                contents = kind.take(value)
                if contents is not ABSENT:
                    self._taken.append((value, kind, contents))
                    for _, entry in kind.entries(contents):
                        self._take(entry, depth - 1)

    def are_current(self) -> bool:
        """True if nothing has changed."""
        with unwatched_torch():
            same = all(kind.is_still(owner, contents) for owner, kind, contents in self._taken)
            return same and all(version_of(tensor) == version for tensor, version in self._tensors)


def _share_stage(key: _Key, writer: Call, other: Call) -> None:
    """Makes two calls change the same memory, which is none of a tensor, so that no cut falls between them."""
    owner = writer if key[0] in writer.paths else other
    name, line = f"{owner.path}.{owner.name(key)}".lstrip("."), writer.writes[key]
    uses = attribute_uses(type(owner.modules[key[0]]), key[1]) or (line and f"set at {line}")
    why = f"a call of {writer.path or 'the module'} sets {name} for another call" + (f", {uses}" if uses else "")
    memory = -1 - key[0]
    for call in (writer, other):
        assert call.node is not None
        call.node.meta["mutated_storages"].add(memory)
        call.node.meta["module_storages"] |= {memory}
        call.node.meta.setdefault("keeps", {})[memory] = why


def _kinds_of(value: Any) -> list[Any]:
    def kind(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return tuple(map(symbolic_expression, leaf.shape)), leaf.dtype
        return leaf if isinstance(leaf, (*PLAIN_TYPES, type(None))) else type(leaf)

    return [kind(leaf) for leaf in tree_leaves(value)]


def set_kept(module: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Sets attributes of a module and those inside it, by their dotted names."""
    for name, tensor in kept.items():
        path, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(path), attribute, tensor)
