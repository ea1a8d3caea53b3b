"""The commands ``inspect`` and ``convert``: the contents of a checkpoint, and the same in another format."""

from __future__ import annotations

import argparse
import json
import pickle
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_fxpipe.checkpoint import converting
from lightning_fxpipe.checkpoint.converting import Target
from lightning_fxpipe.checkpoint.damage import damage_told
from lightning_fxpipe.checkpoint.inspecting import as_dict, describe, look_into
from lightning_fxpipe.checkpoint.locations import Location
from lightning_fxpipe.errors import FxPipeError

_SOURCES = """\
A checkpoint is a folder of torch.distributed.checkpoint (of this strategy, FSDP or ModelParallelStrategy), a .ckpt file of a
Trainer, a file of torch.save(module.state_dict()), a .safetensors file, or a folder of Hugging Face's save_pretrained. URLs
of fsspec are accepted.
"""

_INSPECT_EPILOG = f"""\
{_SOURCES}
Tensors are read only with --verify. No code from the checkpoint is executed.
"""

_CONVERT_EPILOG = f"""\
{_SOURCES}
The output format follows the name of TARGET: .safetensors; a folder if it has no suffix or ends with a slash; otherwise a
single file that a plain Trainer can resume from and load_from_checkpoint can load. Conversion is lossless in both directions.
With --to pretrained it is a folder for Hugging Face's from_pretrained, which also needs a config.json in it.
The tensors of a folder must fit into memory once; those of a file are not loaded.
"""


def inspect(arguments: Sequence[str], purpose: str) -> int:
    """Runs ``fxpipe inspect``."""
    parser = _parser("inspect", purpose, _INSPECT_EPILOG)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="path or URL")
    parser.add_argument("--tensors", action="store_true", help="also list every tensor of the model")
    parser.add_argument("--verify", action="store_true", help="also read all data and verify its checksums")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    with _told(), damage_told(options.checkpoint):
        contents = look_into(_existing(options.checkpoint), verifies=options.verify)
        text = json.dumps(as_dict(contents), indent=2) if options.json else describe(contents, with_tensors=options.tensors)
    print(text)
    return 1 if contents.lacking else 0


def convert(arguments: Sequence[str], purpose: str) -> int:
    """Runs ``fxpipe convert``."""
    parser = _parser("convert", purpose, _CONVERT_EPILOG)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="path or URL")
    add("target", metavar="TARGET", help="path of the new file or folder")
    add("--to", choices=[target.value for target in Target], help="output format (default: from the name of TARGET)")
    add(
        "--weights-only",
        action="store_true",
        help="write weights without optimizers, schedulers and callbacks (always the case for safetensors)",
    )
    add(
        "--submodule",
        metavar="PATH",
        help="with --to pretrained: path of the Hugging Face model in the LightningModule (default: the attribute that holds "
        "all tensors of the checkpoint, if there is one)",
    )
    add("--force", action="store_true", help="replace TARGET if it exists")
    add(
        "--trust", action="store_true", help="unpickle objects of any class, which can execute code; use for trusted files only"
    )
    options = parser.parse_args(arguments)
    target = Target(options.to) if options.to else Target.of(options.target)
    path = Path(options.target)
    if options.submodule is not None and target is not Target.PRETRAINED:
        parser.error("--submodule applies to --to pretrained only")
    with _told():
        done = converting.convert(
            _existing(options.source),
            path,
            target,
            only_weights=options.weights_only,
            pickle_is_trusted=options.trust,
            overwrites=options.force,
            submodule=options.submodule,
        )
    print(done.report(path))
    return 0


def _parser(name: str, purpose: str, epilog: str) -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"fxpipe {name}", description=purpose, epilog=epilog, formatter_class=kind)


def _existing(path: str) -> Location:
    location = Location.of(path)
    if not location.exists():
        raise FxPipeError(f"No such file or folder: {path}", todo="Give the path or URL of a checkpoint.")
    return location


@contextmanager
def _told() -> Iterator[None]:
    """Raises an error that the command line prints, in place of one of a file or a library."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized.*")
            yield
    except FxPipeError:
        raise
    except pickle.UnpicklingError as error:
        unsafe = next((line for line in str(error).splitlines() if "Unsupported" in line), str(error).partition("\n")[0])
        raise FxPipeError(
            "The checkpoint contains objects that could execute code.",
            observed=unsafe.strip(),
            todo="Pass --trust to load them anyway.",
        ) from error
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise FxPipeError(str(error).partition("\n")[0] or type(error).__name__) from error
