"""The command line, ``fxpipe`` or ``python -m lightning_fxpipe``: each command is imported only when it runs."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version

from lightning_fxpipe.errors import FxPipeError

# By its name: the module in the room `cli`, and what the command does.
COMMANDS = {
    "plan": ("plan", "print how the configured model is split into stages"),
    "simulate": ("plan", "print the time and memory of a training step under several schedules"),
    "layouts": ("plan", "print how many stages and replicas are fastest on a number of devices"),
    "inspect": ("checkpoints", "print the contents of a checkpoint without loading it"),
    "convert": ("checkpoints", "write a checkpoint in another format"),
    "doctor": ("doctor", "print versions and devices, and test communication between two processes"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="fxpipe",
        description="Pipeline parallelism for PyTorch Lightning.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<10}{purpose}" for name, (_, purpose) in COMMANDS.items())
        + "\n\n`fxpipe COMMAND --help` describes a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_versions())
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args((sys.argv[1:] if arguments is None else arguments) or ["--help"])
    module, purpose = COMMANDS[options.command]
    try:
        command = getattr(importlib.import_module(f"lightning_fxpipe.cli.{module}"), options.command)
        status = int(command(options.arguments, f"{purpose[0].upper()}{purpose[1:]}."))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except argparse.ArgumentError as error:
        print(f"error: {error}\nTry `fxpipe {options.command} --help`.", file=sys.stderr)
        return 2
    except FxPipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _versions() -> str:
    names = ("lightning-fxpipe", "torch", "lightning")
    return ", ".join(f"{name} {version(name)}" for name in names)


if __name__ == "__main__":
    sys.exit(main())
