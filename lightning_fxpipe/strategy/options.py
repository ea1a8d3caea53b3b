"""Types of the strategy's options as a command line sees them: a wrong value is an error of the parser, not of the run.

LightningCLI parses with jsonargparse; where that is installed, these are types of its own, which check a value before anything
else runs. To Python code they are plain numbers and strings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Set
from datetime import timedelta
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, cast, get_args

from torch import nn

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.microbatch.loss_weights import LossOptions, imported_weight
from lightning_fxpipe.planner.cut_rule import BalanceName
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.reporting.names import suggestion
from lightning_fxpipe.schedules.by_name import SCHEDULES
from lightning_fxpipe.schedules.own_table import expected_schedule, schedule_of
from lightning_fxpipe.simulation.actions import ActionTable
from lightning_fxpipe.strategy.run_plan import PlanOptions

P = ParamSpec("P")

if TYPE_CHECKING:
    PositiveInt = int
    PositiveFloat = float
    PlanFile = str | Path
    OwnTable = str | Path | ActionTable
    FunctionPath = str
else:
    try:
        from jsonargparse.typing import PositiveFloat, PositiveInt, extend_base_type
    except ImportError:  # an extra: `examples`
        PositiveInt, PositiveFloat, PlanFile, OwnTable, FunctionPath = int, float, str, str, str
    else:

        def _check_plan(kind: type, value: Any) -> None:
            """Jsonargparse expects a ValueError, and tries the option's other types."""
            try:
                PartitionPlan.load(value)
            except Exception as error:
                raise ValueError(str(error)) from error

        def _check_table(kind: type, value: Any) -> None:
            try:
                found = schedule_of(value)
            except ScheduleError as error:
                raise ValueError(str(error)) from error
            if found is None:
                raise ValueError(expected_schedule(value))

        def _check_function(kind: type, value: Any) -> None:
            imported_weight(value)

        PlanFile = extend_base_type("PlanFile", str, _check_plan, docstring="Path of a saved plan.")
        # Not ActionTable, too: of a class jsonargparse takes a file for a config, and reads it.
        OwnTable = extend_base_type(
            "OwnTable", str, _check_table, docstring="Name of a schedule, or path of a schedule table (CSV)."
        )
        FunctionPath = extend_base_type("FunctionPath", str, _check_function, docstring="Import path of a function.")


def reads_options(constructor: Callable[P, None]) -> Callable[P, None]:
    """Wraps the strategy's constructor: an option that is None has its default, a wrong name raises a TypeError.

    Configs write null for an option that is not set, which no parser refuses. For ``heartbeat_timeout`` it is a value.
    """
    names = [*signature(constructor).parameters]

    @wraps(constructor)
    def construct(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in list(kwargs):
            if name not in names:
                raise TypeError(f"FxPipeStrategy() got an unexpected keyword argument {name!r}{suggestion(name, names)}")
            if kwargs[name] is None and name != "heartbeat_timeout":
                del kwargs[name]
        constructor(*args, **kwargs)

    return construct


def check_options(options: PlanOptions, loss: LossOptions, num_microbatches: Any, start_method: Any) -> None:
    """Raises ValueError for values that no parser has checked; warns of options about the loss that have no effect."""
    counts = {
        "num_stages": options.num_stages,
        "stages_per_rank": options.stages_per_rank,
        "num_microbatches": num_microbatches,
    }
    for name, value in counts.items():
        if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"FxPipeStrategy({name}={value!r}): expected a positive number or 'auto'")
    batch_dim, balance = options.batch_dim, options.balance
    if not isinstance(batch_dim, int) or isinstance(batch_dim, bool) or batch_dim < 0:
        raise ValueError(f"FxPipeStrategy(batch_dim={batch_dim!r}): expected 0 or a positive number")
    balances = (*get_args(BalanceName), "auto")
    if balance not in balances:
        raise ValueError(f"FxPipeStrategy(balance={balance!r}): expected one of {', '.join(map(repr, balances))}")
    points, checkpointed, schedule = options.split_points, options.activation_checkpointing, options.schedule
    if isinstance(points, str) or not all(isinstance(point, str) for point in points):
        raise ValueError(f"FxPipeStrategy(split_points={points!r}): expected a list of module paths")
    chosen = checkpointed if isinstance(checkpointed, (list, tuple, Set)) else [checkpointed]
    if not isinstance(checkpointed, bool) and not all(map(_is_module_choice, chosen)):
        raise ValueError(
            f"FxPipeStrategy(activation_checkpointing={checkpointed!r}): expected False, True, 'auto', a module class, a "
            "pattern of module paths, or a list of classes and patterns"
        )
    if options.compile and schedule.splits:
        raise ValueError(
            f"FxPipeStrategy(compile=True, schedule={schedule.name!r}): the backward pass of a compiled module cannot be "
            f"split; expected one of {', '.join(repr(name) for name, one in SCHEDULES.items() if not one.splits)}"
        )
    _check_devices(options)
    about_cuts = points or balance != "parameters" or options.stage_of or options.device_speeds
    if options.given is not None and (about_cuts or checkpointed is not False or options.device_memory_gib is not None):
        raise ValueError(
            "FxPipeStrategy: the plan determines the cuts and the checkpointed modules; omit split_points, stage_of, balance, "
            "device_speeds, device_memory_gib and activation_checkpointing"
        )
    if points and balance == "auto":
        raise ValueError('FxPipeStrategy: split_points and balance="auto" both determine the cuts; omit one of the two')
    if points and (options.stage_of or options.device_speeds or options.device_memory_gib is not None):
        raise ValueError("FxPipeStrategy: split_points determine all cuts; omit stage_of, device_speeds and device_memory_gib")
    if start_method not in ("auto", "popen", "fork", "spawn"):
        raise ValueError(f"FxPipeStrategy(start_method={start_method!r}): expected 'auto', 'popen', 'fork' or 'spawn'")
    if not isinstance(options.shard_optimizer_state, bool):
        raise ValueError(f"FxPipeStrategy(shard_optimizer_state={options.shard_optimizer_state!r}): expected True or False")
    if loss != LossOptions() and schedule.name == "gpipe":
        warnings.warn(
            "loss_reduction and loss_weight apply only to 1F1B and have no effect here: this schedule computes the loss of "
            "the whole batch.",
            stacklevel=3,
        )


def duration_of(name: str, value: float | timedelta) -> timedelta:
    """Reads an option in seconds, or a ``timedelta``; raises ValueError unless it is positive."""
    if _is_positive(value):
        return timedelta(seconds=cast(float, value))
    if isinstance(value, timedelta) and value > timedelta():
        return value
    raise ValueError(f"FxPipeStrategy({name}={value!r}): expected a positive number of seconds or a positive timedelta")


def _check_devices(options: PlanOptions) -> None:
    stage_of, speeds, memory = options.stage_of, options.device_speeds, options.device_memory_gib
    if not isinstance(stage_of, Mapping) or not all(isinstance(stage, int) for stage in stage_of.values()):
        raise ValueError(f"FxPipeStrategy(stage_of={stage_of!r}): expected a dict from module paths to stages")
    if isinstance(speeds, (str, int, float)) or not all(map(_is_positive, speeds)):
        raise ValueError(f"FxPipeStrategy(device_speeds={speeds!r}): expected a list of positive numbers")
    each = memory if isinstance(memory, (list, tuple)) else [memory]
    if memory not in (None, "auto") and not (each and all(map(_is_positive, each))):
        raise ValueError(
            f"FxPipeStrategy(device_memory_gib={memory!r}): expected 'auto', a positive number or one positive number per "
            "device"
        )


def _is_module_choice(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, type) and issubclass(value, nn.Module))


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
