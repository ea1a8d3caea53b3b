"""Attributes that a step's code sets on submodules after the model's call, for stages on other ranks.

    self.net.scale = 2.0             # before the call: on every rank
    loss = self.loss(self.net(x))    # a stage's forward may set attributes itself, on its rank only
    self.net.scale = 1.0             # after the call: on the last stage's rank only

Attributes that no code of the step names stay out of the comparison: there may be tens of thousands. What the forward of a
stage's module sets is not compared either: values are taken when the stages have run. A module whose forward counts as the
step's own code (``Span.transparent``) runs on after that, and what a recorded forward leaves on its module is set then:

    x = self.block_1(self.block_0(x))    # the region
    self.num_calls += 1                  # on the last stage's rank only
    self.state = x.detach()
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_fxpipe._compat.torch import FakeTensor, is_in_memory, tree_leaves, version_of
from lightning_fxpipe.metrics.metric_calls import METRICS
from lightning_fxpipe.tracing.guards import TORCHS_OWN
from lightning_fxpipe.user_code.changing_code import may_change_inside
from lightning_fxpipe.user_code.contents import ABSENT
from lightning_fxpipe.user_code.members import Members
from lightning_fxpipe.user_code.paths import Difference, Path
from lightning_fxpipe.user_code.snapshot import Snapshot
from lightning_fxpipe.user_code.step_code import codes_of_step


class SubmoduleValues:
    """Some attributes of submodules.

    Args:
        root: The LightningModule.
        names: The attributes, by the modules' paths.
        changes: True for an object, in an attribute of this name, that code may change from within: it is looked into.
    """

    def __init__(
        self,
        root: nn.Module,
        names: Mapping[str, Collection[str]],
        changes: Callable[[str, Any], bool],
    ) -> None:
        self._root, self._changes = root, changes
        self._may_change: dict[tuple[str, type], bool] = {}
        self._places = [
            (vars(root.get_submodule(path)), name, (*path_of(path), ("attribute", name)))
            for path, own in names.items()
            for name in sorted(own)
        ]
        self._before: list[Any] = []
        self._versions: list[int] = []  # of tensors among them
        self._inside: Snapshot | None = None
        self._set_here: Snapshot | None = None
        self.take()

    @classmethod
    def of_step(cls, root: nn.Module, members: Members, function: Callable[..., Any]) -> SubmoduleValues:
        """Returns those that a step's code names."""
        codes = codes_of_step(root, function)
        named = {name for code in codes for name in code.co_names} - TORCHS_OWN
        modules = {path: module for path, module in members.modules.items() if path and not isinstance(module, METRICS)}
        names = {path: found for path, module in modules.items() if (found := named & vars(module).keys())}
        return cls(root, names, partial(may_change_inside, codes=codes))

    def take(self, set_here: Collection[str] = ()) -> None:
        """Takes the values of now; ``set_here`` are the paths of modules whose attributes only this rank sets after that."""
        modules = {path: self._root.get_submodule(path) for path in set_here if path}  # the root's are the step's own state
        self._set_here = Snapshot(modules, enters_modules=False) if modules else None
        self._before = [attributes.get(name, ABSENT) for attributes, name, _ in self._places]
        self._versions = [version_of(value) if _has_version(value) else -1 for value in self._before]
        names = (name for _, name, _ in self._places)
        named = enumerate(zip(names, self._before, strict=True))
        holders = {str(index): value for index, (name, value) in named if self._is_holder(name, value)}
        self._inside = Snapshot(holders, enters_modules=False) if holders else None

    def forget(self) -> None:
        """Lets go of the values that were taken, which may be large."""
        self._before, self._versions = [ABSENT] * len(self._places), [-1] * len(self._places)
        self._inside = self._set_here = None

    def _is_holder(self, name: str, value: Any) -> bool:
        if isinstance(value, Tensor):
            return False
        key = name, type(value)
        if key not in self._may_change:
            self._may_change[key] = isinstance(value, (list, dict, set)) or self._changes(name, value)
        return self._may_change[key]

    def written(self, memory: Collection[int]) -> Iterator[Difference]:
        """Yields the tensors that are what was taken, and have other values.

        Args:
            memory: That calls have written to: not every write shows in a tensor's version.
        """
        for (attributes, name, path), before, version in zip(self._places, self._before, self._versions, strict=True):
            is_same = isinstance(before, Tensor) and version >= 0 and attributes.get(name) is before
            if is_same and (version_of(before) != version or is_in_memory(before, memory)):
                yield Difference(path, None, before)
        for each in () if self._inside is None else self._inside.written_tensors(memory):
            attributes, name, path = self._places[int(each.path[0])]
            if attributes.get(name) is self._before[int(each.path[0])]:
                yield Difference((*path, *each.path[1:]), None, each.value)
        for each in () if self._set_here is None else self._set_here.written_tensors(memory):
            if _is_own(each):
                yield Difference((*path_of(each.path[0]), *each.path[1:]), None, each.value)

    def differences(self) -> Iterator[Difference]:
        """Yields what differs from what was taken, but for values of tensors."""
        for (attributes, name, path), before in zip(self._places, self._before, strict=True):
            now = attributes.get(name, ABSENT)
            if now is not before and not (type(now) is type(before) and isinstance(now, (int, float, str)) and now == before):
                yield Difference(path, None, now)
        if self._inside is not None and not self._inside.is_current():
            for each in self._inside.differences():
                index = int(each.path[0])
                attributes, name, path = self._places[index]
                if attributes.get(name) is self._before[index]:  # otherwise all of it is sent
                    yield Difference((*path, *each.path[1:]), each.start, each.value)
        if self._set_here is not None and not self._set_here.is_current():
            for each in self._set_here.differences():
                if _is_own(each):
                    yield Difference((*path_of(each.path[0]), *each.path[1:]), each.start, each.value)


def _has_version(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()


def _is_own(difference: Difference) -> bool:
    """False for what torch keeps in a module, and for tensors without data."""
    kind, key = difference.path[1] if len(difference.path) > 1 else ("", "")
    is_torchs_own = kind == "attribute" and (not isinstance(key, str) or key in TORCHS_OWN)
    return not is_torchs_own and not stands_for_data(difference.value)


def stands_for_data(value: Any) -> bool:
    """True for a value with tensors without data: of these, ranks have their own."""
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)


def path_of(path: str) -> Path:
    """Returns the path of a module, from the root's on."""
    return ("self", *(("attribute", ("_modules", name)) for name in path.split(".")))
