"""Types of the strategy's options as a command line sees them: a wrong value is an error of the parser, not of the run.

LightningCLI parses with jsonargparse; where that is installed, these are types of its own, which check a value before anything
else runs. To Python code they are plain numbers and strings.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from lightning_fxpipe.microbatch.loss_weights import imported_weight
from lightning_fxpipe.planner.cut_rule import BalanceName
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.schedules.by_name import SCHEDULES

if TYPE_CHECKING:
    PositiveInt = int
    PositiveFloat = float
    PlanFile = str | Path
    FunctionPath = str
else:
    try:
        from jsonargparse.typing import PositiveFloat, PositiveInt, extend_base_type
    except ImportError:  # an extra: `examples`
        PositiveInt, PositiveFloat, PlanFile, FunctionPath = int, float, str, str
    else:

        def _check_plan(kind: type, value: Any) -> None:
            """jsonargparse expects a ValueError, and tries the option's other types."""
            try:
                PartitionPlan.load(value)
            except Exception as error:
                raise ValueError(str(error)) from error

        def _check_function(kind: type, value: Any) -> None:
            imported_weight(value)

        PlanFile = extend_base_type("PlanFile", str, _check_plan, docstring="Path of a saved plan.")
        FunctionPath = extend_base_type("FunctionPath", str, _check_function, docstring="Import path of a function.")


def check_options(
    *,
    num_stages: Any,
    stages_per_rank: Any,
    num_microbatches: Any,
    schedule: Any,
    balance: Any,
    split_points: Any,
    batch_dim: Any,
    start_method: Any,
) -> None:
    """Raises ValueError for values that no parser has checked."""
    counts = {"num_stages": num_stages, "stages_per_rank": stages_per_rank, "num_microbatches": num_microbatches}
    for name, value in counts.items():
        if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"FxPipeStrategy({name}={value!r}): expected a positive number or 'auto'")
    if not isinstance(batch_dim, int) or isinstance(batch_dim, bool) or batch_dim < 0:
        raise ValueError(f"FxPipeStrategy(batch_dim={batch_dim!r}): expected 0 or a positive number")
    if schedule not in SCHEDULES:
        raise ValueError(f"FxPipeStrategy(schedule={schedule!r}): expected one of {', '.join(map(repr, SCHEDULES))}")
    if balance not in get_args(BalanceName):
        raise ValueError(f"FxPipeStrategy(balance={balance!r}): expected one of {', '.join(map(repr, get_args(BalanceName)))}")
    if isinstance(split_points, str) or not all(isinstance(point, str) for point in split_points or ()):
        raise ValueError(f"FxPipeStrategy(split_points={split_points!r}): expected a list of paths of modules")
    if start_method not in ("auto", "popen", "fork", "spawn"):
        raise ValueError(f"FxPipeStrategy(start_method={start_method!r}): expected 'auto', 'popen', 'fork' or 'spawn'")
