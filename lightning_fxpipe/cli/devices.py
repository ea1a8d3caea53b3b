"""The option ``--device``: what a simulated step runs on."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.simulation.costs import Link
from lightning_fxpipe.simulation.devices import DEVICES, Device

DEVICE_HELP = """\
A device of your own is a YAML file with flops_per_second and bytes_per_second and, if you like, operator_seconds, memory_bytes,
link_latency_seconds and link_bytes_per_second.

"""
_OF_LINK = {"link_latency_seconds": 0.0, "link_bytes_per_second": float("inf")}  # with their defaults
_OF_DEVICE = ("flops_per_second", "bytes_per_second", "operator_seconds", "memory_bytes")


def add_device_option(parser: argparse.ArgumentParser, purpose: str = "") -> None:
    """Adds ``--device``, whose help begins with what it is for."""
    names = f"{', '.join(DEVICES)}, or a YAML file (default: a100)"
    parser.add_argument("--device", default="a100", metavar="NAME|FILE", help=f"{purpose}{names}")


def read_device(text: str) -> Device:
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
