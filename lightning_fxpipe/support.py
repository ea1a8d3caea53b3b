"""What a pipeline cannot honour yet is refused here, before the first step, with the reason and the way out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.metriccalls import held_metrics
from lightning_fxpipe.weighting import Finding


def check_num_stages(num_stages: int | str, num_devices: int) -> None:
    """Raises :class:`UnsupportedError` unless there is one device for each stage."""
    if num_stages not in ("auto", num_devices):
        more = "more" if isinstance(num_stages, int) and num_devices > num_stages else "fewer"
        raise UnsupportedError(
            f"There are {more} devices than stages.",
            observed=f"{num_stages} stages and {num_devices} devices",
            expected="one stage for each device",
            todo=f"Set Trainer(devices={num_stages}), or num_stages={num_devices}"
            " (a plan made for another number of stages must be made again).",
        )


def check_has_batch(batch: Any) -> Any:
    """The batch; raises :class:`UnsupportedError` where there is none to trace the model with."""
    if batch is None:
        raise UnsupportedError(
            "There is no batch to trace the model with.",
            observed="no dataloader is defined for this run",
            expected="a dataloader, or a plan made before",
            todo="Pass a dataloader, or FxPipeStrategy(plan=...).",
        )
    return batch


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_trainer(trainer: Trainer, module: LightningModule) -> None:
    """Raises :class:`UnsupportedError` with everything in this run that a pipeline cannot honour."""
    faults = list(_module_faults(module)) + list(_trainer_faults(trainer))
    if trainer.state.fn is TrainerFn.FITTING:
        faults += list(_fit_faults(module))
    if faults:
        raise UnsupportedError(
            "strategy='fxpipe' cannot run this.",
            where=type(module).__name__,
            observed="; ".join(observed for observed, _ in faults),
            todo="; ".join(todo for _, todo in faults),
        )


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Raises :class:`UnsupportedError` unless there is one optimizer, and one that needs a single backward pass."""
    if len(optimizers) != 1:
        raise UnsupportedError(
            "strategy='fxpipe' trains with one optimizer.",
            where="configure_optimizers",
            observed=f"{len(optimizers)} optimizers",
            todo="Return one optimizer with several parameter groups.",
        )
    if isinstance(optimizers[0], LBFGS):
        raise UnsupportedError(
            "strategy='fxpipe' cannot train with LBFGS.",
            where="configure_optimizers",
            observed="an optimizer that evaluates the loss several times per step and needs the whole model's parameters",
            todo="Use an optimizer that treats each parameter by itself, such as AdamW or SGD.",
        )


def report_batch_norm(module: nn.Module, num_microbatches: int | None) -> None:
    """Warns where BatchNorm would normalise over microbatches instead of the batch, which changes what is trained."""
    found = [path for path, child in module.named_modules() if isinstance(child, _BATCH_NORMS)]
    if found and num_microbatches != 1:
        rank_zero_warn(
            f"{len(found)} BatchNorm layers ({found[0]}, ...) normalise over one microbatch, not the whole batch, as with "
            "gradient accumulation. For the statistics of one device, set FxPipeStrategy(num_microbatches=1)."
        )


def report_loss(finding: Finding) -> None:
    """Tells what a check of the loss has found, where the user must know it."""
    if finding.message:
        (rank_zero_warn if finding.is_warning else rank_zero_info)(finding.message)


Fault = tuple[str, str]


def _module_faults(module: LightningModule) -> Iterator[Fault]:
    held = {name: metric for name, metric in held_metrics(module).items() if any(True for _ in metric.parameters())}
    if held:
        yield (
            f"metrics with a model of their own ({', '.join(list(held)[:4])}), whose parameters would belong to no stage",
            "give the metric a function that calls a model which the LightningModule does not hold, or compute it afterwards",
        )


def _fit_faults(module: LightningModule) -> Iterator[Fault]:
    if not module.automatic_optimization:
        yield (
            "manual optimization: the schedule runs backward inside the step",
            "use automatic optimization and Trainer(accumulate_grad_batches=..., gradient_clip_val=...)",
        )
    if is_overridden("backward", module):
        yield "an overridden LightningModule.backward, which would never be called", "move the code into a gradient hook"


def _trainer_faults(trainer: Trainer) -> Iterator[Fault]:
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        yield "precision='16-mixed' with a gradient scaler", "use precision='bf16-mixed' or '32-true'"
    refused = {
        StochasticWeightAveraging: "average checkpoints afterwards, or use EMAWeightAveraging",
        BatchSizeFinder: "choose the batch size by hand",
        LearningRateFinder: "choose the learning rate by hand, or find it on one device",
    }
    for callback in getattr(trainer, "callbacks", ()):
        for kind, todo in refused.items():
            if isinstance(callback, kind):
                yield f"the callback {kind.__name__}, which needs the whole model on one rank", todo
