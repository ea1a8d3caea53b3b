"""Sources of the first values of a module without data: its construction, or the checkpoint that will be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_fxpipe.deferred_init.materialise import Constructions, Materials
from lightning_fxpipe.hooks.hook_code import is_own


@contextmanager
def init_context(
    constructions: Constructions, precision: Any, module: Any, device: torch.device, empty_init: bool | None
) -> Iterator[None]:
    """Delays the data of modules that ``configure_model`` makes, or others with ``empty_init``, until it is known which rank
    needs it.

    Args:
        constructions: Gets what is recorded.
        precision: The precision plugin.
        module: The LightningModule, if the Trainer has got one.
        device: This rank's device.
        empty_init: What the user has asked ``trainer.init_module`` for.
    """
    is_running = module is not None and module.trainer.state.status == TrainerStatus.RUNNING
    records = empty_init or (empty_init is None and is_running)
    draws = not (is_running and _awaits_checkpoint(module))
    with precision.tensor_init_context(), constructions.recording(device, draws=draws) if records else nullcontext():
        yield


def materials_of(constructions: Constructions, module: Any) -> Materials:
    """Returns the sources of the values of a module that will be split."""
    return constructions.take(module, draws=not _awaits_checkpoint(module))


def _awaits_checkpoint(module: Any) -> bool:
    """Returns True if a checkpoint is sure to be loaded before the run, so that initial values are not needed."""
    requested = getattr(module.trainer.strategy.launcher, "requested", None)
    # Where there is no last one, the Trainer goes on without.
    return requested not in (None, "last") and not hooks_change_checkpoints(module)


def hooks_change_checkpoints(module: Any) -> bool:
    """Returns True if hooks of user code see a checkpoint before it is loaded, and may put the module's own values into it."""
    hooks = [getattr(owner, "on_load_checkpoint", None) for owner in (module, *module.trainer.callbacks)]
    return any(hook is not None and not is_own(hook) for hook in hooks)
