"""Lightning's own calls of the whole model on ``self.example_input_array``, once the model is in stages.

The model summary wants the shapes of what goes into and comes out of each layer. So it gets fakes for the module's tensors: the
other stages' never come here. Only a forward that would leave a trace in a run on one device, such as random numbers that it
draws, or that cannot run without values, is run with all the values, which are brought to every rank.

A logger writes the graph of the model on rank 0. It gets the values; what its forward changes the other ranks are told.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.model_summary.model_summary import summarize
from torch import Tensor, nn

from lightning_fxpipe._compat.roots import in_all_roots, of_root
from lightning_fxpipe._compat.torch import FakeWorld, TorchDispatchMode
from lightning_fxpipe.distributed.agreement import of_last_stage
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.hooks.hook_code import is_own
from lightning_fxpipe.hooks.user_hooks import Hooks
from lightning_fxpipe.rng import isolated_rng, python_rng, rng_state, set_rng_state
from lightning_fxpipe.runtime.attributes import StepAttributes, take_over
from lightning_fxpipe.user_code.exchange import exchanged_tensors
from lightning_fxpipe.user_code.members import Members
from lightning_fxpipe.user_code.placement import Placement
from lightning_fxpipe.user_code.snapshot import Snapshot

_logger = logging.getLogger("lightning_fxpipe")

# Operators that draw random numbers, give a number, or have a size that depends on data.
_OF_VALUES = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class ExampleRuns:
    """Has Lightning's own calls of the model see all of it.

    Args:
        module: The LightningModule, split.
        hooks: Runs code of which the ranks must agree.
        topology: This rank's place.
    """

    def __init__(self, module: LightningModule, hooks: Hooks, topology: Topology) -> None:
        self._module = module
        self._hooks = hooks
        self._topology = topology

    def patches(self, trainer: Trainer) -> list[tuple[Any, str, Any]]:
        """Returns the patches of callbacks and loggers for a run."""
        callbacks = [callback for callback in trainer.callbacks if _makes_summary(callback)]  # type: ignore[attr-defined]
        loggers = [logger for logger in trainer.loggers if _writes_graph(logger)]
        return [
            *((callback, "on_fit_start", self._summary(trainer, callback.on_fit_start)) for callback in callbacks),
            *((logger, "log_graph", self._graph(trainer, logger.log_graph)) for logger in loggers),
        ]

    def _summary(self, trainer: Trainer, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._module.example_input_array is None:
                return hook(*args, **kwargs)
            if can_be_summarised_on_fakes(self._module, self._topology.device):
                with _on_fakes(self._module, self._topology.device):
                    return hook(*args, **kwargs)
            with self._hooks.running(trainer, "on_fit_start"):
                return hook(*args, **kwargs)

        return run

    def _graph(self, trainer: Trainer, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = StepAttributes(self._module, Members(self._module), {})
            with self._hooks.running(trainer, "log_graph") as frame:
                result = hook(*args, **kwargs)
            if frame.values is not None:  # on every rank, if any rank has looked at another's
                self._share_changes(before)
            return result

        return run

    def _share_changes(self, before: StepAttributes) -> None:
        """A forward on rank 0 may draw random numbers, and change attributes."""
        news: Any = None
        if self._topology.is_last:
            news = (rng_state(), before.changes())
        state, attributes = of_last_stage(news, self._topology)
        if self._topology.is_last:
            return
        set_rng_state(state)
        take_over(self._module, attributes, self._topology.device)


def _makes_summary(callback: Any) -> bool:
    """Returns True if a callback makes Lightning's model summary."""
    return (
        isinstance(callback, in_all_roots(ModelSummary))
        and "on_fit_start" not in vars(callback)
        and is_own(callback.on_fit_start)
    )


def _writes_graph(logger: Any) -> bool:
    """Returns True if a logger may call the model."""
    return isinstance(logger, in_all_roots(Logger)) and is_overridden("log_graph", logger, of_root(Logger, logger))


def can_be_summarised_on_fakes(module: LightningModule, device: torch.device) -> bool:
    """Returns True if a summary of the module needs no values, and its forward leaves nothing behind."""
    generators = python_rng()
    try:
        with isolated_rng(), _on_fakes(module, device), _NeedsValues() as noted:  # type: ignore[no-untyped-call]
            before = Snapshot({"self": module})
            summarize(module, max_depth=1)
            has_changed = bool(before.changed_names()) or python_rng() != generators
    except Exception:  # whatever it cannot do without values, it gets them, and fails again if it has to
        _logger.debug("The model summary does not run on tensors without data", exc_info=True)
        return False
    return not has_changed and not noted.happened


@contextmanager
def _on_fakes(module: nn.Module, device: torch.device) -> Iterator[None]:
    """In the block, the module's tensors have no data, as if all of it were on ``device``."""
    world, placement = FakeWorld(), Placement(module, device)

    def fake(tensor: Tensor, _: str) -> Tensor:
        return world.static(tensor, placement.device_of(tensor))

    with torch.inference_mode(False), exchanged_tensors(module, fake), world.active():
        yield


class _NeedsValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether random numbers are drawn, or values looked at: fakes may answer with symbols."""

    happened = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.happened |= not _OF_VALUES.isdisjoint(func.tags)
        return func(*args, **(kwargs or {}))
