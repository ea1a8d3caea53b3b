"""Finds code that depends on values that other modules leave for it in an object that both can reach.

Blocks may count in a dict that all of them have, one sets a flag on a configuration that another one reads, or the code around
them stores there which of them comes next. Another stage has a copy of the object, which does not change. So:

1. While whole modules run, user state is compared with what it was when the region began. An :class:`Exchange` is a place that
   has something else when code begins that can reach it, and that this code has not changed by itself.
2. If there are exchanges, the region is recorded again, and the torch calls of each module are noted (``TOGETHER``). Then each
   module finds, in these places, only what it has left there itself (``ALONE``): in its stage it would find that. What it does
   on its first call only, such as to fill a cache, it has done in the recording after that (``ALONE_AGAIN``).
3. Then numbers, flags and texts in these places are others (``OTHER_VALUES``): a threshold may be reached later. Where a second
   run leaves what is there, others may still come: whether anybody finds them (``OTHER_SETTLED``) is noted for
   ``runtime.late_exchanges``.
4. A module that makes other torch calls then depends on the exchange. The module around both stays whole, so that they share a
   stage; the model is refused where that would be all of it. Modules that make the same calls are left alone: no result follows
   from most counts, timers and flags.

Tensors are looked at here only where they follow neither from inputs nor from weights, such as a mask that one block leaves for
the others. For the rest see ``tracing.state_reads`` and ``tracing.tensors_in_place``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_fxpipe._compat.torch import SYMBOLIC_TYPES, modules_inside, tree_leaves
from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.tracing.exchanges import Exchange, Round, Trial
from lightning_fxpipe.tracing.first_call import place_value
from lightning_fxpipe.tracing.guards import TORCHS_OWN, GuardKey
from lightning_fxpipe.tracing.reachable import (
    AROUND,
    NEW,
    Readers,
    has_own_code,
    is_plain_value,
    is_same_value,
    names_on_the_way,
    place_of,
    reaches,
    written_place,
)
from lightning_fxpipe.tracing.recorder_settings import RecorderSettings
from lightning_fxpipe.tracing.signals import Lesson, MustStayWhole
from lightning_fxpipe.tracing.torch_calls import is_query, tensors_among
from lightning_fxpipe.tracing.views import Views
from lightning_fxpipe.user_code.contents import same_mapping
from lightning_fxpipe.user_code.paths import CONTENTS, Difference, Path
from lightning_fxpipe.user_code.snapshot import Snapshot, roots_of
from lightning_fxpipe.user_code.step_code import line_of_use, names_in_hooks

_HOOKS = "hooks, which run on every rank"


class SharedState:
    """Looks for exchanges in one recording, or tries those that an earlier one has found.

    Args:
        settings: What the recorder knows.
        lessons: Gets what else is to be known.
        follows: True for a tensor that follows from inputs or weights.
        begins_with_first_call: Whether every rank runs the recorded code up to its first call of a module.

    Attributes:
        is_trying: Whether this is a round of a trial, in which each module has to run.
    """

    def __init__(
        self,
        settings: RecorderSettings,
        lessons: list[Lesson],
        follows: Callable[[Tensor], bool],
        begins_with_first_call: bool,
    ) -> None:
        self._learned, self._modules, self._lessons = settings.learned, settings.modules, lessons
        self._roots = roots_of(settings.modules.get("", nn.Module()))[0]
        self._readers = Readers(self._roots)
        self._paths = {id(module): path for path, module in settings.modules.items()}
        self._changes = _Changes(settings, follows, begins_with_first_call)
        self._exchanges: dict[tuple[Path, str], Exchange] = {}
        self._has_own_code: dict[str, bool] = {}
        self._ran: dict[str, nn.Module] = {}  # whole modules with code that is not torch's own
        self._moved: set[Path] = set()
        self._used_in_hooks: frozenset[str] | None = None
        self._calls = _Calls(follows, settings)
        self._trial = self._learned.trial
        self.is_trying = self._trial is not None
        is_together = self._trial is None or self._trial.round is Round.TOGETHER
        self._views = None if is_together or self._trial is None else Views(self._roots, self._trial)
        for each in self._trial.left_by_all if self._trial is not None and is_together else ():
            put_back(self._roots, each)

    def note_inputs(self) -> None:
        """The recorded code begins, and symbols stand in the place of numbers that are inputs: these are no exchanges."""
        self._changes.note_inputs()

    @contextmanager
    def of(self, path: str, module: nn.Module) -> Iterator[None]:
        """The block runs a whole module, at this path."""
        self.note_begin(path, module)
        self._note_moved()
        with self._views.running(path) if self._views is not None else nullcontext(), self._calls.of(path):
            yield
            if self.is_trying:
                self._changes.put_back_lost(self._roots)
                self._note_moved()
            elif self._is_watched(path, module):
                self._changes.note(path)

    def note_begin(self, path: str, module: nn.Module) -> None:
        """A whole module is about to be called, or its call is answered without it."""
        if self.is_trying or not self._is_watched(path, module):
            return
        self._ran[path] = module
        self._add_readable(path, self._changes.note(AROUND))

    def _add_readable(self, path: str, found: Mapping[Path, Difference]) -> None:
        """Adds the differences that a module can reach, and has not made itself."""
        for place, difference in found.items():
            writers = self._changes.writers(place) - {path}
            key = place, path
            is_known = not writers or key in self._exchanges or key in self._learned.harmless
            if not is_known and self._readers.module_reaches(self._ran[path], place):
                self._exchanges[key] = Exchange(difference, frozenset(writers), path)

    def _note_moved(self) -> None:
        """Notes places which the region changes again, when they have what it leaves there."""
        if self._trial is not None and self._trial.round is Round.TOGETHER:
            now = self._changes.note(AROUND)
            self._moved |= {place_of(each) for each in self._trial.left_by_all if not _is_same(each, now.get(place_of(each)))}

    def noting(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Makes a call after which user state is put back, as it was made on made-up data; what it changes counts."""
        with self._calls.on_made_up_data():
            result = call(*args, **kwargs)
        if self._calls.running is not None:
            self._changes.note_lost(self._calls.running)
        return result

    def note(self, func: Any, arguments: tuple[Any, ...], result: Any = None) -> None:
        """A torch call is made, inside a whole module or by the code that is recorded."""
        if self.is_trying and not is_query(func):
            self._calls.note(func, arguments, result)

    def note_given(self, value: Any) -> None:
        """Code that is recorded returns or logs a value."""
        if self.is_trying:
            self._calls.note_given(value)

    def check(self, read: Collection[GuardKey], opened: Collection[str], function: Any, label: str) -> None:
        """Decides about exchanges. Where more must be seen, a lesson says so.

        Args:
            read: The attributes of modules that recorded code has read.
            opened: Paths of the modules whose code is recorded.
            function: What is recorded.
            label: Its name.

        Raises:
            MustStayWhole: Modules inside one depend on what others leave for them.
            FxPipeError: So do such as no opened module has inside it, or one sets an attribute of the LightningModule.
        """
        if self._trial is None:
            self._look_at_end(read, opened, function)
            for found in self._set_for_hooks():
                raise self._refusal(found, opened, label)
            self._learned.changed = frozenset(self._changes.all().keys() - self._learned.settled.keys())
            following = self._trial_of_exchanges() if self._exchanges else None
        else:
            following = self._after(self._trial, opened, label)
        if following is not None:
            self._lessons.append(partial(self._learned.try_exchanges, following))

    def _trial_of_exchanges(self) -> Trial:
        places = {place for place, _ in self._exchanges}
        at_end = [each for place, each in self._changes.note(AROUND).items() if place in places and is_plain_value(each.value)]
        return Trial(tuple(self._exchanges.values()), left_by_all=tuple(map(_without_symbols, at_end)))

    def _after(self, trial: Trial, opened: Collection[str], label: str) -> Trial | None:
        """Returns the next round, after one that is over; None after the last. Raises as :meth:`check`."""
        calls = self._calls.by_path
        readers = trial.again if trial.round is Round.ALONE_AGAIN else trial.finders
        order = [*trial.together, *readers]
        dependent = sorted((path for path in readers if calls.get(path) != trial.together.get(path)), key=order.index)
        if trial.round is Round.TOGETHER:
            self._note_moved()
            settled = frozenset(map(place_of, trial.left_by_all)) - self._moved
            return replace(trial, round=Round.ALONE, together=calls, settled=settled)
        if trial.round is Round.ALONE and dependent and self._views is not None:
            left = self._views.left_by(dependent)
            return replace(trial, round=Round.ALONE_AGAIN, again=frozenset(dependent), left=left)
        if trial.round is Round.OTHER_SETTLED:
            self._lessons.append(partial(self._learned.settle_exchanges, trial, trial.settled_for(dependent)))
            return None
        if dependent:
            raise self._refusal(next(each for each in trial.exchanges if each.reader == dependent[0]), opened, label)
        is_live = any(each.place not in trial.settled and each.is_plain for each in trial.exchanges)
        if trial.round is not Round.OTHER_VALUES and is_live:
            return replace(trial, round=Round.OTHER_VALUES)
        if trial.settled:
            return replace(trial, round=Round.OTHER_SETTLED)
        self._lessons.append(partial(self._learned.settle_exchanges, trial, {}))
        return None

    def _look_at_end(self, read: Collection[GuardKey], opened: Collection[str], function: Any) -> None:
        """Adds what modules have left when the region ends: one that was called before finds it in the next step."""
        found = self._changes.note(AROUND, with_large=True)
        found = {place: each for place, each in found.items() if self._changes.writers(place) - {AROUND}}
        for path in self._ran:
            self._add_readable(path, found)
        self._look_around(read, opened, function)

    def _look_around(self, read: Collection[GuardKey], opened: Collection[str], function: Any) -> None:
        """Adds what whole modules leave for the code that is recorded."""
        code: list[Snapshot] | None = None
        for place, difference in self._changes.all().items():
            owner, writers = self._readers.owner(place), self._changes.writers(place) - {AROUND}
            path = self._paths.get(id(owner)) if isinstance(owner, nn.Module) else None
            if path is not None:  # what a module sets on itself is a matter of `state_reads.check_values_read`
                writers = {writer for writer in writers if owner not in modules_inside(self._modules[writer]).values()}
            if owner is None or not writers or (place, AROUND) in self._learned.harmless:
                continue
            if path is None and code is None:
                code = self._readers.recorded_code(self._modules, read, opened, function)
            name = str(place[-1][1])
            if (path, name) in read if path is not None else any(reaches(each, owner, name) for each in code or ()):
                self._exchanges[place, AROUND] = Exchange(difference, frozenset(writers), AROUND)

    def _set_for_hooks(self) -> Iterator[Exchange]:
        """Values that whole modules set on the LightningModule, or in objects of it that its hooks use, on every rank."""
        root = self._modules.get("")
        for place, difference in self._changes.note(AROUND).items():
            writers = self._changes.writers(place) - {AROUND, ""} if is_plain_value(difference.value) else ()
            if writers and (self._readers.owner(place) is root or self._is_for_hooks(place)):
                yield Exchange(difference, frozenset(writers), _HOOKS)
        for place, (difference, writer) in self._changes.tensors.items():
            if writer not in (AROUND, "") and self._is_for_hooks(place):
                yield Exchange(difference, frozenset({writer}), _HOOKS)

    def _is_for_hooks(self, place: Path) -> bool:
        """True where hooks read each name on the way to a place. What modules keep themselves `runtime.left_state` sends."""
        if self._used_in_hooks is None:
            self._used_in_hooks = names_in_hooks(self._modules[""]) if "" in self._modules else frozenset()
        names = names_on_the_way(place)
        return bool(names) and all(name in self._used_in_hooks for name in names)

    def _is_watched(self, path: str, module: nn.Module) -> bool:
        """True for a module with code that is not torch's own: that changes nothing outside of its module."""
        if path not in self._has_own_code:
            self._has_own_code[path] = has_own_code(module)
        return self._has_own_code[path]

    def _refusal(self, found: Exchange, opened: Collection[str], label: str) -> BaseException:
        place = written_place(found.place)
        name = str(found.place[-1][1] if found.place[-1][0] not in (CONTENTS, NEW) else found.place[-2][1])
        changed = ", ".join(self._with_line(path, name) for path in sorted(found.writers))
        exchange = f"changed by {changed}; used by {self._with_line(found.reader, name)}"
        both = {*found.writers, found.reader}
        inside = [path for path in opened if path and all(each.startswith(f"{path}.") for each in both)]
        inside = [path for path in inside if not self._is_all(path)]
        refusal = FxPipeError(
            f"Modules exchange a value through a shared object: {place}.",
            where=label,
            observed=exchange,
            expected="arguments and results: another stage has a separate copy of the object, which does not change",
            todo="Store it as an attribute of the module that computes it: hooks find that on every rank."
            if found.reader == _HOOKS
            else "Return the value from the forward that computes it, and pass it to the other modules as an argument.",
        )
        if not inside:
            return refusal
        reason = f"its modules exchange a value through {place}: {exchange}"
        return MustStayWhole(max(inside, key=len), reason, None, refusal)

    def _is_all(self, path: str) -> bool:
        """True for a module that has all parameters of the modules that have run: there would be nothing left to cut."""
        ran = [self._modules[each] for each in self._calls.by_path if each in self._modules]
        return {p for module in ran for p in module.parameters()} <= {*self._modules[path].parameters()}

    def _with_line(self, path: str, name: str) -> str:
        module = self._modules.get(path)
        line = None if module is None else line_of_use(type(module), name)
        return f"{path} ({line})" if line else path


class _Changes:
    """Differences of user state from the region's beginning, and whose they are."""

    def __init__(self, settings: RecorderSettings, follows: Callable[[Tensor], bool], begins_with_first_call: bool) -> None:
        self._before, self._follows = settings.before, follows
        found = {} if settings.before is None else dict(settings.before.reached_from("self", "trainer.callbacks"))
        modules = {index: record.owner for index, record in found.items() if isinstance(record.owner, nn.Module)}
        # All modules have changed since, as their tensors have been exchanged for fakes.
        self._attributes = {index: (vars(module), {**vars(module)}) for index, module in modules.items()}
        self._others = [index for index, record in found.items() if index not in modules and not record.is_large]
        self._large = [index for index, record in found.items() if index not in modules and record.is_large]
        self._last: dict[Path, Difference] = {}
        self._writers: dict[Path, set[str]] = {}
        self._all: dict[Path, Difference] = {}
        self._lost: dict[Path, Difference] = {}
        self._had_tensors: set[Path] = set()  # such as a list that is empty again: `tracing.state_reads` has the tensors
        self.tensors: dict[Path, tuple[Difference, str]] = {}  # places that have got tensors, and the first writers
        self._has_begun = not begins_with_first_call
        self._at_begin: dict[Path, Difference] = {}

    def note(self, writer: str, *, with_large: bool = False) -> Mapping[Path, Difference]:
        """Returns the differences of now; ``writer`` has made those that are new since the last call.

        Args:
            writer: Path of a module, or :data:`AROUND`.
            with_large: Whether to compare large objects, too.
        """
        now = self._lost | self._differences(writer, with_large)
        now = {place: each for place, each in now.items() if place not in self._had_tensors}
        if not self._has_begun:  # every rank has run the code up to here
            self._has_begun, self._at_begin = True, now
        now = {place: each for place, each in now.items() if not _is_same(each, self._at_begin.get(place))}
        for place in now.keys() | self._last.keys():
            if not _is_same(now.get(place), self._last.get(place)):
                self._writers.setdefault(place, set()).add(writer)
        self._last = now
        self._all |= {place: each for place, each in now.items() if is_plain_value(each.value)}
        return now

    def note_inputs(self) -> None:
        """Symbols stand in the place of numbers that are inputs, as every rank reads them."""
        found = self._differences(AROUND, with_large=True)
        self._at_begin = {place: each for place, each in found.items() if isinstance(each.value, SYMBOLIC_TYPES)}

    def _differences(self, writer: str, with_large: bool) -> dict[Path, Difference]:
        if self._before is None:
            return {}
        changed = [index for index, (new, old) in self._attributes.items() if not same_mapping(new, old)]
        shared = [*self._before.differences([*self._others, *(self._large if with_large else ())])]
        found = [*shared, *self._before.differences(changed)]
        with_tensors = {place_of(each): each for each in found if not is_plain_value(each.value)}
        constants = {place_of(each): each for each in shared if self._is_made_of_constants(each.value)}
        self._had_tensors |= with_tensors.keys() - constants.keys()
        self.tensors |= {place: (each, writer) for place, each in with_tensors.items() if place not in self.tensors}
        return constants | {place_of(each): each for each in found if _is_plain(each)}

    def _is_made_of_constants(self, value: Any) -> bool:
        """True where none of the tensors in a value, and there are some, follows from inputs or weights."""
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, (Tensor, nn.Module))]
        return bool(leaves) and all(isinstance(leaf, Tensor) and not self._follows(leaf) for leaf in leaves)

    def note_lost(self, writer: str) -> None:
        """The changes since the last call are ``writer``'s, and will be put back."""
        known = dict(self._last)
        now = self.note(writer)
        new = {
            place: each for place, each in now.items() if not _is_same(each, known.get(place)) and is_plain_value(each.value)
        }
        self._lost |= {place: _without_symbols(each) for place, each in new.items()}

    def put_back_lost(self, roots: Mapping[str, Any]) -> None:
        """Makes the changes again that were put back."""
        for each in self._lost.values():
            put_back(roots, each)
        self._lost.clear()

    def writers(self, place: Path) -> set[str]:
        """Returns who has changed a place."""
        return self._writers.get(place, set())

    def all(self) -> Mapping[Path, Difference]:
        """Returns all differences that there were at any of the moments."""
        return self._all


class _Calls:
    """Torch calls in one recording, in words, by the whole module that makes them.

    Of tensors made of constants the words say how they were made: such a call counts where its result is used. Of buffers and
    other tensors that were there before they say which it is.
    """

    def __init__(self, follows: Callable[[Tensor], bool], settings: RecorderSettings) -> None:
        self.running: str | None = None
        self._follows = follows
        self._fqns, self._before = settings.tensor_fqns, settings.before
        self._by_path: dict[str, list[str]] = {}
        self._made: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    @property
    def by_path(self) -> Mapping[str, tuple[str, ...]]:
        """The calls in the order in which they were made."""
        return {path: tuple(calls) for path, calls in self._by_path.items()}

    @contextmanager
    def of(self, path: str) -> Iterator[None]:
        """The block runs a whole module."""
        self.running = path
        self._by_path.setdefault(path, [])
        try:
            yield
        finally:
            self.running = None

    @contextmanager
    def on_made_up_data(self) -> Iterator[None]:
        """All tensors of the block are taken to follow from inputs."""
        before, self._follows = self._follows, lambda tensor: True
        try:
            yield
        finally:
            self._follows = before

    def note(self, func: Any, arguments: tuple[Any, ...], result: Any) -> None:
        """A call is made."""
        tensors = list(tensors_among(arguments))
        operands = " ".join(map(self._word, tensors))
        words = f"{getattr(func, '__qualname__', type(func).__name__)}({operands} {_plain_leaves(arguments)})"
        if any(map(self._follows, tensors)):
            self._by_path.setdefault(self.running or AROUND, []).append(words)
        else:
            for made in tensors_among((result,)):
                self._made[id(made)] = weakref.ref(made), words

    def note_given(self, value: Any) -> None:
        """Recorded code returns or logs a value."""
        self._by_path.setdefault(AROUND, []).append(f"gives {_plain_leaves(value)}")

    def _word(self, tensor: Tensor) -> str:
        ref, words = self._made.get(id(tensor), (None, ""))
        if ref is not None and ref() is tensor:
            return words
        if isinstance(tensor, nn.Parameter) or self._follows(tensor) or self._before is None:
            return "_"
        return str(self._fqns.get(id(tensor)) or self._before.place_of(tensor) or "_")


def _is_plain(difference: Difference) -> bool:
    """True for what no other mechanism hands over: neither tensors, nor modules, nor what torch keeps in a module."""
    names = (key[0] if isinstance(key, tuple) and key else key for kind, key in difference.path[-1:] if kind == "attribute")
    if any(isinstance(name, str) and name in TORCHS_OWN for name in names):
        return False
    return is_plain_value(difference.value)


def _is_same(one: Difference | None, other: Difference | None) -> bool:
    if one is None or other is None:
        return one is other
    return is_same_value(one.value, other.value)


def _plain_leaves(value: Any) -> list[Any]:
    plain = (bool, int, float, complex, str, type(None), np.generic, *SYMBOLIC_TYPES)
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, plain)]


def put_back(roots: Mapping[str, Any], difference: Difference) -> None:
    """Makes a change again, if its place is still there."""
    with suppress(KeyError, IndexError, AttributeError, TypeError):
        place_value(roots, difference)


def _without_symbols(difference: Difference) -> Difference:
    """Returns a difference with some number in place of each that belongs to a recording."""

    def plain(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return (list if isinstance(value, list) else tuple)(map(plain, value))
        if type(value) is dict:
            return {key: plain(entry) for key, entry in value.items()}
        return 3 if isinstance(value, SYMBOLIC_TYPES) else value

    return replace(difference, value=plain(difference.value))
