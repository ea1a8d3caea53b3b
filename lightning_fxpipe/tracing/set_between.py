"""Finds what a step sets between two calls of the model for the second one.

    hidden = self.encoder(x)
    self.decoder.temperature = f(self.global_step)      # also an entry of a dict, a global variable
    return self.decoder(hidden)

A region of several calls is computed when the step makes the first of them, so its stages would compute with what was there
before. So the region ends before such a call. What the step hands over as an argument, and what it sets before the first call,
counts as it should.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe._compat.torch import modules_inside, tree_leaves
from lightning_fxpipe.tracing.code_guards import code_guards
from lightning_fxpipe.tracing.guards import GuardKey
from lightning_fxpipe.tracing.shared_values import is_same_value, place_of, reached_from, reaches, written_place
from lightning_fxpipe.user_code.paths import Difference, Path, at_path
from lightning_fxpipe.user_code.snapshot import roots_of


class SetBetween:
    """Compares user state where a call of the step ends with where the next one begins.

    Args:
        root: The LightningModule.
        differences: Returns where user state differs from a moment before the first call.
        is_step: True while the step's own code runs, and no module's.

    Attributes:
        read_after_set: What that code reads of modules and globals when it has set something since the region began.
    """

    def __init__(
        self,
        root: nn.Module,
        differences: Callable[[], Iterable[Difference]],
        is_step: Callable[[], bool] = lambda: True,
    ) -> None:
        self.read_after_set: set[GuardKey] = set()
        self._root, self._differences, self._is_step = root, differences, is_step
        self._read_at_begin: Mapping[GuardKey, Any] = {}  # globals that the step's code may read
        self._after_call: Mapping[Path, Difference] = {}
        self._set: set[Path] = set()

    def note_begin(self, function: Any) -> None:
        """The step, which is ``function``, makes the first call of the region."""
        self._read_at_begin = code_guards(self._root, (), functions=(function,))

    def without_set(self, guards: Mapping[GuardKey, Any]) -> Mapping[GuardKey, Any]:
        """Returns guards of globals, at the region's end, but for those that the step has set since it began."""
        changed = {key for key, value in self._read_at_begin.items() if guards.get(key, value) != value}
        self.read_after_set |= changed
        return {key: value for key, value in guards.items() if key not in changed}

    def has_set_by_now(self) -> bool:
        """True where the step's own code runs, and has set something since the region began."""
        return self._is_step() and self.has_set()

    def note_call_end(self) -> None:
        """A call of the region has ended, or the region begins: what has changed by now is not the step's doing."""
        self._after_call = self._plain()

    def has_set(self) -> bool:
        """True if the step has set anything since the region began."""
        now = self._plain()
        for place in now.keys() | self._after_call.keys():
            one, other = now.get(place), self._after_call.get(place)
            if one is None or other is None or not is_same_value(one.value, other.value):
                self._set.add(place)
        return bool(self._set)

    def reaching(self, module: nn.Module, arguments: Any) -> str | None:
        """Returns what the step has set since the region began and a module, which is about to be called, can read."""
        if not self.has_set():
            return None
        roots, inside = roots_of(self._root)[0], modules_inside(module).values()
        reached = reached_from(module, arguments)
        for place in sorted(self._set, key=str):
            with suppress(KeyError, IndexError, AttributeError):  # it is gone
                owner = at_path(roots, place[:-1])
                is_own = any(owner is each for each in inside)
                if is_own or (not isinstance(owner, nn.Module) and reaches(reached, owner, str(place[-1][1]))):
                    return written_place(place)
        return None

    def _plain(self) -> dict[Path, Difference]:
        with unwatched_torch():
            return {place_of(each): each for each in self._differences() if each.path[0] == "self" and _is_plain(each)}


def _is_plain(difference: Difference) -> bool:
    """True for what no other mechanism hands over: tensors travel."""
    last = difference.path[-1][1]
    is_torchs = isinstance(last, str) and last.startswith("_")
    return not is_torchs and not any(isinstance(leaf, (Tensor, nn.Module)) for leaf in tree_leaves(difference.value))
