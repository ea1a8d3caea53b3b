"""Finds what recorded code sets for a later call of a module.

    hidden = self.encoder(x)
    self.decoder.temperature = f(self.global_step)      # also an entry of a dict, a global variable
    return self.decoder(hidden)

Such code runs while it is recorded. In a stage the module would find what was there when the region began. So a forward that
does this stays whole, and a region ends before a call for which the step does it. What is handed over as an argument, and what
is set before the region begins, counts as it should; tensors travel (``tracing.kept_state``). What a forward sets in other
objects than modules is a matter of ``tracing.shared_state``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from torch import nn

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe._compat.torch import modules_inside
from lightning_fxpipe.tracing.code_guards import code_guards
from lightning_fxpipe.tracing.guards import TORCHS_OWN, GuardKey
from lightning_fxpipe.tracing.reachable import is_plain_value, is_same_value, place_of, reached_from, reaches, written_place
from lightning_fxpipe.tracing.signals import NoRegion, RecordError
from lightning_fxpipe.user_code.frames import user_source
from lightning_fxpipe.user_code.kinds import is_users
from lightning_fxpipe.user_code.paths import Difference, Path, at_path
from lightning_fxpipe.user_code.snapshot import Snapshot, roots_of

_TORCHS_OWN = TORCHS_OWN - {"training", "_modules"}  # hooks, and whether they are called


class SetBetween:
    """Compares user state where one call of a module ends with where the next one begins.

    Args:
        root: The LightningModule.
        before: User state at a moment before the first call.
        is_step: True while a step's own code runs, and no module's.
        running: Returns the path of the module whose forward is recorded now.
        pause: Records nothing in its block.

    Attributes:
        read_after_set: What the step's code reads of modules and globals when something was set since the region began.
    """

    def __init__(
        self,
        root: nn.Module,
        before: Snapshot,
        *,
        is_step: Callable[[], bool],
        running: Callable[[], str] = str,
        pause: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.read_after_set: set[GuardKey] = set()
        self._root, self._before = root, before
        self._is_step, self._running, self._pause = is_step, running, pause
        self._read_at_begin: Mapping[GuardKey, Any] = {}  # globals that the step's code may read
        self._after_call: Mapping[Path, Difference] = {}
        self._is_written = False  # an attribute, by a forward, since the last call
        self._set: set[Path] = set()
        self._is_set_by_step = False  # when the running call of the step began
        self._called: list[nn.Module] = []  # with parameters, so far

    @contextmanager
    def call(self, module: nn.Module, arguments: Any) -> Iterator[None]:
        """The block calls a whole module.

        Raises:
            RecordError: Something was set for it.
            NoRegion: Something was set for it, and it has been called before: no region has one of its calls only.
        """
        # Modules of torch's own read their attributes, and change no others.
        is_users_own = self._is_step() and any(is_users(type(each)) for each in modules_inside(module).values())
        is_compared = is_users_own or (self._is_step() and self._before.has_changed(module))
        is_compared = is_compared or self._is_written or bool(self._set)
        if is_compared and self._called and (name := self.reaching(module, arguments)) is not None:
            used = {id(parameter) for called in self._called for parameter in called.parameters()}
            if any(id(parameter) in used for parameter in module.parameters()):
                raise _set_for_another_call(name)
            raise RecordError(f"{name} is set between calls of the model, for the later one")
        if next(module.parameters(), None) is not None:
            self._called.append(module)
        yield
        if is_compared:
            self.note_call_end()

    def note_call_begin(self, module: nn.Module) -> None:
        """The step calls a module, which may be opened: what was set for it counts in the calls of modules inside it."""
        if self._called and self._is_step() and next(module.parameters(), None) is not None:
            self._is_set_by_step = self._has_set()

    def note_write(self) -> None:
        """Recorded code is about to set an attribute of a module: what has changed before is not its doing."""
        if not self._is_written and not self._is_step():
            self.note_call_end()
            self._is_written = True

    def note_begin(self, function: Any) -> None:
        """The step, which is ``function``, makes the first call of the region."""
        self._read_at_begin = code_guards(self._root, (), functions=(function,))
        self.note_region_begin()

    def note_region_begin(self) -> None:
        """Counts everything set so far as set before the region, which may begin later still."""
        self._set.clear()
        self.note_call_end()

    def note_call_end(self) -> None:
        """Counts all changes up to now as those of the call that has ended, not of the code between calls."""
        self._after_call, self._is_written = self._plain(), False

    def without_set(self, guards: Mapping[GuardKey, Any]) -> Mapping[GuardKey, Any]:
        """Returns guards of globals, at the region's end, but for those that the step has set since it began."""
        changed = {key for key, value in self._read_at_begin.items() if guards.get(key, value) != value}
        self.read_after_set |= changed
        return {key: value for key, value in guards.items() if key not in changed}

    def has_set_by_now(self) -> bool:
        """True where the step's own code runs, and something was set since the region began."""
        return self._is_step() and self._has_set()

    def is_for_another(self, path: str) -> bool:
        """True where the forward of a module is recorded, and not that of the module at this path."""
        return not self._is_step() and self._running() != path

    def _has_set(self) -> bool:
        now = self._plain()
        for place in now.keys() | self._after_call.keys():
            one, other = now.get(place), self._after_call.get(place)
            if one is None or other is None or not is_same_value(one.value, other.value):
                self._set.add(place)
        return bool(self._set)

    def reaching(self, module: nn.Module, arguments: Any) -> str | None:
        """Returns what was set since the region began and a module, which is about to be called, can read."""
        by_step = self._is_step() or self._is_set_by_step
        if not self._has_set():
            return None
        roots, inside = roots_of(self._root)[0], modules_inside(module).values()
        with self._pause(), unwatched_torch():
            reached = reached_from(module, arguments)
        for place in sorted(self._set, key=str):
            with suppress(KeyError, IndexError, AttributeError):  # it is gone
                owner = at_path(roots, place[:-1])
                is_own = any(owner is each for each in inside)
                reaches_other = by_step and not isinstance(owner, nn.Module)
                if is_own or (reaches_other and reaches(reached, owner, str(place[-1][1]))):
                    return written_place(place)
        return None

    def _plain(self) -> dict[Path, Difference]:
        with self._pause(), unwatched_torch():
            found = self._before.differences()
            return {place_of(each): each for each in found if each.path[0] == "self" and _is_plain(each)}


def _is_plain(difference: Difference) -> bool:
    """True for what no other mechanism hands over."""
    names = (key[0] if isinstance(key, tuple) and key else key for _, key in difference.path[1:])
    is_torchs = any(isinstance(name, str) and name in _TORCHS_OWN for name in names)
    return not is_torchs and is_plain_value(difference.value)


def _set_for_another_call(name: str) -> NoRegion:
    return NoRegion(
        "The step sets an attribute between two calls of the same module.",
        where=user_source(),
        observed=f"{name} has another value in the second call",
        expected="one value in all calls, since a stage makes both at once",
        todo="Pass the value to the module as an argument.",
    )
