"""The command line: ``python -m lightning_fxpipe plan ...`` prints a partition without training, ``simulate`` what a step would
take with it, ``layouts`` how many stages and replicas are fastest; ``inspect`` and ``convert`` are about checkpoints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from lightning_fxpipe.cli import checkpoints, layouts, plan, simulate
from lightning_fxpipe.errors import FxPipeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lightning_fxpipe", description="Pipeline parallelism for Lightning.")
    parser.add_argument("--version", action="version", version=_version_text())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan.add_command(commands)
    simulate.add_command(commands)
    layouts.add_command(commands)
    checkpoints.add_commands(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except FxPipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _version_text() -> str:
    names = ("lightning-fxpipe", "torch", "lightning")
    return ", ".join(f"{name} {version(name)}" for name in names)


if __name__ == "__main__":
    sys.exit(main())
