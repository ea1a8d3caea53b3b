"""The commands ``plan``, ``simulate`` and ``layouts``: cuts, and the time of a step with them, without training."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

from jsonargparse.typing import PositiveFloat, PositiveInt, extend_base_type

from lightning_fxpipe.cli.configs import Work, read_work
from lightning_fxpipe.distributed.topology import Placement
from lightning_fxpipe.errors import FxPipeError, UnsupportedError
from lightning_fxpipe.microbatch.split import count_samples, default_num_microbatches
from lightning_fxpipe.pictures.chrome_trace import write_trace
from lightning_fxpipe.pictures.figure import save_figure
from lightning_fxpipe.pictures.html_page import write_page
from lightning_fxpipe.pictures.page import Page, page_of_layouts, page_of_simulated_plan, timelines_of_layouts, title_of_plan
from lightning_fxpipe.planner.cut_rule import BalanceName
from lightning_fxpipe.planner.layouts import LayoutBalanceName, compare_layouts
from lightning_fxpipe.planner.plan import PartitionPlan, run_words
from lightning_fxpipe.planner.simulated_plan import SCHEDULES, simulate_plan
from lightning_fxpipe.planner.step_plan import make_plan
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, is_v_shaped, schedule_named
from lightning_fxpipe.simulation.costs import Link
from lightning_fxpipe.simulation.devices import DEVICES, Device
from lightning_fxpipe.simulation.timeline import Timeline

_Pin = extend_base_type("Pin", str, lambda _, pair: int(pair.rpartition("=")[2]))
_NAMES = ", ".join(get_args(SimulatedSchedule))
_FILES = {
    "output": "save the plan as JSON for FxPipeStrategy(plan=FILE)",
    "html": "save stages, timelines and memory as an HTML page",
    "plot": "save the timelines as a figure: .png or .svg (needs matplotlib)",
    "trace": "save the timelines as a JSON trace for ui.perfetto.dev",
}


def plan(arguments: Sequence[str], purpose: str) -> int:
    """Runs ``fxpipe plan``."""

    def add_options(parser: Any) -> None:
        _add_stage_options(parser)
        help_ = f"schedule assumed when estimating activation memory: {_NAMES}"
        parser.add_argument("--schedule", default="gpipe", metavar="NAME", help=help_)
        _add_device_and_files(parser, "output", "html")

    work = read_work("plan", purpose, arguments, add_options)
    options = _stage_options(work)
    schedule = schedule_named(work.options.schedule)
    made = make_plan(work.model, work.batch, schedule=schedule, **options)
    num_devices = work.options.num_devices or made.num_stages
    each = made.num_stages // num_devices
    placement = Placement(num_ranks=num_devices, stages_per_rank=each, is_v=each > 1 and is_v_shaped(schedule))
    words = run_words(made, schedule, options["num_microbatches"], placement.by_rank)
    _print(work, f"{made}\n{words}", lambda: asdict(made))
    _save(work, output=made.save, html=lambda path: write_page(_page(work, made, options), path))
    return 0


def simulate(arguments: Sequence[str], purpose: str) -> int:
    """Runs ``fxpipe simulate``."""

    def add_options(parser: Any) -> None:
        _add_stage_options(parser)
        _add_simulation_options(parser, f"schedules to compare: {_NAMES}, or CSV files with schedule tables")
        _add_device_and_files(parser, "html", "plot", "trace")

    work = read_work("simulate", purpose, arguments, add_options)
    found = simulate_plan(work.model, work.batch, **_stage_options(work), **_simulation_options(work))
    _print(work, found, found.as_dict)
    timelines = [Timeline.of_simulation(f"{name}, simulated", found.simulations[name]) for name in found.by_time()]
    _save(work, **_pictures(page_of_simulated_plan(found), timelines))
    return 0


def layouts(arguments: Sequence[str], purpose: str) -> int:
    """Runs ``fxpipe layouts``."""

    def add_options(parser: Any) -> None:
        add = parser.add_argument
        add(
            "--num-devices",
            type=PositiveInt,
            required=True,
            metavar="N",
            help="total number of devices; the batch size is per replica",
        )
        _add_cut_options(parser, get_args(LayoutBalanceName), None)
        _add_simulation_options(parser, f"schedules to compare: {_NAMES}")
        add("--replica-bytes-per-second", type=float, metavar="X", help="between replicas (default: same as between stages)")
        help_ = "shard the optimizer state over the replicas, as with FxPipeStrategy(shard_optimizer_state=True)"
        add("--shard-optimizer-state", action="store_true", help=help_)
        _add_device_and_files(parser, "output", "html", "plot", "trace")

    work = read_work("layouts", purpose, arguments, add_options)
    options, simulation, speed = work.options, _simulation_options(work), work.options.replica_bytes_per_second
    link = simulation["device"].link
    found = compare_layouts(
        work.model,
        work.batch,
        num_devices=options.num_devices,
        replica_link=None if speed is None else Link(latency_seconds=link.latency_seconds, bytes_per_second=speed),
        num_microbatches=options.num_microbatches,
        shard_optimizer_state=options.shard_optimizer_state,
        **_cut_options(work),
        **simulation,
    )
    _print(work, found, found.as_dict)
    _save(work, output=found.plan.save, **_pictures(page_of_layouts(found), timelines_of_layouts(found)))
    return 0


def _add_stage_options(parser: Any) -> None:
    add = parser.add_argument
    add("--num-stages", type=PositiveInt, metavar="N", help="number of stages (default: the Trainer's devices)")
    add("--num-devices", type=PositiveInt, metavar="P", help="number of devices (default: one per stage)")
    _add_cut_options(parser, get_args(BalanceName), "parameters")


def _add_cut_options(parser: Any, balances: Sequence[str], balance: str | None) -> None:
    def several(option: str, kind: Any, metavar: str, help_: str) -> None:
        parser.add_argument(option, nargs="+", type=kind, default=[], metavar=metavar, help=help_)

    add = parser.add_argument
    add(
        "--num-microbatches", type=PositiveInt, metavar="M", help="microbatches per batch (default: chosen from the batch size)"
    )
    add("--batch-dim", type=int, default=0, metavar="D", help="batch dimension of the tensors")
    add("--balance", choices=balances, default=balance, help="what to balance across stages")
    several("--split-points", str, "PATH", "first module of each stage after the first, instead of balancing")
    several("--stage-of", _Pin, "PATTERN=STAGE", "stages of modules, such as 'model.embed*=0'; -1 is the last stage")
    several("--device-speeds", PositiveFloat, "X", "relative speed of each rank's device; rank 0 has the last stage")
    several("--device-memory-gib", PositiveFloat, "X", "memory of each rank's device in GiB, or one number for all devices")


def _add_simulation_options(parser: Any, schedules_help: str) -> None:
    add = parser.add_argument
    add("--plan", metavar="FILE", help="simulate a saved plan instead of a new one")
    add("--schedules", nargs="+", default=[*SCHEDULES], metavar="NAME", help=schedules_help)
    help_ = "bytes of optimizer state per byte of parameters; 2 for Adam"
    add("--optimizer-bytes", type=float, default=2.0, metavar="X", help=help_)


def _add_device_and_files(parser: Any, *files: str) -> None:
    help_ = f"device of each rank: {', '.join(DEVICES)}, or a YAML file for Device.load"
    parser.add_argument("--device", default="a100", metavar="NAME|FILE", help=help_)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    for name in files:
        parser.add_argument(f"--{name}", metavar="FILE", help=_FILES[name])


def _stage_options(work: Work) -> dict[str, Any]:
    """The arguments of ``make_plan``; the numbers of stages and microbatches may be those of a saved plan."""
    options, given = work.options, _given(work)
    points, devices = options.split_points, options.trainer.get("devices")
    from_trainer = len(devices) if isinstance(devices, list) else devices
    num_stages = given.num_stages if given else options.num_stages or (len(points) + 1 if points else from_trainer)
    if not isinstance(num_stages, int) or num_stages < 1:
        raise FxPipeError(
            "The number of stages is not known.", observed=f"trainer.devices: {devices}", todo="Add --num-stages N."
        )
    count = options.num_microbatches or (given.chosen.num_microbatches if given and given.chosen else None)
    num_samples = count_samples(work.batch, count, options.batch_dim).num_samples
    return {
        "num_stages": num_stages,
        "num_devices": options.num_devices,
        "num_microbatches": count or default_num_microbatches(num_samples, num_stages),
        **_cut_options(work),
    }


def _cut_options(work: Work) -> dict[str, Any]:
    options, memory = work.options, work.options.device_memory_gib
    return {
        **{name: options[name] for name in ("batch_dim", "balance", "split_points", "device_speeds")},
        "stage_of": {pattern: int(stage) for pattern, _, stage in (pair.rpartition("=") for pair in options.stage_of)},
        "device_memory_gib": memory[0] if len(memory) == 1 else memory,
    }


def _simulation_options(work: Work) -> dict[str, Any]:
    options = work.options
    names = [*dict.fromkeys(options.schedules)]
    return {
        "device": _device(work),
        "schedules": names,
        "optimizer_bytes_per_byte": options.optimizer_bytes,
        "plan": _given(work),
    }


def _device(work: Work) -> Device:
    name = work.options.device
    return DEVICES[name] if name in DEVICES else Device.load(name)


def _given(work: Work) -> PartitionPlan | None:
    path = work.options.get("plan")
    return None if path is None else PartitionPlan.load(path)


def _page(work: Work, made: PartitionPlan, options: dict[str, Any]) -> Page:
    """The plan with a simulated step, or with the reason why that cannot be simulated."""
    try:
        return page_of_simulated_plan(simulate_plan(work.model, work.batch, device=_device(work), **options))
    except UnsupportedError as error:
        reason = f"{error.what.removesuffix('.')}: {error.observed}." if error.observed else error.what
        return Page(title=title_of_plan(made), plan=made, notes=(reason,))


def _pictures(page: Page, timelines: Sequence[Timeline]) -> dict[str, Callable[[Path], object]]:
    return {
        "html": partial(write_page, page),
        "plot": partial(save_figure, timelines),
        "trace": partial(write_trace, timelines),
    }


def _print(work: Work, text: object, values: Callable[[], Mapping[str, Any]]) -> None:
    print(json.dumps(values(), indent=2) if work.options.json else text)


def _save(work: Work, **writers: Callable[[Path], object]) -> None:
    """Writes the files that options of these names ask for, and says so."""
    for name, write in writers.items():
        if path := work.options[name]:
            try:
                write(Path(path))
            except OSError as error:
                todo = f"Pass a path in an existing, writable folder to --{name}."
                raise FxPipeError("Cannot write a file.", where=path, observed=error.strerror, todo=todo) from error
            print(f"Saved to {path}", file=sys.stderr)
