"""The first batch of a run, for whoever plans the run: the loop trains on it, from the iterator from which it was taken.

A plan is made before Lightning's loops begin. So a loop sets up its dataloaders early, as it would itself, and their iterators
give one batch; then all that this has changed is undone (``user_code.undo.Postponed``), with the random generators, and the
loop's ``setup_data`` gives it what is there already:

1. the dataloaders, as if their hook had run only now. Where the generators or the attributes that the hook's code names differ
   by then (a checkpoint has been loaded, a hook has drawn random numbers), the hook runs again, on what it found first;
2. the iterators, with their workers, and the batch. Where the generators differ from then, or anything that the dataloaders
   reach does (``set_epoch``, another list of samples), iterators are made anew, which begin where the first ones did.

A stream that goes on from where it is cannot begin anew. Where step 2 would need that, the run is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, IterableDataset

from lightning_fxpipe._compat.loops import (
    SetUpLoop,
    as_combined,
    as_step_gets,
    begin_loader,
    has_loaders,
    loader_hook,
    loop_of_run,
    next_of_loader,
    renew_limits,
    set_epoch,
    unwatch_loader,
    watch_loader,
)
from lightning_fxpipe.data.skip_loading import Sparing
from lightning_fxpipe.distributed.agreement import gather_values
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.reporting.messages import logger
from lightning_fxpipe.rng import isolated_rng, rng_state, same_rng, set_rng_state
from lightning_fxpipe.user_code.snapshot import Snapshot, user_state
from lightning_fxpipe.user_code.step import StepKind
from lightning_fxpipe.user_code.step_code import code_of, codes_called
from lightning_fxpipe.user_code.undo import Postponed, undo_after

Rng = dict[str, Any]


class FirstBatches:
    """The first batches of a run's loops.

    Args:
        sparing: Knows the ranks that load data.
        until: Ends what no loop has taken by then.
    """

    def __init__(self, sparing: Sparing, until: ExitStack) -> None:
        self._sparing = sparing
        until.callback(self._close)
        self._peeked: dict[int, PeekedLoop] = {}
        self._shown = ExitStack()

    def batch(self, trainer: Any, kind: StepKind, *, of_validation: bool = False) -> Any:
        """A copy of the first batch of the loop that is about to run, as its step will get it; None if there is none.

        Args:
            trainer: The Trainer.
            kind: The step of the loop.
            of_validation: Whether it is the loop of the validation within a fit.
        """
        item = self._of_loop(trainer, kind, of_validation=of_validation).item
        if item is None:
            return None
        with isolated_rng(), undo_after(trainer.lightning_module):
            return as_step_gets(trainer, _copied(item[0]))

    def _of_loop(self, trainer: Any, kind: StepKind, *, of_validation: bool = False) -> PeekedLoop:
        loop = loop_of_run(trainer, of_validation=of_validation)
        if id(loop) not in self._peeked:
            peeked = self._peeked[id(loop)] = PeekedLoop(loop, self._sparing)
            with self._sparing.loading_for(kind):
                peeked.look()
            self._shown.enter_context(peeked.shown())
        return self._peeked[id(loop)]

    def set_up_validation(self, trainer: Any) -> None:
        """Sets up the dataloaders of a validation, if the run has one. Called by every rank."""
        if trainer.state.fn in (TrainerFn.FITTING, TrainerFn.VALIDATING):
            self._of_loop(trainer, StepKind.VALIDATE, of_validation=trainer.state.fn == TrainerFn.FITTING)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """In the block the Trainer answers as if each loop that is peeked at had set up its dataloaders."""
        with ExitStack() as self._shown:
            yield
        self._shown = ExitStack()

    def _close(self) -> None:
        for peeked in self._peeked.values():
            peeked.close()
        self._peeked.clear()


class PeekedLoop:
    """A loop that has set up its dataloaders before the run.

    Args:
        loop: The loop.
        sparing: Knows the ranks that load data.

    Attributes:
        item: What its dataloaders return first: a batch, its number and that of its dataloader; None if there is nothing.
    """

    def __init__(self, loop: Any, sparing: Sparing) -> None:
        self.item: Any = None
        self._loop, self._sparing = loop, sparing
        self._module = loop.trainer.lightning_module
        self._combined: Any = None
        self._set_up: SetUpLoop | None = None
        self._hook: _Hook | None = None
        self._is_taken = False  # by the loop
        self._rng_before_begin: Rng = {}

    def look(self) -> None:
        """Sets up the dataloaders and takes the first batch. Called by every rank."""
        if not has_loaders(self._loop):
            return
        with isolated_rng():
            self._set_up = SetUpLoop(self._loop, self._request)
        if self.item is None:
            self.close()
        else:
            self._loop.setup_data = self._hand_over

    def shown(self) -> AbstractContextManager[Any]:
        """In this context the Trainer answers as if the loop had set up its dataloaders."""
        return nullcontext() if self._set_up is None else self._set_up.shown()

    def close(self) -> None:
        """The loop sets up its dataloaders by itself."""
        vars(self._loop).pop("setup_data", None)
        if self._combined is not None and "watching" in vars(self._combined):
            unwatch_loader(self._combined)
            if not self._is_taken:  # else the loop ends its iterators
                self._combined.reset()

    def _request(self, request: Callable[[], Any]) -> Any:
        self._hook = _Hook(self._module, self._loop)
        loaders = self._hook.run(request)
        self._combined = as_combined(self._loop, loaders)
        watch_loader(self._combined, self._begin, self._advance)
        return self._combined

    def _hand_over(self) -> None:
        """Takes the place of the loop's ``setup_data``, once."""
        del self._loop.setup_data
        assert self._hook is not None and self._set_up is not None
        if not self._agreed(self._hook.would_return_the_same()):
            self.close()
            self._loop.setup_data()
            return
        self._is_taken = True
        self._hook.run_again()
        if self._set_up.hand_over():
            self._stop()
        self._set_up.begin()

    def _begin(self) -> None:
        if not self._is_taken:
            self._take_first()
            return
        before, begun, after = self._rng
        now = self._rng_before_begin = rng_state()
        seeds = None if same_rng(now, before) else _seeds_drawn(before, begun, len(self._combined.flattened))
        draws_alike = same_rng(now, before) or (seeds is not None and same_rng(begun, after))
        if not self._agreed(draws_alike and self._state.is_current()):
            self._begin_anew()
            return
        if seeds is None:
            set_rng_state(begun)
        else:
            _draw_seeds(seeds)
        renew_limits(self._combined)

    def _take_first(self) -> None:
        loaders = self._combined.flattened
        self._has_workers = any(getattr(loader, "num_workers", 0) for loader in loaders)
        reached = Snapshot({"dataloaders": loaders}, enters_modules=False)
        is_stream = any(not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) for loader in loaders)
        lasting = [*(cls.__name__ for cls in reached.left_alone), *["iterator"] * reached.has_iterators]
        self._lasting = sorted(lasting) if is_stream else []
        self._state = Postponed(reached, watches_tensors=not self._has_workers)
        self._rng = (rng_state(),) * 3
        with self._state:
            begin_loader(self._combined)
            begun = rng_state()
            set_epoch(self._loop, self._combined)
            with suppress(StopIteration):
                self.item = next_of_loader(self._combined)
            self._rng = (self._rng[0], begun, rng_state())

    def _advance(self) -> Any:
        if not self._is_taken:  # the loop looks whether there is a batch at all
            if self.item is None:
                raise StopIteration
            return self.item
        _, begun, after = self._rng
        now = rng_state()
        draws_alike = same_rng(now, begun) or same_rng(begun, after)
        if self._agreed(draws_alike and (self._has_workers or self._state.is_current())):
            unwatch_loader(self._combined)
            self._state.again()
            if same_rng(now, begun):
                set_rng_state(after)
            return self.item
        set_rng_state(self._rng_before_begin)
        self._begin_anew()
        set_rng_state(now)
        return next_of_loader(self._combined)

    def _begin_anew(self) -> None:
        if self._lasting:
            raise _cannot_begin_anew(self._combined.flattened, self._lasting)
        self._stop()
        begin_loader(self._combined)

    def _stop(self) -> None:
        """Ends the iterators."""
        if "watching" in vars(self._combined):
            unwatch_loader(self._combined)
            self._combined.reset()

    def _agreed(self, vote: bool) -> bool:
        return all(gather_values(self._sparing.everyone, vote))


class _Hook:
    """The hook that returns a loop's dataloaders; or nothing, if they were passed to the Trainer."""

    def __init__(self, module: Any, loop: Any) -> None:
        self._module, self._loop = module, loop
        owner, self._name = loader_hook(loop) or (None, "")
        self._owner: Any = owner
        self._before = rng_state()

    def run(self, request: Callable[[], Any]) -> Any:
        """Runs it and undoes what it changes."""
        self._place, self._read = self._where(), self._values()
        self._named = Snapshot({"attributes": self._read}, enters_modules=False)
        self._changes = Postponed(user_state(self._module) if self._owner is not None else Snapshot({}))
        with self._changes:
            loaders = request()
        self._after = rng_state()
        return loaders

    def would_return_the_same(self) -> bool:
        """True if what the hook may read is as it was."""
        now = self._values()
        is_same = now.keys() == self._read.keys() and all(value is self._read[name] for name, value in now.items())
        draws_alike = same_rng(rng_state(), self._before) or same_rng(self._before, self._after)
        return draws_alike and is_same and self._where() == self._place and self._named.is_current()

    def run_again(self) -> None:
        """Makes what it has changed."""
        self._changes.again()
        if not same_rng(self._before, self._after):
            set_rng_state(self._after)

    def _values(self) -> dict[str, Any]:
        """The attributes that the hook's code names, of the module or datamodule that has it."""
        code = None if self._owner is None else code_of(getattr(self._owner, self._name))
        if code is None:
            return {}
        names: set[str] = set()
        for called in codes_called(type(self._owner), code):
            names |= {*called.co_names, *(each for each in called.co_consts if isinstance(each, str))}  # as for `getattr`
        attributes = vars(self._owner)
        return {each: attributes[each] for name in names for each in (name, f"_{name}") if each in attributes}

    def _where(self) -> tuple[int, int] | None:
        trainer = self._loop.trainer
        return None if self._owner is None else (trainer.current_epoch, trainer.global_step)


def _copied(batch: Any) -> Any:
    try:
        return copy.deepcopy(batch)
    except Exception as error:  # such as a generator
        logger.debug("The first batch cannot be copied: %s", error)
        return batch


def _seeds_drawn(before: Rng, after: Rng, most: int) -> int | None:
    """The number of seeds for workers that dataloaders have drawn, if they have drawn nothing else: it is one for each."""
    with isolated_rng():
        set_rng_state(before)
        for number in range(most + 1):
            if same_rng(rng_state(), after):
                return number
            _draw_seeds(1)
    return None


def _draw_seeds(count: int) -> None:
    for _ in range(count):
        torch.empty((), dtype=torch.int64).random_()


def _cannot_begin_anew(loaders: list[Any], lasting: list[str]) -> UnsupportedError:
    data = [getattr(loader, "dataset", loader) for loader in loaders]
    return UnsupportedError(
        "The first batch was read before the run, but its data stream cannot be restarted.",
        where=", ".join(type(each).__name__ for each in data),
        observed=f"random numbers drawn or attributes set afterwards, and data that does not restart ({', '.join(lasting)})",
        expected="a stream whose first batch is the same before and after hooks run",
        todo="Use a separate random generator in the stream, draw random numbers in hooks after the first batch, or set "
        "FxPipeStrategy(plan=...) to a plan from lightning_fxpipe.make_plan: then no batch is read in advance.",
    )
