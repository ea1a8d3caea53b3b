"""Changes that a step makes to the LightningModule and to objects that its code reaches, on every rank.

After the model's call only the last stage runs the step. What it changes there (``self.outputs.append(loss)``,
``self.last_loss = loss``, ``self.meter.update(loss)``, a moving average in a buffer that no stage holds, a learning rate, a
counter of the class) hooks read on every rank, and the next step may read it before the model's call. So the last stage
compares what the step can reach (``user_code.snapshot``) with what it was before the step, and the other ranks take
over what differs, in the same objects. A list that grows is sent by its new entries only. What submodules hold
is brought together when a run has ended: their stages run on other ranks.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor, nn

from lightning_fxpipe._compat.torch import RECURRENT_WEIGHT_LISTS, is_in_memory, version_of
from lightning_fxpipe.distributed.agreement import gather_values
from lightning_fxpipe.errors import UnsupportedError, text_of
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.runtime.submodule_values import SubmoduleValues
from lightning_fxpipe.user_code.contents import ABSENT
from lightning_fxpipe.user_code.iterators import Rewindable, StepIterators, is_iterator
from lightning_fxpipe.user_code.members import Members
from lightning_fxpipe.user_code.paths import CONTENTS, Difference, Path, at_path, kind_of_step, name_of
from lightning_fxpipe.user_code.snapshot import Snapshot, roots_of
from lightning_fxpipe.user_code.step import Step, StepKind

# torch's own attributes: parameters belong to stages, buffers are compared by name, modules and hooks are not the step's, and
# recurrent layers keep a second list of their weights.
_TORCHS_OWN = frozenset({*vars(nn.Module()), *RECURRENT_WEIGHT_LISTS})
_BUFFERS = "buffers"  # the root of a path to one


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something that a step changed.

    Attributes:
        path: Where, see ``Difference`` of ``user_code.snapshot``; ``("buffers", fqn)`` for a buffer.
        start: For a list that has grown or shrunk, the index of the first new entry; else None.
        value: The new value, or the new entries, pickled; None where there is none any more.
        is_in_place: Whether a tensor has got other values, and is the same tensor.
    """

    path: Path
    start: int | None
    value: bytes | None
    is_in_place: bool = False


class StepAttributes:
    """Present state that a step's code can change, except that of submodules.

    Args:
        module: The LightningModule.
        members: Its members, listed anew.
        buffers: Its buffers that every rank has, by FQN.
        *functions: The step, if it is no method of the module.
        staged: The buffers of stages, by FQN.
        known: The state of another moment, which may still be right; it is used up.
        inside: What the step's code may set on submodules.

    Attributes:
        state: What it is.
        written: Gets the memory into which the step's calls write: not every write shows in a tensor's version.
    """

    def __init__(
        self,
        module: nn.Module,
        members: Members,
        buffers: Mapping[str, Tensor],
        *functions: Any,
        staged: Mapping[str, Tensor] | None = None,
        known: Snapshot | None = None,
        inside: SubmoduleValues | None = None,
    ) -> None:
        self._inside = inside
        if inside is not None:
            inside.take()
        self.written: set[int] = set()
        self._module = module
        self._members = members
        self._buffers_before = members.buffers
        self._buffers = {fqn: (buffer, version_of(buffer)) for fqn, buffer in buffers.items()}
        self._staged = staged or {}
        roots, shallow = roots_of(module, *functions)
        is_known = known is not None and known.renew(roots, shallow)
        self.state = known if known is not None and is_known else Snapshot(roots, shallow=shallow, enters_modules=False)
        self._own_iterators: dict[int, tuple[Rewindable, int]] = {}
        self._changed_before: tuple[Difference, ...] = ()  # by the code before the model's call

    def begin_region(self) -> None:
        """Tells that the step is about to call the model: so far every rank has done the same, and made the same iterators."""
        attributes = vars(self._module)
        made = {name: Rewindable(value) for name, value in attributes.items() if is_iterator(value)}
        attributes.update(made)
        self._own_iterators = {id(each): (each, each.position) for each in attributes.values() if type(each) is Rewindable}
        if not self.state.is_current():
            self._changed_before = tuple(self.state.differences())

    def end_region(self, set_here: Collection[str] = ()) -> None:
        """Tells that the stages have run: what they have set on their modules is theirs.

        Args:
            set_here: Paths of the modules whose attributes only this rank sets from now on.
        """
        if self._inside is not None:
            self._inside.take(set_here)

    def still(self) -> Snapshot | None:
        """Returns the state that the step's code can change, if it has not changed, and there are no iterators in it."""
        return self.state if not self.state.has_iterators and self.state.is_current() else None

    def changes(self, made: StepIterators | None = None) -> list[Change]:
        """Lists the present differences. Tensors are on the CPU and outside of any graph.

        Args:
            made: The iterators that the step has made.

        Raises:
            UnsupportedError: A new value cannot be sent to the other ranks.
        """
        assigned = [*self.state.differences()]
        found = [
            change_of(self._module, self.state, each, made, is_in_place=is_in_place)
            for is_in_place, differences in (
                (False, (*assigned, *self._undone(assigned))),
                (True, self.state.written_tensors(self.written)),
            )
            for each in differences
            if not _is_each_ranks(each.path) and not self._is_own_iterator(each, made)
        ]
        if self._inside is not None:
            found += [change_of(self._module, self.state, each, made) for each in self._inside.differences()]
            written = self._inside.written(self.written)
            found += [change_of(self._module, self.state, each, made, is_in_place=True) for each in written]
        return [*found, *self._changed_buffers()]

    def _undone(self, assigned: Iterable[Difference]) -> Iterator[Difference]:
        """Yields what the code before the model's call has changed, on every rank, and the code after it has put back."""
        still, roots = {difference.path for difference in assigned}, roots_of(self._module)[0]
        for each in self._changed_before:
            if each.path not in still:
                yield Difference(each.path, each.start, _value_now(roots, each))

    def _changed_buffers(self) -> Iterator[Change]:
        today = self._members.renewed().buffers
        for fqn, (buffer, version) in self._buffers.items():
            now = today[fqn] if fqn in today else self._module.get_buffer(fqn)
            if now is not buffer or version_of(now) != version or is_in_memory(now, self.written):
                yield self._buffer_change(fqn, now, is_in_place=now is buffer)
        # Those of a stage are changed by it, on its rank; but the step can put others there.
        for fqn, buffer in self._staged.items() if today is not self._buffers_before else ():
            if (now := today.get(fqn, buffer)) is not buffer:
                yield self._buffer_change(fqn, now, is_in_place=False)

    def _buffer_change(self, fqn: str, now: Tensor, *, is_in_place: bool) -> Change:
        difference = Difference((_BUFFERS, fqn), None, now)
        return change_of(self._module, self.state, difference, is_in_place=is_in_place)

    def _is_own_iterator(self, difference: Difference, made: StepIterators | None) -> bool:
        """Returns True if every rank has made itself this iterator, which often cannot be sent, and has it at the same item."""
        found, position = self._own_iterators.get(id(difference.value), (None, 0))
        if made is not None and made.place_of(found) is not None:
            return False
        return found is not None and found.position == position


class AttributesOfSteps:
    """Makes :class:`StepAttributes`, for one step after the other. Used on the last stage's rank.

    Args:
        module: The LightningModule.
        members: Its members, listed anew for each batch.
        plan: Where each buffer lives.
    """

    def __init__(self, module: nn.Module, members: Members, plan: PartitionPlan) -> None:
        self._module, self._members, self._plan = module, members, plan
        self._buffers: tuple[Any, dict[str, Tensor], dict[str, Tensor]] = (None, {}, {})  # of every rank, and of stages
        self._inside: dict[StepKind, tuple[Any, SubmoduleValues]] = {}  # with the modules as they were listed
        self._state: Snapshot | None = None

    def now(self, step: Step) -> StepAttributes:
        """Returns what a step can change, as it is now."""
        members = self._members
        known, common, staged = self._buffers
        if known is not members.buffers:
            common = {fqn: buffer for fqn, buffer in members.buffers.items() if not self._plan.stages_of(fqn)}
            staged = {fqn: buffer for fqn, buffer in members.buffers.items() if fqn not in common}
            self._buffers = (members.buffers, common, staged)
        modules, inside = self._inside.get(step.kind, (None, None))
        if inside is None or modules is not members.modules:
            inside = SubmoduleValues.of_step(self._module, members, step.function)
            self._inside[step.kind] = members.modules, inside
        function, state = step.function, self._state
        found = StepAttributes(self._module, members, common, function, staged=staged, known=state, inside=inside)
        self._state = found.state
        return found

    def forget(self) -> None:
        """Gives back what holds objects that user code has let go."""
        self._state = None
        self._inside.clear()


class SubmoduleAttributes:
    """Present state of submodules: their forward may change it (``self.calls += 1``) on the rank of their stage only.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = Snapshot({"self": module})

    def begin(self) -> None:
        """Takes what they hold now, which is the same on every rank."""
        self._before = Snapshot({"self": self._module})

    def share(self, group: dist.ProcessGroup | None) -> list[str]:
        """Gives every rank what another has changed since it was last shared. Called by every rank.

        Returns:
            Names of what could not be sent.
        """
        mine: list[Change] = []
        unsent: list[str] = []
        for difference in self._before.differences():
            if _is_in_submodule(difference.path):
                try:
                    mine.append(change_of(self._module, self._before, difference))
                except UnsupportedError:
                    unsent.append(".".join(_words_of(difference.path)))
        every = gather_values(group, (mine, unsent))
        known = {change.path for change in mine}
        for rank, (changes, _) in enumerate(every):
            if rank != dist.get_rank(group):
                news = [change for change in changes if change.path not in known]
                take_over(self._module, news, torch.device("cpu"))
                known |= {change.path for change in news}
        self.begin()
        return sorted({name for _, names in every for name in names})


def _is_in_submodule(path: Path) -> bool:
    """Returns True if a path leads into a submodule, and there not into what is torch's own."""
    if len(path) < 3 or not _is_module_step(path[1]):
        return False
    steps = [step for step in path[1:] if not _is_module_step(step)]
    key = steps[0][1] if steps else ""
    return bool(steps) and isinstance(key, str | int) and key not in _TORCHS_OWN


def _is_module_step(step: Any) -> bool:
    return step[0] == "attribute" and isinstance(step[1], tuple) and step[1][0] == "_modules"


def _words_of(path: Path) -> list[str]:
    return [str(path[0]), *(str(key[1] if isinstance(key, tuple) else key) for _, key in path[1:])]


def change_of(
    module: nn.Module,
    before: Snapshot,
    difference: Difference,
    made: StepIterators | None = None,
    *,
    is_in_place: bool = False,
) -> Change:
    """Returns a difference as it is sent.

    Args:
        module: The LightningModule.
        before: What was reached before: objects of then are sent as references.
        difference: What differs.
        made: The iterators that the step has made.
        is_in_place: Whether it is a tensor that has got other values.

    Raises:
        UnsupportedError: It cannot be pickled.
    """
    value = None
    if difference.value is not ABSENT:
        sent = io.BytesIO()
        try:
            _Pickler(sent, module, before, difference.value, made).dump(difference.value)
        except Exception as error:
            raise _not_sendable(difference, error) from error
        value = sent.getvalue()
    return Change(path=difference.path, start=difference.start, value=value, is_in_place=is_in_place)


def take_over(
    module: nn.Module,
    changes: Iterable[Change],
    device: torch.device,
    *functions: Any,
    made: StepIterators | None = None,
) -> None:
    """Makes the same changes to this rank's module and to what its step's code reaches.

    Args:
        module: The module.
        changes: The changes.
        device: This rank's.
        *functions: The step, if it is no method of the module.
        made: The iterators that the step has made here.
    """
    roots = roots_of(module, *functions)[0]
    # All values first: what they refer to is found where it was before the step.
    news = (None if change.value is None else _Unpickler(change.value, module, roots, device, made) for change in changes)
    values = [ABSENT if new is None else new.load() for new in news]
    for change, value in zip(changes, values, strict=True):
        if change.is_in_place and _write(_look(module, roots, change.path), value):
            continue
        if change.start is not None:
            at_path(roots, change.path)[change.start :] = value
        elif change.path[0] == _BUFFERS:
            path, _, name = change.path[1].rpartition(".")
            setattr(module.get_submodule(path), name, value.to(device))
        else:
            owner, (kind, key) = at_path(roots, change.path[:-1]), change.path[-1]
            if kind == CONTENTS:
                kind_of_step(owner, key).put(owner, value)
            else:
                kind_of_step(owner, kind).set(owner, key, value)


def _value_now(roots: Mapping[str, Any], difference: Difference) -> Any:
    """Returns what is now where something had changed; ``ABSENT`` where there is nothing."""
    try:
        if difference.start is not None:
            return at_path(roots, difference.path)[difference.start :]
        owner, (kind, key) = at_path(roots, difference.path[:-1]), difference.path[-1]
        return kind_of_step(owner, key).take(owner) if kind == CONTENTS else kind_of_step(owner, kind).look(owner, key)
    except (KeyError, IndexError, AttributeError):
        return ABSENT


def _look(module: nn.Module, roots: Mapping[str, Any], path: Path) -> Any:
    return module.get_buffer(path[1]) if path[0] == _BUFFERS else at_path(roots, path)


def _write(tensor: Any, value: Tensor) -> bool:
    """Gives a tensor other values, so that it stays the same for all that hold it; False where it cannot have them."""
    if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
        return False
    if tensor.is_meta or (tensor.is_inference() and not torch.is_inference_mode_enabled()):
        return False
    with torch.no_grad():
        tensor.data.copy_(value)  # which is no change to a stage's graph that has saved it: its forward had this value
    return True


class _Pickler(pickle.Pickler):
    """Pickles a new value; what the other ranks have themselves goes as a reference: modules, parameters, known objects."""

    def __init__(self, file: io.BytesIO, module: nn.Module, before: Snapshot, value: Any, made: StepIterators | None) -> None:
        super().__init__(file)
        self._made = made
        self._modules = {id(child): fqn for fqn, child in module.named_modules()}
        self._parameters = {id(parameter): fqn for fqn, parameter in module.named_parameters()}
        self._trainer = vars(module).get("_trainer")
        self._before = before
        self._value = value
        self._moved: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        """Returns the reference to an object that every rank has; None for one that must be sent."""
        if isinstance(value, nn.Module):
            return None if id(value) not in self._modules else ("module", self._modules[id(value)])
        if isinstance(value, nn.Parameter):
            return None if id(value) not in self._parameters else ("parameter", self._parameters[id(value)])
        if value is self._trainer and value is not None:
            return ("trainer", None)
        if self._made is not None and (place := self._made.place_of(value)) is not None:
            return ("iterator", place)
        # Contents that have changed as a whole are those of a known object, and not a reference to it.
        if isinstance(value, (type, tuple, frozenset)) or callable(value) or value is self._value:
            return None
        path = self._before.path_of(value)
        return None if path is None else ("object", path)

    def reducer_override(self, value: Any) -> Any:
        """Tensors leave their graph, and their device for the CPU."""
        if type(value) is not Tensor or any(value is moved for moved in self._moved):
            return NotImplemented
        self._moved.append(value.detach().cpu())
        return _arrive, (self._moved[-1], value.device.type == "cpu")


class _Unpickler(pickle.Unpickler):
    """Inverse of :class:`_Pickler` on another rank."""

    def __init__(
        self,
        data: bytes,
        module: nn.Module,
        roots: Mapping[str, Any],
        device: torch.device,
        made: StepIterators | None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._made = made
        self._module, self._roots, self._device = module, roots, device

    def persistent_load(self, reference: Any) -> Any:
        """The object that this rank has."""
        kind, where = reference
        if kind == "module":
            return self._module.get_submodule(where)
        if kind == "parameter":
            return self._module.get_parameter(where)
        if kind == "iterator":
            assert self._made is not None
            return self._made.at(where)
        return vars(self._module)["_trainer"] if kind == "trainer" else at_path(self._roots, where)

    def find_class(self, module: str, name: str) -> Any:
        """Tensors go to this rank's device where they have come from one."""
        found = super().find_class(module, name)
        return partial(_arrive, device=self._device) if found is _arrive else found


def _arrive(tensor: Tensor, stays: bool, device: torch.device | None = None) -> Tensor:
    return tensor if stays or device is None else tensor.to(device, non_blocking=True)


def _is_each_ranks(path: Path) -> bool:
    """Returns True if a path leads into torch's own attributes of the module itself, to the parameters that an optimizer
    steps, or to the Trainer's own attributes.
    """
    if path[0] == "trainer":
        return True  # what it knows of the run
    if path[0].startswith("optimizers["):
        return ("key", "params") in path or ("key", "param_names") in path
    if len(path) < 2 or path[0] != "self":
        return False
    key = path[1][1]
    return path[1][0] == "attribute" and (not isinstance(key, str) or key in _TORCHS_OWN)


def _not_sendable(difference: Difference, error: Exception) -> UnsupportedError:
    kind = "a list with new entries" if difference.start is not None else f"a {type(difference.value).__name__}"
    return UnsupportedError(
        f"The step sets {name_of(difference.path)} to a value that cannot be sent to the other ranks.",
        observed=f"{kind}, which cannot be pickled: {text_of(error)}",
        expected="a value that can be pickled: after the model's call only the last stage runs the step",
        todo="Store a number or a tensor instead, or set the attribute in a hook, which runs on every rank.",
    )
