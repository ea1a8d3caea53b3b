"""Lightning's call of one of the module's steps, as the runtime takes it."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning_fxpipe._compat.lightning import batch_counter
from lightning_fxpipe.optim.precision import PipelinePrecision, step_context
from lightning_fxpipe.user_code.step import Step, StepKind


def step_of_call(
    module: Any,
    kind: StepKind,
    rest: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    seed: int,
    precision: PipelinePrecision | None,
) -> Step:
    """The step of a call.

    Args:
        module: The LightningModule.
        kind: Which of its steps is called.
        rest: The call's arguments after the batch.
        kwargs: Its keyword arguments.
        seed: Of the run's random numbers.
        precision: Says by which the loss is multiplied.
    """
    trainer = module.trainer
    function = getattr(module, kind.value)
    return Step(
        kind=kind,
        function=partial(function, **kwargs) if kwargs else function,
        rest=rest,
        context=partial(step_context, trainer.precision_plugin, kind),
        random_key=(seed, kind.value, batch_counter(trainer, kind.value), *(r for r in rest if isinstance(r, int))),
        scale=lambda: precision.scale() / trainer.accumulate_grad_batches if precision else 1.0,
    )
