"""The command ``simulate``: what a step of a config's model would take under several schedules, without training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_fxpipe.cli.configs import CONFIG_HELP, add_config_options, read_work
from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.planner.simulated_plan import simulate_plan
from lightning_fxpipe.planner.stage_costs import DEVICES, Device
from lightning_fxpipe.simulation.costs import Link

_EXAMPLE = """\
example:
  python -m lightning_fxpipe simulate --config examples/configs/lm_fxpipe.yaml --num-stages 4 --device a100

A device of your own is a YAML file with flops_per_second and bytes_per_second and, if you like, operator_seconds, memory_bytes,
link_latency_seconds and link_bytes_per_second.

"""
_OF_LINK = {"link_latency_seconds": 0.0, "link_bytes_per_second": float("inf")}  # with their defaults
_OF_DEVICE = ("flops_per_second", "bytes_per_second", "operator_seconds", "memory_bytes")


def add_command(commands: Any) -> None:
    """Adds ``simulate`` to the commands of a parser."""
    simulate = commands.add_parser(
        "simulate",
        help="print what a step of a config's model would take under several schedules, without training",
        description="Prints what a step of a config's model would take under several schedules, without training.",
        epilog=_EXAMPLE + CONFIG_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_options(simulate)
    simulate.add_argument(
        "--device", default="a100", metavar="NAME|FILE", help=f"{', '.join(DEVICES)}, or a YAML file (default: a100)"
    )
    simulate.add_argument(
        "--optimizer-bytes",
        type=float,
        default=2.0,
        metavar="X",
        help="what the optimizer keeps for each byte of a parameter (default: 2, as Adam)",
    )
    simulate.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    device = _read_device(options.device)
    work = read_work(options)
    print(
        simulate_plan(
            work.model,
            work.batch,
            num_stages=work.num_stages,
            num_microbatches=work.num_microbatches,
            batch_dim=work.batch_dim,
            device=device,
            optimizer_bytes_per_byte=options.optimizer_bytes,
        )
    )
    return 0


def _read_device(text: str) -> Device:
    """A device by its name, or from a file.

    Raises:
        FxPipeError: There is none, or the file does not describe one.
    """
    if text in DEVICES:
        return DEVICES[text]
    import yaml  # comes with the extra `examples`, as LightningCLI's own parser does

    try:
        values = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
        numbers = {str(key): float(value) for key, value in values.items()}
        unknown = numbers.keys() - {*_OF_DEVICE, *_OF_LINK}
        if unknown:
            raise ValueError(f"nothing is known of {', '.join(sorted(unknown))}")
        latency, speed = (numbers.pop(key, default) for key, default in _OF_LINK.items())
        return Device(**numbers, link=Link(latency_seconds=latency, bytes_per_second=speed))
    except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise FxPipeError(
            "Cannot read a device.",
            where=text,
            observed=str(error),
            expected=f"{', '.join(DEVICES)}, or a YAML file with flops_per_second and bytes_per_second",
            todo="Give --device one of these names, or a file as --help describes it.",
        ) from error
