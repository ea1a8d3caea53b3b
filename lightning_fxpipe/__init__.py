"""Pipeline parallelism for unmodified LightningModules: ``Trainer(strategy="fxpipe")``.

Each folder is a room with a map of its modules; docs/design.md has them in the order of the data flow. Beside them lie
``errors``, what users can get; ``rng``, states of the random generators; ``pl``, the strategy for ``pytorch_lightning``.
``lightning_fxpipe.simulation`` exports devices, costs, tables of schedules and timelines; ``lightning_fxpipe.pictures``
draws them.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from lightning_fxpipe._compat.roots import when_imported
from lightning_fxpipe.errors import BatchError as BatchError
from lightning_fxpipe.errors import FxPipeError as FxPipeError
from lightning_fxpipe.errors import PartitionError as PartitionError
from lightning_fxpipe.errors import PeerError as PeerError
from lightning_fxpipe.errors import ScheduleError as ScheduleError
from lightning_fxpipe.errors import TraceError as TraceError
from lightning_fxpipe.errors import UnsupportedError as UnsupportedError
from lightning_fxpipe.planner.layouts import Layout as Layout
from lightning_fxpipe.planner.layouts import LayoutComparison as LayoutComparison
from lightning_fxpipe.planner.layouts import compare_layouts as compare_layouts
from lightning_fxpipe.planner.plan import BoundaryTensor as BoundaryTensor
from lightning_fxpipe.planner.plan import PartitionPlan as PartitionPlan
from lightning_fxpipe.planner.plan import StageSpec as StageSpec
from lightning_fxpipe.planner.simulated_plan import SimulatedPlan as SimulatedPlan
from lightning_fxpipe.planner.simulated_plan import simulate_plan as simulate_plan
from lightning_fxpipe.planner.step_plan import make_plan as make_plan
from lightning_fxpipe.recording.files import read_recording as read_recording
from lightning_fxpipe.recording.options import Recording as Recording
from lightning_fxpipe.strategy.strategy import FxPipeStrategy as FxPipeStrategy

try:
    __version__ = version("lightning-fxpipe")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0.0.0"

__all__ = [
    "BatchError",
    "BoundaryTensor",
    "FxPipeError",
    "FxPipeStrategy",
    "Layout",
    "LayoutComparison",
    "PartitionError",
    "PartitionPlan",
    "PeerError",
    "Recording",
    "ScheduleError",
    "SimulatedPlan",
    "StageSpec",
    "TraceError",
    "UnsupportedError",
    "compare_layouts",
    "make_plan",
    "read_recording",
    "simulate_plan",
]

# Trainer(strategy="fxpipe") finds the strategy by name once this package is imported. A class name without options reaches the
# Trainer as a name, in lower case, from LightningCLI's command line. Imported twice under test runners.
_NAMES = ("fxpipe", "fxpipestrategy", "lightning_fxpipe.fxpipestrategy", "lightning_fxpipe.pl.fxpipestrategy")


def _register(strategies: ModuleType, make: Callable[[], object]) -> None:
    for name in _NAMES:
        if name not in strategies.StrategyRegistry.available_strategies():
            what = "Pipeline parallelism for an unmodified LightningModule"
            strategies.StrategyRegistry.register(name, make, description=what)


def _of_pytorch_lightning() -> object:
    return importlib.import_module("lightning_fxpipe.pl").FxPipeStrategy()


_register(sys.modules["lightning.pytorch.strategies"], FxPipeStrategy)
when_imported("pytorch_lightning.strategies", lambda strategies: _register(strategies, _of_pytorch_lightning))
