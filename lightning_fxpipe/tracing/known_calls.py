"""Calls of modules that a recording need not run: those of a module like another one, which it has run.

A model repeats its blocks. A module that stays whole runs on tensors without data only to show what its result is like, and
a second block shows the same as the first. So one call is watched, and those after it are answered from what was seen.

What was seen is good for another module where that has the same classes, tensors of the same sizes and kinds and the same
children, no hooks, and the same value in every attribute whose name the watched call has read, of whatever module. It is good
for arguments that are the same but for the values in their tensors. And it is kept only of a call that has changed nothing:
no argument, tensor, attribute, list, global variable (``user_code.snapshot``) nor random state, and that has returned
arguments and new tensors. All else runs: nothing is taken to be equal because its class and sizes are. What lies outside of the
modules and that all of them read, such as a configuration, is taken to stay as it is while one recording is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.fake_calls import Likeness, Made, Unlike
from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe._compat.torch import FakeTensor, has_hooks, modules_inside, storage_key, tree_leaves, tree_map, version_of
from lightning_fxpipe.rng import python_rng
from lightning_fxpipe.tracing.gradient_flow import reached_by_gradients
from lightning_fxpipe.tracing.guards import TORCHS_OWN
from lightning_fxpipe.tracing.torch_calls import CallContext
from lightning_fxpipe.user_code.kinds import is_users
from lightning_fxpipe.user_code.snapshot import Snapshot

_ABSENT = object()
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.SymInt})
# The list of their weights is exchanged with the weights; the code of a ScriptModule reads its attributes unseen.
_UNSEEN = (nn.RNNBase, torch.jit.ScriptModule)


@dataclass(frozen=True)
class _Itself:
    """An object that is no plain value."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True)
class _New:
    """A tensor in a result that the call has made."""

    made: Made
    requires_grad: bool


@dataclass(frozen=True)
class _Argument:
    """A tensor in a result that is one of the arguments'."""

    index: int


@dataclass(frozen=True)
class Known:
    """Observations of one call of a module.

    Attributes:
        names: Of the attributes that it has read, of whatever modules.
        values: What they were, by the path of the module from the called one, and by name.
        result: What it has returned, with a :class:`_New` or :class:`_Argument` for each tensor.
        called: Paths, from the called module, of those that it has called, one for each call.
        draws: Whether a tensor is drawn in it that could be drawn ahead.
        trained: Which tensors get gradients, those of the arguments and of the module in one sequence.
    """

    names: frozenset[str]
    values: Mapping[tuple[str, str], Any]
    result: Any
    called: tuple[str, ...]
    draws: bool
    trained: tuple[int, ...]

    def is_of(self, modules: Mapping[str, nn.Module]) -> bool:
        """True if other modules, by their paths, have the same in the attributes that were read."""
        if "__dict__" in self.names:
            here = {(path, name) for path, module in modules.items() for name in vars(module).keys() - TORCHS_OWN}
            if not here <= self.values.keys():
                return False
        return all(
            found == value if (found := vars(modules[path]).get(name, _ABSENT)) is _ABSENT else _comparable(found) == value
            for (path, name), value in self.values.items()
        )


@dataclass(frozen=True)
class Question:
    """A call of a module that has yet to be made, or answered.

    Attributes:
        module: The module.
        args, kwargs: What it is called with.
        modules: It and those inside it, by their paths from there.
        key: All that makes calls of modules different but for what they read from modules.
        tensors: The tensors among the arguments.
        own: Those of the module.
        answer: What is known of such a call, if something is.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    modules: Mapping[str, nn.Module]
    key: tuple[Any, ...]
    tensors: Sequence[FakeTensor]
    own: Sequence[FakeTensor]
    answer: Known | None


@dataclass
class _Watch:
    """Watches a call while it is made: the modules that it calls, whether it draws what could be drawn ahead, and whether it
    sets an attribute, be it to the same.
    """

    called: list[nn.Module] = field(default_factory=list)
    draws: bool = False
    writes: bool = False


class KnownCalls:
    """Observations of the calls of whole modules in one recording.

    Args:
        device_type: Device whose autocast state matters.

    Attributes:
        names_read: Names of attributes that code has read from modules; whoever reads one adds to it (``guards.noted_guards``).
    """

    def __init__(self, device_type: str) -> None:
        self.names_read: set[str] = set()
        self._device_type = device_type
        self._known: dict[tuple[Any, ...], list[Known]] = {}
        self._met: set[tuple[Any, ...]] = set()
        self._vain: set[tuple[Any, ...]] = set()  # kinds of calls that have changed something
        self._likeness: Likeness | None = None
        self._watch: _Watch | None = None

    def ask(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Question | None:
        """Returns observations of a call; None where it can only be made."""
        with unwatched_torch():
            modes = CallContext.current(self._device_type), torch.get_default_dtype(), torch.is_inference_mode_enabled()
            parts, tensors, own = list[Any](modes), list[FakeTensor](), list[FakeTensor]()
            try:
                likeness = self._likeness_for(args, kwargs)
                likeness.describe((args, dict(kwargs)), parts, tensors)
                modules = modules_inside(module)
                if any(isinstance(child, _UNSEEN) or has_hooks(child) for child in modules.values()):
                    return None
                for path, child in modules.items():
                    _describe_module(path, child, likeness, parts, own)
            except Unlike:
                return None
            if not all(map(likeness.is_bare, tensors)):
                return None
            parts += _sharing((*tensors, *own))
            key = tuple(parts)
            known = next((known for known in self._known.get(key, ()) if known.is_of(modules)), None)
            return Question(module, args, kwargs, modules, key, tensors, own, known)

    def _likeness_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Likeness:
        if self._likeness is None:
            fakes = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, FakeTensor)]
            if not fakes:
                raise Unlike
            self._likeness = Likeness(fakes[0].fake_mode)
        return self._likeness

    def answered(self, question: Question, known: Known) -> Any:
        """Returns the result of a call of which something is known. Nothing runs."""
        if self._watch is not None:
            self._watch.called += [question.modules[path] for path in known.called]
            self._watch.draws |= known.draws
            self.names_read |= known.names
        assert self._likeness is not None
        new = [leaf for leaf in tree_leaves(known.result) if isinstance(leaf, _New)]
        tensors = (*question.tensors, *question.own)
        sources = [tensors[index] for index in known.trained]
        copies = iter(_Copies.apply(self._likeness, new, *sources) if new else ())  # type: ignore[no-untyped-call]

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, _Argument):
                return question.tensors[leaf.index]
            return next(copies) if isinstance(leaf, _New) else leaf

        return tree_map(filled, known.result)

    def made(self, question: Question | None, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Makes a call of which nothing is known, and returns what it returns.

        What it shows is remembered from the second call of its kind on, as to watch one takes longer than to make it. Within a
        call that is watched no other is.
        """
        if question is None or self._watch is not None or not self._is_to_watch(question.key):
            return call(module, *args, **kwargs)
        before = _State.of(question)
        self._watch = _Watch()
        self.names_read.clear()
        try:
            result = call(module, *args, **kwargs)
            if not self._learn(question, before, result):
                self._vain.add(question.key)
            return result
        finally:
            self._watch = None

    def _is_to_watch(self, key: tuple[Any, ...]) -> bool:
        is_met = key in self._met
        self._met.add(key)
        return is_met and key not in self._vain

    def note_call(self, module: nn.Module) -> None:
        """A module is called inside a whole one."""
        if self._watch is not None:
            self._watch.called.append(module)

    def note_draw(self) -> None:
        """A tensor is drawn inside a whole module that could be drawn ahead."""
        if self._watch is not None:
            self._watch.draws = True

    def note_write(self) -> None:
        """A module sets an attribute."""
        if self._watch is not None:
            self._watch.writes = True

    def _learn(self, question: Question, before: _State, result: Any) -> bool:
        """Remembers a call; returns whether another one may be like it."""
        watch, names = self._watch, frozenset(self.names_read)
        assert watch is not None
        paths = {id(child): path for path, child in question.modules.items()}
        if watch.writes or not before.is_current(question) or any(id(module) not in paths for module in watch.called):
            return False
        after = self.ask(question.module, question.args, question.kwargs)
        if after is None or after.key != question.key or any(map(is_not, after.tensors, question.tensors)):
            return False
        with unwatched_torch():
            try:
                described = self._described(result, question)
                tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
                trained = tuple(reached_by_gradients(tensors, (*question.tensors, *question.own)))
            except Unlike:
                return False
        known = Known(
            names=names,
            values=before.values_of(names),
            result=described,
            called=tuple(paths[id(module)] for module in watch.called),
            draws=watch.draws,
            trained=trained,
        )
        self._known.setdefault(question.key, []).append(known)
        return True

    def _described(self, result: Any, question: Question) -> Any:
        """A result with what is known of them in place of its tensors.

        Raises:
            Unlike: Another call's could not be told from that.
        """
        assert self._likeness is not None
        likeness, arguments = self._likeness, (*question.tensors, *question.own)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if len({*map(storage_key, tensors)}) < len(tensors) or not all(map(likeness.is_bare, tensors)):
            raise Unlike
        can_train = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in arguments)

        def described(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                if type(leaf) not in _PLAIN:
                    raise Unlike
                return leaf
            places = [index for index, argument in enumerate(question.tensors) if argument is leaf]
            if places:
                return _Argument(places[0])
            (made,) = likeness.made((leaf.detach(),), arguments)
            if isinstance(made, int) or made.base is not None or (leaf.requires_grad and not can_train):
                raise Unlike
            return _New(made, leaf.requires_grad)

        return tree_map(described, result)


@dataclass(frozen=True)
class _State:
    """State that a call may change, before it is made.

    Attributes:
        versions: How often each tensor has been written into.
        generators: Of Python and numpy.
        reached: What the module's code reaches; None where all of it is torch's.
        attributes: Of each module, by its path.
    """

    versions: Sequence[int]
    generators: Any
    reached: Snapshot | None
    attributes: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, question: Question) -> _State:
        """Its present state."""
        with unwatched_torch():
            modules = question.modules.items()
            has_users = any(is_users(type(child)) for _, child in modules)
            return cls(
                versions=[*map(version_of, (*question.tensors, *question.own))],
                generators=python_rng(),
                reached=Snapshot({"self": question.module}) if has_users else None,
                attributes={path: {name: _comparable(value) for name, value in vars(child).items()} for path, child in modules},
            )

    def is_current(self, question: Question) -> bool:
        """True if it is still the same."""
        with unwatched_torch():
            is_same = self.reached is None or self.reached.is_current()
            versions = [*map(version_of, (*question.tensors, *question.own))]
            return is_same and self.generators == python_rng() and self.versions == versions

    def values_of(self, names: Collection[str]) -> dict[tuple[str, str], Any]:
        """Former values of those attributes, by path and name, whose names have been read."""
        if "__dict__" in names:
            names = {*names, *chain.from_iterable(self.attributes.values())}
        own = {*names} - TORCHS_OWN
        return {(path, name): found.get(name, _ABSENT) for path, found in self.attributes.items() for name in own}


class _Copies(torch.autograd.Function):
    """New tensors that hang on the call's, as those that it makes."""

    @staticmethod
    def forward(ctx: Any, likeness: Likeness, new: Sequence[_New], *sources: Tensor) -> tuple[Tensor, ...]:
        """Copies of what a call has returned before."""
        copies = tuple(likeness.copy(each.made, ()) for each in new)
        ctx.mark_non_differentiable(*(copy for copy, each in zip(copies, new, strict=True) if not each.requires_grad))
        return copies


def _describe_module(path: str, module: nn.Module, likeness: Likeness, parts: list[Any], tensors: list[FakeTensor]) -> None:
    """Adds what a module is by itself, but for its attributes. Raises :class:`Unlike`."""
    own = vars(module)
    parts += (path, type(module), module.training, tuple(name for name, child in own["_modules"].items() if child is None))
    for kind in ("_parameters", "_buffers"):
        for name, tensor in own[kind].items():
            parts += (kind, name, type(tensor), isinstance(tensor, nn.Parameter))
            likeness.describe((tensor,), parts, tensors)


def _sharing(tensors: Iterable[Tensor]) -> Iterator[int]:
    """For each tensor the first one that it shares memory with."""
    first: dict[int, int] = {}
    return (first.setdefault(storage_key(tensor), index) for index, tensor in enumerate(tensors))


def _comparable(value: Any) -> Any:
    """Equal for values that read the same: plain ones, and containers of such; others are equal to themselves."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in (list, tuple):
        return kind, tuple(map(_comparable, value))
    if kind is dict:
        return kind, tuple((_comparable(key), _comparable(entry)) for key, entry in value.items())
    return _Itself(value)


def _forget(result: Any) -> None:
    """Discards a result."""
