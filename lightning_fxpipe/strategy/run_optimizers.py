"""A run's optimizers over this rank's stages: those of ``configure_optimizers``, and others that hooks put in their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.optim import Optimizer

from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.optim.optimizers import StageOptimizer, kept_through
from lightning_fxpipe.strategy.session import Session
from lightning_fxpipe.strategy.support import stage_optimizers


class RunOptimizers:
    """Follows the Trainer's list of optimizers. Made by every rank; iterates over the present ones.

    Hooks may exchange the list (``trainer.optimizers = [...]``, ``trainer.strategy.setup_optimizers(trainer)``). The new ones
    are brought into stages when all ranks need them next, in a step or for a checkpoint; until then they list what they would
    list on one device.

    Args:
        shards: Whether replicas share an optimizer out.
    """

    def __init__(self, *, shards: bool) -> None:
        self._shards = shards
        self._present: list[StageOptimizer] = []
        self._known: list[int] | None = None  # the Trainer's list by identity; None where it is not followed

    def __iter__(self) -> Iterator[StageOptimizer]:
        return iter(self._present)

    def copy(self) -> RunOptimizers:
        """Returns those of another strategy with the same options, which has not run."""
        return RunOptimizers(shards=self._shards)

    def begin_run(self) -> None:
        """Called before each run."""
        self._known = None

    def follow(self, optimizers: Sequence[Optimizer], session: Session, topology: Topology) -> None:
        """Brings the Trainer's optimizers into stages, unless they are, in a run that trains. Called by every rank."""
        known = [*map(id, optimizers)]
        if known == self._known:
            return
        session.check_parameters()
        is_saved = bool(session.module.trainer.checkpoint_callbacks)
        with session.hooks.together("trainer.strategy.setup_optimizers"):
            for former in self._present:
                former.end_run()
            self._present = stage_optimizers(
                session.module, optimizers, topology, dropped=session.dropped, shards=self._shards, is_saved=is_saved
            )
            session.hooks.follow(self._present)
        self._known = known

    @property
    def are_followed(self) -> bool:
        """True in a run that trains, from its first :meth:`follow` on."""
        return self._known is not None

    def keep(self, session: Session, topology: Topology) -> None:
        """Keeps the last fit's optimizers in a run that does not train: checkpoints have their states. Called by every rank."""
        self._present = kept_through(self._present, session.module, session.dropped, topology)

    def of(self, optimizer: Optimizer) -> StageOptimizer | None:
        """The stage's part of one of the Trainer's optimizers."""
        return next((each for each in self._present if each.optimizer is optimizer), None)
