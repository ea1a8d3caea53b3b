"""Undoes what a run of user code leaves behind, where it is one run more than the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.torch import version_of
from lightning_fxpipe.rng import isolated_rng, rng_state, set_rng_state
from lightning_fxpipe.user_code.members import Members
from lightning_fxpipe.user_code.snapshot import Snapshot, user_state
from lightning_fxpipe.user_code.writes import Writes, WritesOfCalls


@dataclass
class Undone:
    """State that a block can change and that is undone after it.

    Attributes:
        before: What it was.
        has_changed_any: After the block, True if it had changed something.
    """

    before: Snapshot
    has_changed_any: bool = False


@contextmanager
def undo_after(root: nn.Module, *functions: Callable[..., Any]) -> Iterator[Undone]:
    """After the block the module and all that its code reaches are what they were, and so are the random generators.

    What is logged, printed or written to files is the caller's to prevent.

    Args:
        root: The module.
        *functions: Code that runs beside its methods.
    """
    found = Undone(user_state(root, *functions))
    gradients = [(parameter, parameter.grad) for parameter in root.parameters() if not parameter.is_meta]
    held = [gradient for _, gradient in gradients if gradient is not None]
    writes = Writes([*found.before.tensors(), *root.parameters(), *root.buffers(), *held])
    try:
        with isolated_rng(), writes:
            yield found
    finally:
        found.has_changed_any = writes.happened
        writes.undo()
        found.has_changed_any |= found.before.restore()
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient


class Postponed:
    """Undoes after a block what it changes, and can change it again later.

    A context manager around the block.

    Args:
        state: What the block can change.
        watches_tensors: True to restore values of tensors, by a mode that processes forked in the block inherit.
    """

    def __init__(self, state: Snapshot, *, watches_tensors: bool = True) -> None:
        self.state = state
        self._writes = Writes(state.tensors()) if watches_tensors else None
        # Of calls only: under a dispatch mode torch makes no tensor of a class of the user's from another tensor.
        self._watch = None if self._writes is None else WritesOfCalls(self._writes, state.tensors())
        self._again: list[Callable[[], None]] = []
        self._versions: list[tuple[Tensor, int]] = []

    def __enter__(self) -> Postponed:
        if self._watch is not None:
            self._watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._watch is not None and self._writes is not None:
            self._watch.__exit__(*exception)  # type: ignore[no-untyped-call]
            self._again.append(self._writes.take_back())
        self._again.append(self.state.take_back())
        self._versions = [(tensor, version_of(tensor)) for tensor in self.state.tensors()]

    def is_current(self) -> bool:
        """True if nothing that was looked at has changed since the block."""
        return self.state.is_current() and all(version_of(tensor) == version for tensor, version in self._versions)

    def again(self) -> None:
        """Makes the changes of the block."""
        for change in self._again:
            change()


class UndoneRuns:
    """Undoes several runs of user code that should change nothing, with one look at what they can change before the first and
    one after the last; attributes of the module itself are looked at after each. Between them other code runs, which may write
    to tensors and to what submodules hold.

    A context manager around all of them. Attributes of submodules and ``.grad`` are not looked at, and random generators are
    not put back.

    Args:
        members: The module's, listed anew.
        root: The module.
        *functions: Code that runs beside its methods.
        before: What they can change, where that is known.

    Attributes:
        has_assigned: True if something but tensors had changed; after the block it is what it was again.
    """

    def __init__(
        self, members: Members, root: nn.Module, *functions: Callable[..., Any], before: Snapshot | None = None
    ) -> None:
        self.has_assigned = False
        self._before = before or user_state(root, *functions, enters_modules=False)
        others = [*self._before.tensors(), *members.buffers.values()]
        self._writes = Writes([*others, *members.parameters.values()])
        # No call of torch shows what TorchScript does with memory of its own.
        is_scripted = bool(members.of_type((torch.jit.ScriptModule,)))
        self._watch = self._writes if is_scripted else WritesOfCalls(self._writes, others)
        self._attributes = vars(root)
        self._values = list(self._attributes.values())

    def __enter__(self) -> UndoneRuns:
        return self

    def __exit__(self, *exception: object) -> None:
        self.has_assigned |= self._before.restore()

    def one(self) -> AbstractContextManager[Undone]:
        """One of the runs; after the block tensors have the values that they had before, and the module its attributes."""
        return _OneRun(self)

    def _undo_one(self) -> bool:
        """Returns whether tensors have been written to."""
        has_written = self._writes.happened
        self._writes.undo()
        if len(self._attributes) != len(self._values) or not all(map(is_, self._attributes.values(), self._values)):
            self.has_assigned |= self._before.restore()
        return has_written


class _OneRun:
    # No generator: such a block is around each microbatch.
    def __init__(self, runs: UndoneRuns) -> None:
        self._runs = runs
        self._found = Undone(runs._before)

    def __enter__(self) -> Undone:
        self._runs._watch.__enter__()  # type: ignore[no-untyped-call]
        return self._found

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            self._runs._watch.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        finally:
            self._found.has_changed_any = self._runs._undo_one()


class Remembered:
    """State of a module and all that its code reaches, with the values of buffers, and the random generators.

    Args:
        root: The module.
    """

    def __init__(self, root: nn.Module) -> None:
        self._state, self._rng = user_state(root), rng_state()
        tensors = (
            tensor for tensor in (*self._state.tensors(), *root.buffers()) if not tensor.is_meta and _is_writable(tensor)
        )
        self._values = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Makes all of it what it was."""
        self._state.restore()
        set_rng_state(self._rng)
        for tensor, value in self._values:
            tensor.data.copy_(value)


def _is_writable(tensor: Tensor) -> bool:
    """True if torch can write into a tensor, as it does not where several elements are one place in memory."""
    return tensor.layout is not torch.strided or all(
        stride or size <= 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
