"""The command ``layouts``: how to share out devices among stages and replicas, without training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

from lightning_fxpipe.cli.configs import CONFIG_HELP, add_config_options, positive, read_work, schedule
from lightning_fxpipe.cli.devices import DEVICE_HELP, add_device_option, read_device
from lightning_fxpipe.cli.saving import Wanted, save
from lightning_fxpipe.pictures.chrome_trace import write_trace
from lightning_fxpipe.pictures.figure import save_figure
from lightning_fxpipe.pictures.html_page import write_page
from lightning_fxpipe.pictures.page import page_of_layouts, timelines_of_layouts
from lightning_fxpipe.planner.layouts import compare_layouts
from lightning_fxpipe.planner.simulated_plan import SCHEDULES
from lightning_fxpipe.simulation.by_name import SimulatedSchedule
from lightning_fxpipe.simulation.costs import Link

_EXAMPLE = """\
example:
  python -m lightning_fxpipe layouts --config examples/configs/lm_fxpipe.yaml --num-devices 8 --device a100 --output plan.json

"""


def add_command(commands: Any) -> None:
    """Adds ``layouts`` to the commands of a parser."""
    layouts = commands.add_parser(
        "layouts",
        help="print how many stages and replicas are fastest on a number of devices, without training",
        description="Prints how many stages and replicas are fastest on a number of devices, without training.",
        epilog=_EXAMPLE + DEVICE_HELP + CONFIG_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_options(layouts, has_stages=False)
    layouts.add_argument(
        "--num-devices", type=positive, required=True, metavar="N", help="devices of all replicas; the batch is one replica's"
    )
    add_device_option(layouts)
    layouts.add_argument(
        "--replica-bytes-per-second",
        type=float,
        metavar="X",
        help="between replicas, where they lie on several machines (default: as between stages)",
    )
    layouts.add_argument(
        "--optimizer-bytes",
        type=float,
        default=2.0,
        metavar="X",
        help="what the optimizer keeps for each byte of a parameter (default: 2, as Adam)",
    )
    layouts.add_argument(
        "--shard-optimizer-state",
        action="store_true",
        help="each replica keeps its share of the optimizer state, as with FxPipeStrategy(shard_optimizer_state=True)",
    )
    layouts.add_argument(
        "--schedules",
        nargs="+",
        default=SCHEDULES,
        type=schedule,
        metavar="NAME",
        help=f"those to look at, of {', '.join(get_args(SimulatedSchedule))} (default: nine of them)",
    )
    layouts.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="also save the plan of the fastest as JSON, for FxPipeStrategy(plan=FILE) on so many devices",
    )
    pictures = layouts.add_argument_group("pictures", "a step of each, with the average of the replicas' gradients")
    pictures.add_argument("--html", type=Path, metavar="FILE", help="also save all of it as a page for a browser")
    pictures.add_argument(
        "--plot", type=Path, metavar="FILE", help="also save the timelines as a figure: .png or .svg (needs matplotlib)"
    )
    pictures.add_argument(
        "--trace", type=Path, metavar="FILE", help="also save the timelines as a trace for ui.perfetto.dev (JSON)"
    )
    layouts.set_defaults(run=_layouts)


def _layouts(options: argparse.Namespace) -> int:
    device = read_device(options.device)
    work = read_work(options)
    speed = options.replica_bytes_per_second
    found = compare_layouts(
        work.model,
        work.batch,
        num_devices=options.num_devices,
        device=device,
        replica_link=None if speed is None else Link(latency_seconds=device.link.latency_seconds, bytes_per_second=speed),
        schedules=list(dict.fromkeys(options.schedules)),
        num_microbatches=options.num_microbatches,
        optimizer_bytes_per_byte=options.optimizer_bytes,
        shard_optimizer_state=options.shard_optimizer_state,
        batch_dim=work.batch_dim,
    )
    print(found)
    timelines = timelines_of_layouts(found)
    save(
        Wanted("--output", options.output, found.plan.save),
        Wanted("--html", options.html, lambda path: write_page(page_of_layouts(found), path)),
        Wanted("--plot", options.plot, lambda path: save_figure(timelines, path)),
        Wanted("--trace", options.trace, lambda path: write_trace(timelines, path)),
    )
    return 0
