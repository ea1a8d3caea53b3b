"""The plan of a run: the given one, the one of the module's last run, or a new one from the first batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fxpipe._compat_lightning import first_batch
from lightning_fxpipe.messages import told
from lightning_fxpipe.microbatch import batch_size, default_num_microbatches, first_microbatch, tensors_without_batch
from lightning_fxpipe.plan import PartitionPlan
from lightning_fxpipe.planning import plan_regions
from lightning_fxpipe.region import StepCall, holds_any, trains
from lightning_fxpipe.step import StepKind
from lightning_fxpipe.support import check_batch_dim, check_has_batch, check_num_stages
from lightning_fxpipe.survey import first_regions

_STEPS = {
    TrainerFn.FITTING: StepKind.TRAIN,
    TrainerFn.VALIDATING: StepKind.VALIDATE,
    TrainerFn.TESTING: StepKind.TEST,
    TrainerFn.PREDICTING: StepKind.PREDICT,
}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the user says about the plan.

    Attributes:
        given: A plan to use instead of making one.
        num_stages: Number of stages, or ``"auto"``.
        num_microbatches: Microbatches of a batch; None chooses by the batch's size.
        batch_dim: Dimension of the batch in its tensors.
    """

    given: PartitionPlan | None
    num_stages: int | str
    num_microbatches: int | None
    batch_dim: int


class RunPlans:
    """Plans the runs of a strategy, one after the other.

    Args:
        options: What the user says about the plan.
    """

    def __init__(self, options: PlanOptions) -> None:
        self.options = options
        self._last: tuple[LightningModule, PartitionPlan, TrainerFn | None] | None = None

    def known(self, trainer: Trainer, module: LightningModule) -> PartitionPlan | None:
        """The plan of the module's last run, if it holds for this one: what trains decides."""
        if self._last is None or self._last[0] is not module:
            return None
        _, plan, planned_for = self._last
        if trainer.state.fn is TrainerFn.FITTING and planned_for is not TrainerFn.FITTING:
            return None
        return plan if plan.parameter_shapes == _shapes(module) else None

    def make(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        num_stages: int,
        device: torch.device,
        context: Callable[[StepKind], AbstractContextManager[None]],
    ) -> PartitionPlan:
        """The given plan, or one made by running the step that comes first on its first microbatch.

        Args:
            trainer: The Trainer, about to run.
            module: The module, whole.
            num_stages: As many as there are ranks.
            device: This rank's device.
            context: Makes the precision plugin's context for a step.

        Raises:
            UnsupportedError: There are fewer or more devices than stages, or no batch.
            FxPipeError: As :func:`lightning_fxpipe.planning.make_plan`.
        """
        options = self.options
        check_num_stages(options.num_stages, num_stages)
        plan = options.given
        if plan is not None:
            plan.check_fits(_shapes(module))
            check_num_stages(plan.num_stages, num_stages)
            check_batch_dim(options.batch_dim, plan.batch_dim)
        else:
            assert trainer.state.fn is not None
            kind = _STEPS[trainer.state.fn]
            batch = check_has_batch(first_batch(trainer))
            with (
                told(f"Tracing the {kind.words}", after_seconds=0),
                context(kind),
                torch.set_grad_enabled(kind is StepKind.TRAIN),
            ):
                plan = self._made(batch, module, kind, num_stages, device)
        self._last = module, plan, trainer.state.fn
        return plan

    def _made(
        self, batch: object, module: LightningModule, kind: StepKind, num_stages: int, device: torch.device
    ) -> PartitionPlan:
        dim = self.options.batch_dim
        count = self.options.num_microbatches or default_num_microbatches(batch_size(batch, dim), num_stages)
        microbatch, size = first_microbatch(batch, count, dim)
        found = first_regions(
            module,
            partial(StepCall.of_step, getattr(module, kind.value), microbatch),
            batch_size=size,
            batch_dim=dim,
            device=device,
            fallback=trains if kind is StepKind.TRAIN else holds_any,
        )
        plan = plan_regions(module, found, num_stages=num_stages, device=device)
        return dataclasses.replace(plan, batch_dim=dim, without_batch=tensors_without_batch(batch))


def _shapes(module: LightningModule) -> dict[str, tuple[int, ...]]:
    return {fqn: tuple(parameter.shape) for fqn, parameter in module.named_parameters()}
