"""A call of one of the module's steps by Lightning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn


class StepKind(Enum):
    """Which of the module's steps runs."""

    TRAIN = "training_step"
    VALIDATE = "validation_step"
    TEST = "test_step"
    PREDICT = "predict_step"

    @property
    def words(self) -> str:
        """Name in a sentence."""
        return self.value.replace("_", " ")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A call of one of the module's steps by Lightning.

    Attributes:
        kind: Which step.
        function: The bound method.
        rest: Its arguments after the batch.
        context: Makes the precision plugin's context for it.
        random_key: Identifies the batch within the run, for the stages' random numbers.
        scale: Says, in training, by which the loss is probably multiplied before its backward pass.
        outdated: Parameters whose gradients are not read any more once the step has reached the model.
        gradients_may_stay: True if no code reads the gradients from then on until the backward pass is over, nor sets them to
            zero: new ones may be there at once.
    """

    kind: StepKind
    function: Callable[..., Any]
    rest: tuple[Any, ...]
    context: Callable[[], AbstractContextManager[Any]]
    random_key: tuple[int | str, ...]
    scale: Callable[[], float] = lambda: 1.0
    outdated: Sequence[nn.Parameter] = ()
    gradients_may_stay: bool = False

    def drop_outdated(self) -> None:
        """Drops the gradients of :attr:`outdated`, as Lightning's ``zero_grad`` would do a moment later."""
        for parameter in self.outdated:
            parameter.grad = None

    @property
    def is_training(self) -> bool:
        """True if a backward pass follows."""
        return self.kind is StepKind.TRAIN


def loss_of(result: Any) -> Tensor | None:
    """The loss in what a training step returned."""
    loss = result.get("loss") if isinstance(result, dict) else result
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None
