"""How the processes of a pipeline start where no ``torchrun`` or cluster has started them."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, Literal

from lightning_fxpipe._compat.lightning import multiprocessing_launcher, start_processes
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.launch.launcher import ForkingLauncher, Launcher

StartMethod = Literal["auto", "popen", "fork", "spawn"]


def resolve(start_method: StartMethod) -> StartMethod:
    """Replaces ``"auto"`` by the method for this program: a notebook is no script that could be started once more for each
    rank.
    """
    if start_method != "auto":
        return start_method
    return "fork" if hasattr(sys, "ps1") or bool(sys.flags.interactive) else "popen"


def make_launcher(strategy: Any, start_method: StartMethod | None, *, gathers: bool) -> Any:
    """The launcher for a start method.

    Args:
        strategy: The strategy, with its environment.
        start_method: The method, resolved; None where nothing is to be started.
        gathers: Whether the module is whole after a run.

    Raises:
        UnsupportedError: Processes that end with a run would take what they trained with them.
    """
    if start_method is None:
        return Launcher()
    if start_method == "popen":
        return Launcher(partial(_start, strategy.cluster_environment, strategy.num_processes, strategy.num_nodes))
    if not gathers:
        raise UnsupportedError(
            "The trained parameters would be lost at the end of the run.",
            observed=f"gather_after_run=False with processes started by {start_method!r}, which exit after each run",
            expected="processes that return the full module to the process that started them",
            todo="Run a script with python or torchrun, or remove gather_after_run=False.",
        )
    return ForkingLauncher(multiprocessing_launcher(strategy, start_method))


def _start(environment: Any, num_processes: int, num_nodes: int) -> list[Any]:
    """Starts the other ranks, unless another Trainer of this process has done so since this one was made."""
    return [] if environment.creates_processes_externally else start_processes(environment, num_processes, num_nodes)
