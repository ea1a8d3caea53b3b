"""The command ``plan``: how a config's model is cut into stages, without training."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any, get_args

from lightning_fxpipe.cli.configs import CONFIG_HELP, Work, add_config_options, read_work, schedule
from lightning_fxpipe.cli.devices import DEVICE_HELP, add_device_option, read_device
from lightning_fxpipe.cli.saving import Wanted, save
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.pictures.html_page import write_page
from lightning_fxpipe.pictures.page import Page, page_of_simulated_plan, title_of_plan
from lightning_fxpipe.planner.cut_rule import BalanceName
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.simulated_plan import simulate_plan
from lightning_fxpipe.planner.step_plan import make_plan
from lightning_fxpipe.simulation.by_name import SimulatedSchedule
from lightning_fxpipe.simulation.devices import Device

_EXAMPLE = """\
example:
  python -m lightning_fxpipe plan --config examples/configs/lm_fxpipe.yaml --num-stages 4

"""


def add_command(commands: Any) -> None:
    """Adds ``plan`` to the commands of a parser."""
    plan = commands.add_parser(
        "plan",
        help="print how a config's model is cut into stages, without training",
        description="Prints how a config's model is cut into stages, without training.",
        epilog=_EXAMPLE + DEVICE_HELP + CONFIG_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_options(plan)
    plan.add_argument(
        "--balance",
        default="parameters",
        choices=get_args(BalanceName),
        help="what is equal on all stages, as far as it can be (default: parameters)",
    )
    plan.add_argument(
        "--split-points",
        nargs="+",
        default=[],
        metavar="PATH",
        help="the modules that the stages after the first begin with, instead of a balance",
    )
    plan.add_argument(
        "--stage-of",
        nargs="+",
        default={},
        action=_StageOf,
        metavar="PATTERN=STAGE",
        help="modules and the stage that each has to be in, as 'model.embed*=0'; -1 is the last stage",
    )
    plan.add_argument("--output", type=Path, metavar="FILE", help="also save the plan as JSON, for FxPipeStrategy(plan=FILE)")
    plan.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also save the plan as a page for a browser, with timelines of a simulated step on --device",
    )
    devices = plan.add_argument_group("devices", "by the rank; rank 0 has the last stage")
    devices.add_argument(
        "--schedule",
        default="gpipe",
        type=schedule,
        metavar="NAME",
        help=f"which decides how many microbatches a stage keeps: one of {', '.join(get_args(SimulatedSchedule))} "
        "(default: gpipe)",
    )
    devices.add_argument(
        "--num-devices", type=int, metavar="P", help="devices that share the stages (default: one for each stage)"
    )
    devices.add_argument(
        "--device-speeds",
        nargs="+",
        type=_positive_float,
        default=[],
        metavar="X",
        help="how fast each device is, in proportion to the others (default: all are equal)",
    )
    devices.add_argument(
        "--device-memory-gib",
        nargs="+",
        type=_positive_float,
        default=[],
        metavar="X",
        help="what each device has for its stages, or one number for all: the stages of the plan fit",
    )
    add_device_option(plan, "what the step of --html runs on: ")
    plan.set_defaults(run=_plan)


class _StageOf(argparse.Action):
    """Reads ``PATTERN=STAGE`` pairs into a dict."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        found = {}
        for value in values:
            pattern, _, stage = value.rpartition("=")
            if not pattern or not stage.removeprefix("-").isdecimal():
                raise argparse.ArgumentError(self, f"expected PATTERN=STAGE, got {value}")
            found[pattern] = int(stage)
        setattr(namespace, self.dest, found)


def _positive_float(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return number


def _plan(options: argparse.Namespace) -> int:
    device = read_device(options.device)
    work = read_work(options)
    page = _page(options, work, device) if options.html else None
    plan = page.plan if page is not None and page.plan is not None else _make_plan(options, work)
    print(plan)
    output = Wanted("--output", options.output, plan.save)
    save(output, *(() if page is None else (Wanted("--html", options.html, partial(write_page, page)),)))
    return 0


def _num_stages(options: argparse.Namespace, work: Work) -> int | None:
    """As many as asked for; None where split points say it."""
    number: int | None = options.num_stages if options.split_points else work.num_stages
    return number


def _make_plan(options: argparse.Namespace, work: Work) -> PartitionPlan:
    return make_plan(
        work.model,
        work.batch,
        num_stages=_num_stages(options, work),
        balance=options.balance,
        split_points=options.split_points,
        stage_of=options.stage_of,
        schedule=options.schedule,
        num_devices=options.num_devices,
        device_speeds=options.device_speeds,
        device_memory_gib=_memory(options),
        num_microbatches=work.num_microbatches,
        batch_dim=work.batch_dim,
    )


def _memory(options: argparse.Namespace) -> float | list[float]:
    given: list[float] = options.device_memory_gib
    return given[0] if len(given) == 1 else given


def _page(options: argparse.Namespace, work: Work, device: Device) -> Page:
    """The plan with a simulated step, or by itself where none can be simulated, with the reason."""
    try:
        return page_of_simulated_plan(
            simulate_plan(
                work.model,
                work.batch,
                num_stages=_num_stages(options, work) or len(options.split_points) + 1,
                balance=options.balance,
                split_points=options.split_points,
                stage_of=options.stage_of,
                device_speeds=options.device_speeds,
                device_memory_gib=_memory(options),
                num_microbatches=work.num_microbatches,
                batch_dim=work.batch_dim,
                device=device,
            )
        )
    except UnsupportedError as error:
        plan = _make_plan(options, work)
        reason = f"{error.what.removesuffix('.')}: {error.observed}." if error.observed else error.what
        return Page(title=title_of_plan(plan), plan=plan, notes=(reason,))
