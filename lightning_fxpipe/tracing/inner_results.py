"""Tensors that leave a whole module by another way than its result: models of transformers collect router logits and
attention weights with hooks on modules deep inside, and use them in the loss at the top.

The recorder sees the calls inside a whole module, though it records none of them. If a tensor turns out to be the result of
one of them, the trace starts again with the whole module returning it, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_fxpipe._compat.torch import FakeTensor
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.pytree.structure import NotFillable, Template
from lightning_fxpipe.tracing.probe import Probe, ProbeFailed
from lightning_fxpipe.tracing.signals import HiddenTensor, InnerPlace, Learned, Lesson
from lightning_fxpipe.tracing.torch_calls import LOOKS


@dataclass
class _Run:
    """One run of a whole module: its path, and the results of the modules inside it by their relative path and number."""

    path: str
    results: dict[tuple[str, int], Any] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    was_made_up: bool = False
    read: Tensor | None = None  # the tensor whose values it was the first to read
    read_by: Callable[..., Any] = Tensor.item  # how it has done so

    def note(self, inside: str, result: Any) -> None:
        self.results[inside, self.counts[inside]] = result
        self.counts[inside] += 1


class InnerCalls:
    """The calls inside whole modules that a recorder has seen."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._is_inside = False
        self._made_up: list[tuple[str, Any]] = []  # results on made-up data, with the whole module's path
        self._is_made_up = False

    @contextmanager
    def of(self, path: str) -> Iterator[None]:
        """Notes the calls of the block to the whole module at ``path``."""
        self._runs.append(_Run(path))
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def note(self, path: str, result: Any) -> None:
        """A module has returned ``result``; ``path`` is relative to the root."""
        if self._is_made_up:
            self._made_up.append((self._runs[-1].path, result))
        elif self._is_inside:
            run = self._runs[-1]
            if path.startswith(f"{run.path}."):  # not one that it shares with others, and that has its path from them
                run.note(path[len(run.path) + 1 :], result)

    @contextmanager
    def on_made_up_data(self) -> Iterator[None]:
        """The calls of the block are made with data that means nothing."""
        before, self._is_made_up = self._is_made_up, True
        try:
            yield
        finally:
            self._is_made_up = before

    def try_call(self, call: Callable[[], Any], probe: Probe) -> Any:
        """Returns the result of a call; if the call reads values, ``probe`` makes it on made-up data."""
        try:
            return call()
        except Exception as error:
            try:
                with self.on_made_up_data():
                    return probe.result_for_any_numbers()[0]
            except ProbeFailed:
                raise error from None  # a module around it may do

    def starts_again(self) -> None:
        """The whole module that runs now runs once more, on made-up data: what it has let out, it lets out again."""
        self._runs[-1].was_made_up = True

    @property
    def whole_path(self) -> str | None:
        """Path of the whole module that runs now."""
        return self._runs[-1].path if self._is_inside and not self._is_made_up else None

    def note_call(self, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Notes a torch call inside a whole module."""
        if self._is_inside and func in LOOKS and self._runs[-1].read is None and isinstance(args[0], FakeTensor):
            self._runs[-1].read, self._runs[-1].read_by = args[0], func

    def read_by(self, own: Collection[int]) -> Callable[..., Any] | None:
        """How the last whole module has read values, of others than its ``own`` tensors, such as a count in a buffer."""
        run = self._runs[-1]
        return run.read_by if run.was_made_up and (run.read is None or id(run.read) not in own) else None

    def tensor(self, place: InnerPlace) -> Tensor:
        """A result in the last run.

        Raises:
            LookupError: There is no such result.
        """
        inside, number, index = place
        return _tensors(self._runs[-1].results[inside, number])[index]

    def way_to(self, tensor: Tensor, learned: Learned) -> Lesson | None:
        """How to get at a tensor that no node has made, if it is the result of a module inside a whole one.

        Raises:
            HiddenTensor: There is no way.
        """
        if not isinstance(tensor, FakeTensor):
            paths = {path for path, result in self._made_up for made in _tensors(result) if made is tensor}
            if paths and paths <= learned.probed_inside:
                raise HiddenTensor("a module that reads tensor values exposes it other than through its result")
            return self._probe_inside(learned) if paths else None
        for run in self._runs:
            for (inside, number), result in run.results.items():
                for index, made in enumerate(_tensors(result)):
                    if made is not tensor:
                        continue
                    place = (inside, number, index)
                    if run.was_made_up:
                        return self._probe_inside(learned) if run.path not in learned.probed_inside else None
                    is_taken = place in learned.inner_results.get(run.path, ())
                    return None if is_taken else partial(learned.add_inner_result, run.path, place)
        return None

    def _probe_inside(self, learned: Learned) -> Lesson:
        """For all that were made up: where one lets something out, those like it do."""
        return partial(learned.probed_inside.update, {run.path for run in self._runs if run.was_made_up})


def _tensors(result: Any) -> tuple[Tensor, ...]:
    try:
        return Template.of(result).tensors
    except NotFillable:
        return ()


@contextmanager
def taking(module: nn.Module, places: Sequence[InnerPlace]) -> Iterator[list[Tensor]]:
    """While the block calls the module, takes the results of modules inside; the list has them after the block, in order.

    Raises:
        UnsupportedError: The module makes other calls than when it was recorded.
    """
    run = _Run("")
    found: list[Tensor] = []

    def hook(inside: str) -> Any:
        return lambda module, args, result: run.note(inside, result)

    with ExitStack() as stack:
        for inside in dict.fromkeys(inside for inside, *_ in places):
            handle = module.get_submodule(inside).register_forward_hook(hook(inside))
            stack.callback(handle.remove)
        yield found
    for inside, number, index in places:
        try:
            found.append(_tensors(run.results[inside, number])[index])
        except LookupError:
            raise UnsupportedError(
                f"{type(module).__name__} makes different inner calls than when it was traced.",
                observed=f"{run.counts[inside]} calls of {inside}",
                expected=f"at least {number + 1}, whose result is used outside the module",
                todo="Make the same calls for every batch, or return the value from the module.",
            ) from None
