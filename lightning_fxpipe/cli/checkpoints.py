"""The commands ``inspect`` and ``convert``: what a checkpoint holds, and the same in another format."""

from __future__ import annotations

import argparse
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_fxpipe.checkpoint.converting import Conversion, Target, convert
from lightning_fxpipe.checkpoint.damage import damage_told
from lightning_fxpipe.checkpoint.inspecting import describe, look_into
from lightning_fxpipe.checkpoint.locations import Location
from lightning_fxpipe.errors import FxPipeError

_SOURCES = """\
A checkpoint is a folder of torch.distributed.checkpoint (of this strategy, FSDP or ModelParallelStrategy), a .ckpt file of a
Trainer, a file of torch.save(module.state_dict()), a .safetensors file, or a folder of Hugging Face's save_pretrained. A URL of
fsspec does, too.
"""

_INSPECT_EPILOG = f"""\
{_SOURCES}
No tensor is read, unless with --verify, and no code of the checkpoint is run.

examples:
  python -m lightning_fxpipe inspect checkpoints/epoch=3-step=1000.ckpt
  python -m lightning_fxpipe inspect model.safetensors --tensors
  python -m lightning_fxpipe inspect checkpoints/last.ckpt --verify
"""

_CONVERT_EPILOG = f"""\
{_SOURCES}
What TARGET becomes is said by its name: .safetensors; a folder without a suffix or with a slash at its end; else a single
file, which a plain Trainer resumes and load_from_checkpoint loads. Every bit stays the same, there and back. The memory must
have room for all tensors of a folder once; those of a file are not loaded.

examples:
  python -m lightning_fxpipe convert checkpoints/last.ckpt whole.ckpt            folder to single file
  python -m lightning_fxpipe convert whole.ckpt last.ckpt --to folder            and back
  python -m lightning_fxpipe convert checkpoints/last.ckpt model.safetensors     weights only
  python -m lightning_fxpipe convert model.safetensors start.ckpt                weights to begin a run with
"""


def add_commands(commands: Any) -> None:
    """Adds the two commands to a parser's; each sets ``run``, which takes the options and returns the exit status."""
    look = _command(commands, "inspect", "print what a checkpoint holds, without loading it", _INSPECT_EPILOG, _inspect)
    look.add_argument("checkpoint", metavar="CHECKPOINT", help="path or URL")
    look.add_argument("--tensors", action="store_true", help="also list every tensor of the model")
    look.add_argument("--verify", action="store_true", help="also read all of it, and compare it with its checksums")
    change = _command(commands, "convert", "write a checkpoint in another format", _CONVERT_EPILOG, _convert)
    change.add_argument("source", metavar="SOURCE", help="path or URL")
    change.add_argument("target", metavar="TARGET", help="path of what is written")
    change.add_argument("--to", choices=[target.value for target in Target], help="what to write, whatever TARGET's name says")
    change.add_argument(
        "--weights-only", action="store_true", help="leave out optimizers, schedulers and callbacks (safetensors always does)"
    )
    change.add_argument("--force", action="store_true", help="replace what is at TARGET")
    change.add_argument(
        "--trust", action="store_true", help="unpickle objects of any class, which can run code: for your own files"
    )


def _command(
    commands: Any, name: str, purpose: str, epilog: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=lambda options: _run_reporting(run, options))
    return parser


def _run_reporting(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Runs a command; of an error one line is printed."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized.*")
            return run(options)
    except FxPipeError as error:
        details = "; ".join(filter(None, (error.observed, error.todo)))
        text = f"{error.where + ': ' if error.where else ''}{error.what}{f' ({details})' if details else ''}"
    except pickle.UnpicklingError as error:
        unsafe = next((line for line in str(error).splitlines() if "Unsupported" in line), str(error).partition("\n")[0])
        text = f"The checkpoint holds objects that could run code; --trust loads them all the same. {unsafe.strip()}"
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        text = str(error).partition("\n")[0] or type(error).__name__
    print(f"error: {text}", file=sys.stderr)
    return 1


def _inspect(options: argparse.Namespace) -> int:
    with damage_told(options.checkpoint):
        contents = look_into(Location.of(options.checkpoint), verifies=options.verify)
        text = describe(contents, with_tensors=options.tensors)
    print(text)
    return 1 if contents.lacking else 0


def _convert(options: argparse.Namespace) -> int:
    target = Target(options.to) if options.to else Target.of(options.target)
    path = Path(options.target)
    done = convert(
        Location.of(options.source),
        path,
        target,
        only_weights=options.weights_only,
        pickle_is_trusted=options.trust,
        overwrites=options.force,
    )
    print(_report(done, path))
    return 0


def _report(done: Conversion, path: Path) -> str:
    lines = [f"Converted a {done.source.value} to {path} ({done.target.value})"]
    if done.left_out:
        lines.append(f"Left out, as only weights have a place there: {', '.join(done.left_out)}")
    if done.shared:
        pairs = ", ".join(f"{name} = {kept}" for name, kept in done.shared.items())
        lines.append(f"Stored once, under one of its names: {pairs}")
    if done.target is Target.FOLDER and done.has_numbers:
        lines.append("Nothing says which parameters the optimizer has numbered: its states stay so, in one file of the folder")
    return "\n".join(lines)
