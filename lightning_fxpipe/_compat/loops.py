"""The loops of Lightning's Trainer: their dataloaders, set up before the run.

No part of a loop that has to do with its dataloaders has a public name. Lightning 2.6. Each function has a canary in
``tests/_compat/test_loops.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from lightning_fxpipe._compat.roots import in_all_roots, of_root, root_name
from lightning_fxpipe._compat.torch import patched_attributes

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def loop_of_run(trainer: Trainer, *, of_validation: bool = False) -> Any:
    """The loop that is about to run; with ``of_validation`` that of the validation within a fit."""
    from lightning.pytorch.trainer.states import TrainerFn

    assert trainer.state.fn is not None
    if trainer.state.fn == TrainerFn.FITTING:
        return trainer.fit_loop.epoch_loop.val_loop if of_validation else trainer.fit_loop
    names = {TrainerFn.VALIDATING: "validate", TrainerFn.TESTING: "test"}
    return getattr(trainer, f"{names.get(trainer.state.fn, 'predict')}_loop")


def has_loaders(loop: Any) -> bool:
    """True if dataloaders are defined for a loop."""
    return bool(loop._data_source.is_defined())


LOADER_NAMES = ("train_dataloader", "val_dataloaders", "test_dataloaders", "predict_dataloaders")


def loaders_of(trainer: Any) -> dict[str, Any]:
    """The dataloaders that the Trainer's properties of these names return; without those that no loop has set up."""
    fit_loop = getattr(trainer, "fit_loop", None)
    if fit_loop is None:
        return {}
    val_loop = fit_loop.epoch_loop.val_loop
    val_loop = trainer.validate_loop if val_loop._combined_loader is None else val_loop
    loops = (fit_loop, val_loop, trainer.test_loop, trainer.predict_loop)
    loaders = {name: loop._combined_loader for name, loop in zip(LOADER_NAMES, loops, strict=True)}
    return {name: combined.iterables for name, combined in loaders.items() if combined is not None}


def loader_hook(loop: Any) -> tuple[Any, str] | None:
    """The LightningModule or datamodule and the name of its hook that returns a loop's dataloaders; None without a hook."""
    source = loop._data_source
    return (source.instance, source.name) if source.is_module() else None


class SetUpLoop:
    """The attributes that a loop and its Trainer get when the loop sets up its dataloaders, which the loop does not have yet.

    Args:
        loop: The loop.
        request: Gets the function that requests the dataloaders, and returns them as one ``CombinedLoader``.

    Attributes:
        combined: The dataloaders of the loop; None if it needs none, as with ``limit_train_batches=0``.
    """

    def __init__(self, loop: Any, request: Callable[[Callable[[], Any]], Any]) -> None:
        self._loop = loop
        self._owners = (vars(loop), vars(loop.trainer))
        self._before = [dict(attributes) for attributes in self._owners]
        source = loop._data_source

        def requested() -> Any:
            return request(partial(type(source).dataloader, source))

        try:
            with patched_attributes((source, "dataloader", requested)), _stage(loop):
                loop.setup_data()
            self.combined = loop._combined_loader
            if self.combined is not None and not _is_fit(loop):  # as evaluation loops do when they begin
                self.combined.limits = getattr(loop, "_max_batches", None) or loop.max_batches
                iter(self.combined)
        finally:
            self._changed = [
                {name: value for name, value in now.items() if old.get(name, _ABSENT) is not value}
                for now, old in zip(self._owners, self._before, strict=True)
            ]
            self._hide()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """In the block the Trainer answers as if its loop had set up its dataloaders."""
        self._show()
        try:
            yield
        finally:
            self._hide()

    def hand_over(self) -> bool:
        """Makes the loop as if it had just set up its dataloaders.

        Returns:
            True if they have been given the state of a checkpoint.
        """
        loop, trainer = self._loop, self._loop.trainer
        self._show()
        if not _is_fit(loop):
            return False
        for name in ("_train_start_time", "_last_val_time"):
            if name in self._changed[1]:
                setattr(trainer, name, time.monotonic())
        loop._last_train_dl_reload_epoch = trainer.current_epoch
        is_restored = loop.restarting and bool(loop._combined_loader_states_to_load)
        loop._load_combined_loader_states()
        return is_restored

    def begin(self) -> None:
        """Makes the iterators, if the loop makes them when it sets up its dataloaders."""
        if _is_fit(self._loop):
            iter(self._loop._data_fetcher)

    def _show(self) -> None:
        for attributes, changed in zip(self._owners, self._changed, strict=True):
            attributes.update(changed)

    def _hide(self) -> None:
        for attributes, old, changed in zip(self._owners, self._before, self._changed, strict=True):
            for name in changed:
                attributes.pop(name, None)
            attributes.update({name: value for name, value in old.items() if name in changed})


_ABSENT: Any = object()


def _is_fit(loop: Any) -> bool:
    return hasattr(loop, "epoch_loop")


@contextmanager
def _stage(loop: Any) -> Iterator[None]:
    """In the block the Trainer is in the stage in which the loop will set up its dataloaders."""
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn

    trainer = loop.trainer
    before = trainer.state.stage
    if trainer.state.fn == TrainerFn.FITTING and loop is not trainer.fit_loop:
        is_checked = trainer.num_sanity_val_steps > 0 and not loop.restarting
        trainer.state.stage = RunningStage.SANITY_CHECKING if is_checked else RunningStage.VALIDATING
    try:
        yield
    finally:
        trainer.state.stage = before


def as_combined(loop: Any, loaders: Any) -> Any:
    """The dataloaders of a loop as the ``CombinedLoader`` that it would make of them."""
    from lightning.pytorch.utilities import CombinedLoader

    if isinstance(loaders, in_all_roots(CombinedLoader)):
        return loaders
    mode = "max_size_cycle" if _is_fit(loop) else "sequential"
    kinds: Any = in_all_roots(CombinedLoader)
    return kinds[-1 if root_name(loop.trainer) == "pytorch_lightning" else 0](loaders, mode)


def watch_loader(combined: Any, begin: Callable[[], None], advance: Callable[[], Any]) -> None:
    """Has ``iter()`` of a ``CombinedLoader`` call ``begin``, and ``next()`` return what ``advance`` returns."""
    kind: Any = type(combined)
    combined.__class__ = _watched_kind(kind)
    combined.watching = (begin, advance)


def unwatch_loader(combined: Any) -> None:
    """Makes the loader what it was before :func:`watch_loader`."""
    combined.__class__ = type(combined).__base__
    del combined.watching


@cache
def _watched_kind(kind: Any) -> Any:
    def iterate(self: Any) -> Any:
        self.watching[0]()
        return self

    def advance(self: Any) -> Any:
        return self.watching[1]()

    return type(kind.__name__, (kind,), {"__iter__": iterate, "__next__": advance, "__module__": kind.__module__})


def begin_loader(combined: Any) -> None:
    """Makes the iterators of a ``CombinedLoader`` anew, whether it is watched or not."""
    from lightning.pytorch.utilities import CombinedLoader

    of_root(CombinedLoader, combined).__iter__(combined)


def next_of_loader(combined: Any) -> Any:
    """The next batch of a ``CombinedLoader``, with the numbers of the batch and of the dataloader."""
    from lightning.pytorch.utilities import CombinedLoader

    return of_root(CombinedLoader, combined).__next__(combined)


def renew_limits(combined: Any) -> None:
    """Gives iterators that are there already the limits that have been set since."""
    combined._iterator.limits = combined._limits


def set_epoch(loop: Any, combined: Any) -> None:
    """Tells samplers the epoch, as loops do before they ask for the first batch."""
    from lightning.fabric.utilities.data import _set_sampler_epoch

    for loader in combined.flattened:
        _set_sampler_epoch(loader, loop.trainer.fit_loop.epoch_progress.current.processed)


def as_step_gets(trainer: Any, batch: Any) -> Any:
    """A batch on its way from the dataloader to the step: precision, hooks and device."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def first_loader_batch(loaders: Any) -> Any:
    """The first batch that training on one or several dataloaders would get."""
    from lightning.pytorch.utilities import CombinedLoader

    combined = loaders if isinstance(loaders, in_all_roots(CombinedLoader)) else CombinedLoader(loaders, "max_size_cycle")
    try:
        return next(iter(combined))[0]
    finally:
        combined.reset()
