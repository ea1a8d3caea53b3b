"""A step's own calls of its loggers: ``self.logger.log_metrics(...)``, ``self.logger.experiment.add_scalar(...)``.

Made by each microbatch, they would write a line for each. They are noted and made once for the batch, with the microbatches'
arguments put together (:func:`lightning_fxpipe.joining.joined_log`). They reach the logger on rank 0 only, as on one device:
Lightning's loggers are silent elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_fxpipe._compat import patched_attributes, tree_map
from lightning_fxpipe.batchvalues import of_batch
from lightning_fxpipe.joining import Arguments, BatchLoss, joined_log

# What an experiment's methods that write are called: `add_scalar`, `log`, `log_metric`, ... Others are asked for their result.
_WRITING = ("add_", "log")


@dataclass(kw_only=True)
class _Call:
    """One call that the step makes, over the microbatches."""

    function: Callable[..., Any]
    arguments: list[Arguments] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


class LoggerCalls:
    """Notes what a batch's microbatches write to loggers themselves."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int], _Call] = {}
        self._repeats: dict[str, int] = {}
        self._size = 0

    def begin_microbatch(self, size: int) -> None:
        """Later calls belong to a microbatch of ``size`` samples."""
        self._size = size
        self._repeats = {}

    @contextmanager
    def capture(self, module: nn.Module) -> Iterator[None]:
        """During the block the loggers of the module's Trainer note what is written."""
        trainer: Any = vars(module).get("_trainer")
        patches: list[tuple[Any, str, Any]] = []
        for number, logger in enumerate(getattr(trainer, "loggers", ())):
            patches.append((logger, "log_metrics", self._noting(f"{number}", logger.log_metrics)))
            experiment = getattr(type(logger), "experiment", None)
            if isinstance(experiment, property) and not any(owner is type(logger) for owner, *_ in patches):
                patches.append((type(logger), "experiment", self._watched(experiment)))
        with patched_attributes(*patches):
            yield

    def _watched(self, experiment: property) -> property:
        """The property of a logger's class, giving an experiment whose methods that write are noted."""
        getter: Any = experiment.fget

        def get(logger: Any) -> Any:
            return _Watched(getter(logger), lambda name, method: self._noting(f"{id(logger)}.{name}", method))

        return property(get)

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., None]:
        original = getattr(function, "original", function)  # a batch may be noted while another is

        def note(*args: Any, **kwargs: Any) -> None:
            if not self._size:
                return  # a trace
            repeat = self._repeats.get(name, 0)
            self._repeats[name] = repeat + 1
            call = self._calls.setdefault((name, repeat), _Call(function=original))
            call.arguments.append(tree_map(_kept, (args, kwargs)))
            call.sizes.append(self._size)

        note.original = original  # type: ignore[attr-defined]
        return note

    def run(self, loss: BatchLoss) -> None:
        """Makes the calls for the batch. Called on the last stage when all microbatches have run, and metrics have counted.

        Args:
            loss: The losses of the microbatches.
        """
        for call in self._calls.values():
            args, kwargs = joined_log([of_batch(arguments) for arguments in call.arguments], call.sizes, loss)
            call.function(*args, **kwargs)


class _Watched:
    """An experiment; passes for it, but notes what is written."""

    def __init__(self, experiment: Any, noting: Callable[[str, Callable[..., Any]], Callable[..., None]]) -> None:
        self._experiment = experiment
        self._noting = noting

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what `isinstance` asks
        return type(self._experiment)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experiment, name)
        return self._noting(name, value) if callable(value) and name.startswith(_WRITING) else value


def _kept(leaf: Any) -> Any:
    """An argument as it is now: the step may go on to change it."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
