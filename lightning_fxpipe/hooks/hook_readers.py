"""Which hooks of user code read batches and results of steps: what ranks must receive that do not compute it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_fxpipe._compat.roots import in_all_roots, of_root
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.hooks.hook_code import BATCH_HOOKS
from lightning_fxpipe.pytree.portable import sendable
from lightning_fxpipe.user_code.bytecode import loaded_variables


@dataclass(frozen=True, kw_only=True)
class Readers:
    """Names of hooks.

    Attributes:
        of_outputs: Those that read what a step returned.
        of_batches: Those that read batches.
        returns_predictions: True if ``trainer.predict`` returns what steps return.
        changes_batches: True if user code receives each batch between the loader and the step.
    """

    of_outputs: frozenset[str] = frozenset()
    of_batches: frozenset[str] = frozenset()
    returns_predictions: bool = False
    changes_batches: bool = False

    @classmethod
    def among(cls, hooks: Sequence[tuple[Any, str]], trainer: Trainer, module: LightningModule) -> Readers:
        """Returns those among the hooks of a run."""
        kinds = in_all_roots(BasePredictionWriter)
        return cls(
            of_outputs=_readers(hooks, "output"),
            of_batches=_readers([(owner, name) for owner, name in hooks if not isinstance(owner, kinds)], "batch"),
            returns_predictions=bool(trainer.predict_loop.return_predictions),
            changes_batches=_changes_batches(trainer, module),
        )

    def see_batches(self, step: str) -> bool:
        """True if user code besides the step reads its batches, on their way to the step or in a hook."""
        names = {f"on_{_short(step)}_batch_{moment}" for moment in ("start", "end")}
        return self.changes_batches or bool(names & self.of_batches)

    def sendable_output(self, step: str, output: Any) -> tuple[Any, ...]:
        """Returns a step's output for a batch, on the CPU, if other ranks lack and need it: a hook of user code reads it, or
        ``trainer.predict`` returns it.

        Returns:
            The output alone, or nothing.
        """
        name = f"on_{_short(step)}_batch_end"
        is_read, is_returned = name in self.of_outputs, step == "predict_step" and self.returns_predictions
        # A loss is known on every rank.
        if not (is_read or is_returned) or output is None or (step == "training_step" and isinstance(output, Tensor)):
            return ()

        def refusal(observed: str) -> UnsupportedError:
            return UnsupportedError(
                f"The {step} returns a value that {name} cannot receive on the other ranks.",
                observed=observed,
                expected="tensors and plain values: only the last stage runs the step to its end, and sends the result",
                todo="Return a tensor, a number or a dict of them.",
            )

        try:
            return (sendable(output, refusal),)
        except UnsupportedError:
            if is_read:
                raise
            return ()  # rank 0 returns it, the others None


def _short(step: str) -> str:
    """Returns a step's name in those of hooks."""
    return step.removesuffix("_step").replace("training", "train")


def _changes_batches(trainer: Trainer, module: LightningModule) -> bool:
    """True if user code receives each batch between the loader and the step."""
    data: Any = getattr(trainer, "datamodule", None)
    owners = [(module, of_root(LightningModule, module))]
    owners += [(data, of_root(LightningDataModule, data))] if data is not None else []
    return any(is_overridden(name, owner, kind) for owner, kind in owners for name in BATCH_HOOKS)


def _readers(hooks: Iterable[tuple[Any, str]], argument: str) -> frozenset[str]:
    """The hooks that look at their argument with such a name, or may do so."""
    return frozenset(name for owner, name in hooks if _reads(getattr(owner, name), name, argument))


def _reads(hook: Callable[..., Any], name: str, argument: str) -> bool:
    """True if an ``on_..._batch_...`` hook looks at its argument with the step's outputs, or at its batch."""
    if not re.fullmatch("on_.*_batch_(end|start)", name) or (argument == "output" and name.endswith("_start")):
        return False
    function = inspect.unwrap(hook)
    code = getattr(function, "__code__", None)
    parameters = list(inspect.signature(hook).parameters.values())
    found = {p.name for p in parameters if argument in p.name and not p.name.startswith("batch_i")}
    if code is None or len(found) != 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True
    (variable,) = found
    if variable in code.co_cellvars:
        return True
    return variable in loaded_variables(code)
