"""Finds code that reads what other code has left for it in an object that both know.

A block may set a tensor on the next block, or put it in a list that all blocks have. Nothing inside a whole module is recorded,
so that a graph has no message for such a tensor, and a reader in another stage would find what was there before. If the graph
has the tensor, and the reader has it as an attribute, it is an operand of the reader (``tracing.kept_state``); else the call is
recorded once more, with the module open that has made it. What is in a list or a dict is not recorded: where one puts it in and
another takes it out, a list would only grow in one stage.

Numbers that a module's forward sets on it are refused where code outside of it reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe.errors import FxPipeError, UnsupportedError
from lightning_fxpipe.tracing.graph_writer import GraphWriter
from lightning_fxpipe.tracing.guards import GuardKey, name_of_guard
from lightning_fxpipe.tracing.kept_state import KeptState
from lightning_fxpipe.tracing.made_tensors import MadeTensors
from lightning_fxpipe.tracing.recorder_settings import RecorderSettings
from lightning_fxpipe.tracing.signals import Lesson, RecordError
from lightning_fxpipe.tracing.torch_calls import tensors_among
from lightning_fxpipe.user_code.frames import user_source
from lightning_fxpipe.user_code.step_code import attribute_uses

# Of questions about tensors, which are most calls, and have nothing to do with values.
_ANSWERS = frozenset({torch.Size, int, bool, torch.dtype, torch.device, torch.layout, torch.SymInt, torch.SymBool})


@dataclass(frozen=True)
class _Inside:
    """A whole module that runs: its path, and the ids of the tensors that its arguments bring."""

    path: str
    brought: Collection[int]


@dataclass(frozen=True)
class _Read:
    """A tensor that is used where no argument has brought it: who has made it, by whom it is used, and where; and which modules
    must be open for the graph to have it.
    """

    maker: str
    reader: str
    source: str | None
    to_open: Collection[str]


class StateReads:
    """Who has made which tensors, in one recording.

    Args:
        settings: What the recorder knows.
        lessons: Gets what else is to be known.
        writer: Writes the graph.
        made: Gets the tensors that whole modules make of inputs or weights.
        kept_state: Knows which tensors on modules come as operands.

    Attributes:
        refusal: Why what was recorded does not run in stages, if it does not.
    """

    def __init__(
        self,
        settings: RecorderSettings,
        lessons: list[Lesson],
        writer: GraphWriter,
        made: MadeTensors,
        kept_state: KeptState,
    ) -> None:
        self.refusal: UnsupportedError | None = None
        self._learned, self._modules = settings.learned, settings.modules.values()
        self._lessons, self._writer, self._kept_state = lessons, writer, kept_state
        self._made = made
        self._inside: _Inside | None = None
        self._read: _Read | None = None

    @contextmanager
    def of(self, path: str, brought: Iterable[Tensor]) -> Iterator[None]:
        """The block runs a whole module.

        Args:
            path: The module's.
            brought: The tensors among its arguments.

        Raises:
            RecordError: It has read what is left for it, and the graph cannot have that.
        """
        tensors = {id(tensor): tensor for tensor in brought}
        self._inside, self._read = _Inside(path, tensors.keys()), None
        for tensor in tensors.values():  # which it can leave, too
            if self._maker(tensor) is None:
                self._made.add(tensor, path)
        try:
            yield
        finally:
            self._inside = None
        if self._read is not None:
            self._open(self._read)

    def note(self, arguments: tuple[Any, ...], result: Any) -> None:
        """A torch call has been made inside a whole module.

        Args:
            arguments: Those of the call.
            result: What it gave.
        """
        inside = self._inside
        if inside is None or type(result) in _ANSWERS:
            return
        follows = False
        for tensor in tensors_among(arguments):
            maker = self._maker(tensor)
            follows |= maker is not None or isinstance(tensor, nn.Parameter)
            if maker not in (None, inside.path) and id(tensor) not in inside.brought and not self._kept_state.brings(tensor):
                self._note_read(tensor, inside.path)
        for tensor in tensors_among((result,)) if follows else ():
            if id(tensor) not in inside.brought:
                self._made.add(tensor, inside.path)

    def note_made(self, tensor: Tensor) -> None:
        """The whole module that runs has left a tensor of which it was not seen what it follows from."""
        if self._inside is not None:
            self._made.add(tensor, self._inside.path)

    def follows(self, tensor: Tensor) -> bool:
        """True for a tensor that follows from inputs or weights."""
        is_known = isinstance(tensor, nn.Parameter) or self._writer.has_from_code(tensor)
        return is_known or self._maker(tensor) is not None

    def is_made_inside(self, tensor: Tensor) -> bool:
        """Returns True if a tensor was made in a whole module, of inputs or weights."""
        return self._made.maker(tensor) is not None

    def _maker(self, tensor: Tensor) -> str | None:
        """The path of the module that has made a tensor; None where it follows neither from inputs nor from weights."""
        maker = self._made.maker(tensor)
        return self._writer.recorded_by(tensor) if maker is None else maker

    def _note_read(self, tensor: Tensor, reader: str) -> None:
        held = (chain(vars(module).values(), module.buffers(recurse=False)) for module in self._modules)
        if not any(value is tensor for value in chain.from_iterable(held)):
            self.refusal = self.refusal or _in_a_container(reader, self._maker(tensor))
        elif self._read is None:
            maker = self._maker(tensor) or ""
            to_open = {reader if self._writer.has(tensor) else maker}
            self._read = _Read(maker, reader, user_source(), to_open)

    def _open(self, read: _Read) -> None:
        paths = {*read.to_open} - self._learned.opened - self._learned.kept_whole.keys()
        if not paths:
            maker = read.maker or "the code that calls it"
            error = RecordError(f"{read.reader} uses a tensor that {maker} stored for it instead of passing it as an argument")
            error.source = read.source
            raise error
        self._lessons.append(partial(self._learned.open, paths))


def _in_a_container(reader: str, maker: str | None) -> UnsupportedError:
    return UnsupportedError(
        "Modules exchange tensors through a list, a dict or another object.",
        where=f"{reader}, {user_source() or 'source unknown'}",
        observed=f"a tensor of {maker or 'the code that calls it'}, which is neither an argument nor an attribute of a module",
        expected="arguments and results: another stage has a separate copy of the object",
        todo="Return the tensor, and pass it to the module that uses it as an argument.",
    )


def check_values_read(root: nn.Module, read: Iterable[GuardKey], left: Collection[GuardKey], label: str) -> None:
    """Refuses code that reads numbers and the like which a module's forward sets: in another stage they stay what they are.

    Args:
        root: The module.
        read: The attributes that recorded code has read.
        left: Those that whole modules have set while they ran.
        label: The code.

    Raises:
        FxPipeError: There are such. No other region, and no way to run the step, would be right.
    """
    names = sorted(name_of_guard(key) for key in read if key in left)
    if names:
        path, _, name = names[0].rpartition(".")
        raise FxPipeError(
            f"{label} reads values that the forward of a submodule sets: {', '.join(names)}.",
            where=attribute_uses(type(root.get_submodule(path)), name),
            observed="a number, or a tensor changed in place, which is not updated on ranks that do not run the submodule",
            expected="new tensors, which are sent between ranks, or values that the forward does not change",
            todo="Return the value from the forward, or set it to a new tensor there.",
        )
