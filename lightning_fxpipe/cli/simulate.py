"""The command ``simulate``: what a step of a config's model would take under several schedules, without training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from lightning_fxpipe.cli.configs import CONFIG_HELP, add_config_options, read_work, schedule
from lightning_fxpipe.cli.devices import DEVICE_HELP, add_device_option, read_device
from lightning_fxpipe.cli.saving import Wanted, save
from lightning_fxpipe.pictures.chrome_trace import write_trace
from lightning_fxpipe.pictures.figure import save_figure
from lightning_fxpipe.pictures.html_page import write_page
from lightning_fxpipe.pictures.page import page_of_simulated_plan
from lightning_fxpipe.planner.simulated_plan import SCHEDULES, SimulatedPlan, simulate_plan
from lightning_fxpipe.simulation.actions import is_table_file
from lightning_fxpipe.simulation.by_name import SimulatedSchedule
from lightning_fxpipe.simulation.timeline import Timeline

_EXAMPLE = """\
examples:
  python -m lightning_fxpipe simulate --config examples/configs/lm_fxpipe.yaml --num-stages 4 --device a100
  python -m lightning_fxpipe simulate --config examples/configs/lm_fxpipe.yaml --num-stages 4 --html step.html
  python -m lightning_fxpipe simulate --config examples/configs/lm_fxpipe.yaml --schedules 1f1b zb_h1 --plot step.png

"""


def add_command(commands: Any) -> None:
    """Adds ``simulate`` to the commands of a parser."""
    simulate = commands.add_parser(
        "simulate",
        help="print what a step of a config's model would take under several schedules, without training",
        description="Prints what a step of a config's model would take under several schedules, without training.",
        epilog=_EXAMPLE + DEVICE_HELP + CONFIG_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_options(simulate)
    add_device_option(simulate)
    simulate.add_argument(
        "--optimizer-bytes",
        type=float,
        default=2.0,
        metavar="X",
        help="what the optimizer keeps for each byte of a parameter (default: 2, as Adam)",
    )
    simulate.add_argument(
        "--schedules",
        nargs="+",
        default=SCHEDULES,
        type=_schedule_or_table,
        metavar="NAME",
        help=f"those to compare, of {', '.join(get_args(SimulatedSchedule))}, or CSV files with tables of actions (default: "
        "nine of them)",
    )
    pictures = simulate.add_argument_group("pictures")
    pictures.add_argument(
        "--html", type=Path, metavar="FILE", help="also save the stages, the timelines and the memory as a page for a browser"
    )
    pictures.add_argument(
        "--plot", type=Path, metavar="FILE", help="also save the timelines as a figure: .png or .svg (needs matplotlib)"
    )
    pictures.add_argument(
        "--trace", type=Path, metavar="FILE", help="also save the timelines as a trace for ui.perfetto.dev (JSON)"
    )
    simulate.set_defaults(run=_simulate)


def _schedule_or_table(text: str) -> str:
    return text if is_table_file(text) else schedule(text)


def _simulate(options: argparse.Namespace) -> int:
    device = read_device(options.device)
    work = read_work(options)
    simulated = simulate_plan(
        work.model,
        work.batch,
        num_stages=work.num_stages,
        num_microbatches=work.num_microbatches,
        batch_dim=work.batch_dim,
        device=device,
        schedules=list(dict.fromkeys(options.schedules)),
        optimizer_bytes_per_byte=options.optimizer_bytes,
    )
    print(simulated)
    timelines = _timelines(simulated)
    save(
        Wanted("--html", options.html, lambda path: write_page(page_of_simulated_plan(simulated), path)),
        Wanted("--plot", options.plot, lambda path: save_figure(timelines, path)),
        Wanted("--trace", options.trace, lambda path: write_trace(timelines, path)),
    )
    return 0


def _timelines(simulated: SimulatedPlan) -> Sequence[Timeline]:
    return [Timeline.of_simulation(f"{name}, simulated", found) for name, found in simulated.simulations.items()]
