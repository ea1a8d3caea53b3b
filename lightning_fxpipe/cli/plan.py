"""The command ``plan``: how a config's model is cut into stages, without training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

from lightning_fxpipe.cli.configs import CONFIG_HELP, add_config_options, read_work
from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.planner.cut_rule import BalanceName
from lightning_fxpipe.planner.step_plan import make_plan

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
        epilog=_EXAMPLE + CONFIG_HELP,
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
    plan.add_argument("--output", type=Path, metavar="FILE", help="also save the plan as JSON, for FxPipeStrategy(plan=FILE)")
    plan.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    work = read_work(options)
    plan = make_plan(
        work.model,
        work.batch,
        num_stages=options.num_stages if options.split_points else work.num_stages,
        balance=options.balance,
        split_points=options.split_points,
        num_microbatches=work.num_microbatches,
        batch_dim=work.batch_dim,
    )
    print(plan)
    if options.output:
        try:
            plan.save(options.output)
        except OSError as error:
            raise FxPipeError(
                "Cannot save the plan.",
                where=str(options.output),
                observed=str(error),
                todo="Give --output a path in a folder that exists and can be written.",
            ) from error
        print(f"\nSaved to {options.output}")
    return 0
