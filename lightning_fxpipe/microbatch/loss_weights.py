"""How the losses of the microbatches make the loss of the batch: with which weights, and whether they do.

A loss that is a mean over samples is the mean of the microbatches' losses weighted by size; a sum is their sum; a mean over
tokens is weighted by the number of tokens, which only the user's own function can count. Some losses (contrastive ones, those
with a batch statistic) are none of these.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.pytree.sizes import held_number, plain_numbers
from lightning_fxpipe.rng import isolated_rng

LossReductionName = Literal["auto", "mean", "sum"]
LossWeight = Callable[[Any], "float | Tensor"]


class LossReduction(Enum):
    """How a loss depends on the number of samples."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options of the user about the loss.

    Attributes:
        reduction: What it is; None to find out.
        weight: Weighs a microbatch in the mean; None weighs it by its samples.
    """

    reduction: LossReduction | None = None
    weight: LossWeight | None = None

    @classmethod
    def of(cls, loss_reduction: str, loss_weight: str | LossWeight | None) -> LossOptions:
        """From the strategy's arguments.

        Raises:
            ValueError: They contradict each other, or name something that does not exist.
        """
        if loss_reduction not in ("auto", "mean", "sum"):
            raise ValueError(f"loss_reduction={loss_reduction!r}: expected 'auto', 'mean' or 'sum'")
        if loss_weight is not None and loss_reduction == "sum":
            raise ValueError("loss_weight weights the microbatches of a mean, but loss_reduction='sum' declares a sum")
        weight = imported_weight(loss_weight) if isinstance(loss_weight, str) else loss_weight
        if weight is not None and not callable(weight):
            raise ValueError(f"loss_weight={loss_weight!r}: expected a function of a batch or its import path")
        reduction = None if loss_reduction == "auto" else LossReduction(loss_reduction)
        return cls(reduction=LossReduction.MEAN if weight is not None else reduction, weight=weight)

    def weights(self, reduction: LossReduction, microbatches: Sequence[Any], sizes: Sequence[int]) -> tuple[float, ...]:
        """Factor of each microbatch's loss in the batch's loss.

        Raises:
            UnsupportedError: The user's function gives weights that make no mean.
        """
        if self.weight is None:
            return loss_weights(reduction, sizes)
        with torch.no_grad(), isolated_rng():
            (counts,) = plain_numbers([held_number(self.weight(microbatch)) for microbatch in microbatches])
        if any(not math.isfinite(count) or count < 0 for count in counts) or not any(counts):
            raise UnsupportedError(
                "The loss_weight function returned invalid weights.",
                where=getattr(self.weight, "__qualname__", None),
                observed=f"{counts} for the microbatches of one batch",
                expected="non-negative numbers, at least one of them positive",
                todo="Return the denominator of the loss, such as the number of non-padding tokens.",
            )
        return tuple(count / sum(counts) for count in counts)


def loss_weights(reduction: LossReduction, sizes: Sequence[int]) -> tuple[float, ...]:
    """Factor of each microbatch's loss for microbatches of these sizes.

    >>> loss_weights(LossReduction.MEAN, [3, 1])
    (0.75, 0.25)
    >>> loss_weights(LossReduction.SUM, [3, 1])
    (1.0, 1.0)
    """
    if reduction is LossReduction.SUM:
        return (1.0,) * len(sizes)
    return tuple(size / sum(sizes) for size in sizes)


def weighted_sum(values: Sequence[float], weights: Sequence[float]) -> float:
    """The batch's value. A microbatch of weight zero does not count, whatever its value: a mean over no tokens is nan."""
    return math.fsum(value * weight for value, weight in zip(values, weights, strict=True) if weight)


def imported_weight(path: str) -> Any:
    """The object at an import path such as ``package.module.function`` or ``package.module.Class.method``.

    Raises:
        ValueError: There is none.
    """
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if error.name is not None and not f"{path}.".startswith(f"{error.name}."):
                raise  # the module is there, and what it imports is not
            continue
        for name in parts[count:]:
            if not hasattr(found, name):
                raise ValueError(f"loss_weight={path!r}: {'.'.join(parts[:count])} has no {'.'.join(parts[count:])}")
            found = getattr(found, name)
        return found
    raise ValueError(f"loss_weight={path!r}: no such module; expected a path such as 'package.module.function'")


# --------------------------------------------------------------------------------------------------- comparing


_NAMES = {LossReduction.MEAN: "weighted mean", LossReduction.SUM: "sum"}


class Verdict(Enum):
    """Outcomes of the comparison of a batch with its microbatches."""

    FITS = "fits"
    DIFFERS = "differs"
    UNCLEAR = "unclear"  # such as losses that are zero: another batch may tell


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a check of the loss.

    Attributes:
        verdict: The kind of result.
        reduction: What the loss is; also where the user says that it is another.
        observed: The losses; empty where they fit.
        only_logs_loss: Whether the step does nothing with its loss but log it.
        changes_nothing: Whether the step has changed nothing that stays.
        unused: Numbers of the region's results that train, but not by this loss.
    """

    verdict: Verdict
    reduction: LossReduction | None = None
    observed: str = ""
    only_logs_loss: bool = False
    changes_nothing: bool = False
    unused: frozenset[int] = frozenset()


def tolerance(dtype: torch.dtype) -> float:
    """Relative difference up to which two losses of this type are equal but for the order of their sums."""
    eps = torch.finfo(dtype).eps
    return 128 * eps if eps < 1e-5 else 4 * eps


def compare(
    whole: float,
    losses: Sequence[float],
    sizes: Sequence[int],
    options: LossOptions,
    weights: Sequence[float],
    dtype: torch.dtype,
) -> Finding:
    """Compares the loss of a whole batch with the losses of its microbatches.

    Args:
        whole: Loss of the batch in one piece.
        losses: Losses of its microbatches.
        sizes: Samples in each.
        options: What the user says about the loss.
        weights: The factors in use.
        dtype: Type of the losses.
    """
    if options.weight is not None:
        expected = {LossReduction.MEAN: weighted_sum(losses, weights)}
    else:
        expected = {kind: weighted_sum(losses, loss_weights(kind, sizes)) for kind in LossReduction}
    counted = [abs(loss) for loss, weight in zip(losses, weights, strict=True) if weight]
    scale = max(abs(whole), sum(counted) / len(counted))
    is_zero = scale <= 8 * torch.finfo(dtype).eps  # or what rounding has left of it
    fitting = [kind for kind, value in expected.items() if abs(whole - value) <= tolerance(dtype) * max(scale, abs(value))]
    if is_zero or len(fitting) > 1 or not all(map(math.isfinite, (whole, *expected.values()))):
        return Finding(verdict=Verdict.UNCLEAR)
    if fitting and options.reduction in (None, fitting[0]):
        return Finding(verdict=Verdict.FITS, reduction=fitting[0])
    parts = " or ".join(f"{value:.7g} as their {_NAMES[kind]}" for kind, value in expected.items())
    observed = f"{whole:.7g} for the whole batch, {parts} from its {len(losses)} microbatches"
    return Finding(verdict=Verdict.DIFFERS, reduction=fitting[0] if fitting else None, observed=observed)
