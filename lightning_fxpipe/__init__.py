"""Pipeline parallelism for unmodified LightningModules: ``Trainer(strategy="fxpipe")``.

Each folder is a room with a map of its modules; docs/design.md has them in the order of the data flow. Beside them lie
``errors``, what users can get; ``rng``, states of the random generators; ``pl``, the strategy for ``pytorch_lightning``.
``lightning_fxpipe.simulation`` exports devices, costs, tables of schedules and timelines; ``lightning_fxpipe.pictures``
draws them.
"""

import importlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_fxpipe._compat.roots import when_imported
from lightning_fxpipe.errors import BatchError as BatchError
from lightning_fxpipe.errors import FxPipeError as FxPipeError
from lightning_fxpipe.errors import PartitionError as PartitionError
from lightning_fxpipe.errors import PeerError as PeerError
from lightning_fxpipe.errors import ScheduleError as ScheduleError
from lightning_fxpipe.errors import TraceError as TraceError
from lightning_fxpipe.errors import UnsupportedError as UnsupportedError

if TYPE_CHECKING:
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

# Modules of the names that are imported at their first use (PEP 562): `fxpipe --help` needs neither torch nor Lightning.
_MODULES = {
    "BoundaryTensor": "planner.plan",
    "FxPipeStrategy": "strategy.strategy",
    "Layout": "planner.layouts",
    "LayoutComparison": "planner.layouts",
    "PartitionPlan": "planner.plan",
    "Recording": "recording.options",
    "SimulatedPlan": "planner.simulated_plan",
    "StageSpec": "planner.plan",
    "compare_layouts": "planner.layouts",
    "make_plan": "planner.step_plan",
    "read_recording": "recording.files",
    "simulate_plan": "planner.simulated_plan",
}

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


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Trainer(strategy="fxpipe") finds the strategy by name once this package is imported. A class name without options reaches the
# Trainer as a name, in lower case, from LightningCLI's command line. Imported twice under test runners.
_NAMES = ("fxpipe", "fxpipestrategy", "lightning_fxpipe.fxpipestrategy", "lightning_fxpipe.pl.fxpipestrategy")


def _register(strategies: ModuleType, make: Callable[[], object]) -> None:
    for name in _NAMES:
        if name not in strategies.StrategyRegistry.available_strategies():
            what = "Pipeline parallelism for an unmodified LightningModule"
            strategies.StrategyRegistry.register(name, make, description=what)


def _of_lightning() -> object:
    return __getattr__("FxPipeStrategy")()


def _of_pytorch_lightning() -> object:
    return importlib.import_module("lightning_fxpipe.pl").FxPipeStrategy()


when_imported("lightning.pytorch.strategies", lambda strategies: _register(strategies, _of_lightning))
when_imported("pytorch_lightning.strategies", lambda strategies: _register(strategies, _of_pytorch_lightning))
# LightningCLI finds the class by its bare name among those that are imported.
when_imported("lightning.pytorch.cli", lambda _: __getattr__("FxPipeStrategy"))
