"""State that a model sets once, on its first call: a table of positions, a mask, a flag, hooks on its submodules.

    if self.pe is None:
        self.pe = make_table(x.shape[1])

The code of an opened module runs while it is recorded, and never again; so what it sets would be missing afterwards. Where that
follows from constants alone, the model gets it, with values, before it is recorded once more. A module that sets the same again
then does so in every call, and has to stay whole. Tensors that the region's own module leaves in attributes are results of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from lightning_fxpipe._compat.torch import FakeTensor, is_saved_buffer
from lightning_fxpipe.pytree.structure import NotFillable, Template
from lightning_fxpipe.tracing.examples import NoExample
from lightning_fxpipe.tracing.signals import FirstCallSets, MustStayWhole
from lightning_fxpipe.user_code.contents import ABSENT
from lightning_fxpipe.user_code.paths import CONTENTS, Difference, Path, at_path, kind_of_step
from lightning_fxpipe.user_code.snapshot import Snapshot, roots_of, user_state

# What a first call sets may have to be there before more of it is seen; nothing ordinary needs as many recordings.
_MAX_ROUNDS = 8
# New ones are no cache: they would have to be trained, and to live in one stage.
_FIXED = ("_parameters", "_modules")
# Steps from an object to what all objects of its class, or all functions of its file, share.
_SHARED = ("mro", "code", "globals", "class", "global", "function")


class NotConstant(Exception):
    """A model's first call sets a value that follows from more than constants."""


class FirstCalls:
    """The values that a model has been given before it is recorded; a context manager that an error makes take them back."""

    def __init__(self, root: nn.Module) -> None:
        self.paths: set[Path] = set()
        self._values: list[Difference] = []
        self._num_rounds = 0
        self._root = root
        self._before: Snapshot | None = None

    def give(self, values: Iterable[Difference]) -> bool:
        """Sets values on the model. False where it has been given some again and again, and sets more each time."""
        self._num_rounds += 1
        self._before = self._before or user_state(self._root)
        roots = roots_of(self._root)[0]
        for place in values:
            self.paths.add(place.path)
            self._values.append(place)
            place_value(roots, place)
        return self._num_rounds <= _MAX_ROUNDS

    def give_again(self) -> None:
        """Sets the values that were given, after a dry run around the recording has put back what was there before."""
        roots = roots_of(self._root)[0]
        for place in self._values:
            with suppress(KeyError, IndexError, AttributeError):  # in what the step makes anew each time
                place_value(roots, place)

    def __enter__(self) -> FirstCalls:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.take_back()

    def take_back(self) -> None:
        """Makes the model what it was."""
        if self._before is not None:
            self._before.restore()
        self._before = None
        self._num_rounds = 0
        self.paths.clear()
        self._values.clear()


def tensors_left(own: Snapshot, read: Collection[str], is_made: Callable[[Tensor], bool]) -> dict[str, Any]:
    """The attributes that the forward of a region's module sets to new tensors, or containers of them, and does not read.

    They are results like any other.

    Args:
        own: What the module was.
        read: Names of the attributes that recorded code has read.
        is_made: Returns True for a tensor that the graph has.
    """
    found = {}
    for place in own.differences():
        (root, *steps) = place.path
        kind, name = steps[0] if root == "self" and len(steps) == 1 else ("", None)  # not of a module inside
        if kind == "attribute" and isinstance(name, str) and name not in read:
            with suppress(NotFillable):
                tensors = Template.of(place.value).tensors
                if tensors and all(map(is_made, tensors)):
                    found[name] = place.value
    return found


def settle_changes(
    changed: Mapping[str, str],
    before: Snapshot,
    known: Collection[tuple[str, Any]],
    given: Collection[Path],
    value_of: Callable[[Tensor], Tensor],
    line_of: Callable[[str, str], str | None],
) -> None:
    """Decides about what opened modules have set while they were recorded.

    Args:
        changed: By the opened modules' paths, something that each has changed.
        before: What the model was. What whole modules change is no difference: they change it in every run.
        known: Attributes with tensors that the recorder knows, by path and name.
        given: Places that have been given a value before.
        value_of: The value of a fake tensor. Raises :class:`NoExample` where it is not constant.
        line_of: Says where the module at a path uses something of a name.

    Raises:
        FirstCallSets: The recording has to start again, after the model has been given values.
        MustStayWhole: A module changes something in every call, or to what is no constant.
    """
    if not changed:
        return
    shares = any(not name.startswith("self.") for name in changed.values())
    places = [place for place in before.differences() if _is_relevant(place.path, changed, known, shares=shares)]
    path = max(changed, key=len)  # an innermost one
    otherwise = MustStayWhole(path, f"its forward changes {changed[path]}", line_of(path, changed[path]))
    try:
        values = tuple(_constant(place, before, given, value_of) for place in places)
    except NotConstant:
        raise otherwise from None
    raise FirstCallSets(values, otherwise) if values else otherwise


def _is_relevant(path: Path, changed: Collection[str], known: Collection[tuple[str, Any]], *, shares: bool) -> bool:
    """Returns True if a difference is the work of opened modules."""
    if path[0] != "self" or any(kind in _SHARED for kind, _ in path[1:]):
        return shares
    module, inside = _in_module(path)
    if inside and (module, inside[0][1]) in known:
        return False
    # What a step sets on the LightningModule, it sets in every run.
    return module in changed or (len(inside) == 1 and module != "")


def _in_module(path: Path) -> tuple[str, Path]:
    """The path of the module that a place is in, and the steps from it."""
    names = []
    steps = path[1:]
    while steps and steps[0][0] == "attribute" and isinstance(steps[0][1], tuple) and steps[0][1][0] == "_modules":
        names.append(steps[0][1][1])
        steps = steps[1:]
    return ".".join(names), steps


def _constant(place: Difference, before: Snapshot, given: Collection[Path], value_of: Callable[[Tensor], Tensor]) -> Difference:
    """The place with a value that has no fakes in it."""
    kind, key = place.path[-1] if len(place.path) > 1 else ("", None)
    if place.path in given or place.value is ABSENT or kind == CONTENTS:
        raise NotConstant
    if kind == "key" and any(other[:-1] == place.path[:-1] for other in given):
        raise NotConstant  # another entry each time
    if isinstance(key, tuple) and key[0] in _FIXED:
        raise NotConstant
    if isinstance(key, tuple) and key[0] == "_buffers" and is_saved_buffer(before.owner_of(place.path), key[1]):
        # One that a first call makes is missing in the plan, and in some of the checkpoints.
        raise NotConstant
    try:
        template = Template.of(place.value)
        if template.sizes:
            raise NotConstant
        if not template.tensors:
            return place  # the very object: a hook, a flag, a type
        tensors = [_real(tensor, value_of) for tensor in template.tensors]
    except (NotFillable, NoExample) as error:
        raise NotConstant from error
    return Difference(place.path, place.start, template.fill(tensors))


def _real(tensor: Tensor, value_of: Callable[[Tensor], Tensor]) -> Tensor:
    if not isinstance(tensor, FakeTensor):
        return tensor
    if tensor.requires_grad:
        raise NotConstant
    return value_of(tensor)


def place_value(roots: Mapping[str, Any], place: Difference) -> None:
    """Sets a value where it was found.

    Raises:
        KeyError, IndexError, AttributeError: The object is not there.
    """
    if place.start is not None:
        at_path(roots, place.path)[place.start :] = place.value
        return
    owner, (kind, key) = at_path(roots, place.path[:-1]), place.path[-1]
    if kind == CONTENTS:
        kind_of_step(owner, key).put(owner, place.value)
    elif isinstance(owner, nn.Module) and isinstance(key, tuple):
        if key[0] == "_buffers":
            owner.register_buffer(key[1], place.value, persistent=False)
        else:
            vars(owner)[key[0]][key[1]] = place.value
    else:
        kind_of_step(owner, kind).set(owner, key, place.value)
