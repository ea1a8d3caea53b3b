"""A config's model, a batch of its data, and how many stages and microbatches it gets: what the commands begin with.

It knows Lightning, not the strategy.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fxpipe._compat.loops import first_loader_batch
from lightning_fxpipe.errors import FxPipeError, ScheduleError
from lightning_fxpipe.microbatch.split import count_samples, default_num_microbatches
from lightning_fxpipe.simulation.by_name import schedule_named

CONFIG_HELP = """\
The config is one of LightningCLI's. Where its `model` and `data` sections give no class_path, because the program fixes the
classes, name them with --model and --data. Classes are imported from the current directory, and from the config's folder and
the folders above it up to the current directory.
"""


@dataclass(frozen=True)
class Work:
    """What a config describes.

    Attributes:
        model: The LightningModule.
        batch: The first batch of its training data.
        num_stages, num_microbatches: As asked for, or by default.
        batch_dim: Dimension of tensors that is the batch.
    """

    model: Any
    batch: Any
    num_stages: int
    num_microbatches: int
    batch_dim: int


def add_config_options(parser: argparse.ArgumentParser, *, has_stages: bool = True) -> None:
    """Adds the options that say which model and batch are meant, and into how many stages the model is cut if that is given."""
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="a LightningCLI config (YAML)")
    parser.add_argument("--model", metavar="CLASS", help="import path of the LightningModule, if the config has none")
    parser.add_argument("--data", metavar="CLASS", help="import path of the LightningDataModule, if the config has none")
    several = "up to four for each of several stages, of two samples or more" if has_stages else "several numbers are looked at"
    if has_stages:
        parser.add_argument("--num-stages", type=positive, metavar="N", help="number of stages (default: the config's devices)")
    else:
        parser.set_defaults(num_stages=1)
    parser.add_argument("--num-microbatches", type=positive, metavar="M", help=f"microbatches of a batch (default: {several})")
    parser.add_argument(
        "--batch-dim", type=int, default=0, metavar="D", help="dimension of tensors that is the batch (default: 0)"
    )


def read_work(options: argparse.Namespace) -> Work:
    """Makes the model and a batch.

    Raises:
        FxPipeError: The config does not say which.
    """
    config = _read_config(options.config)
    _extend_import_path(options.config)
    model = _instantiate(config, "model", options.model)
    data = _instantiate(config, "data", options.data)
    num_stages = options.num_stages or _devices(config)
    data.prepare_data()
    data.setup("fit")
    batch = first_loader_batch(data.train_dataloader())
    num_samples = count_samples(batch, options.num_microbatches, options.batch_dim).num_samples
    count = options.num_microbatches or default_num_microbatches(num_samples, num_stages)
    return Work(model, batch, num_stages, count, options.batch_dim)


def positive(text: str) -> int:
    """A number of things, of which there is one at least."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return number


def schedule(text: str) -> str:
    """Reads the name of a schedule."""
    try:
        return schedule_named(text)
    except ScheduleError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a schedule: expected {error.expected}") from None


def _read_config(path: Path) -> dict[str, Any]:
    import yaml  # comes with the extra `examples`, as LightningCLI's own parser does

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise FxPipeError(
            "Cannot read the config.", where=str(path), observed=str(error), todo="Give --config a file in YAML."
        ) from error
    if not isinstance(config, dict):
        raise FxPipeError(
            "The config is not a mapping.",
            where=str(path),
            observed=type(config).__name__,
            todo="Give the config that LightningCLI takes, with sections such as `model` and `data`.",
        )
    return dict(config.get("fit") or config)  # a config may hold a section for each subcommand


def _extend_import_path(config: Path) -> None:
    """Adds the current directory and the folders between it and the config."""
    here, folder = Path.cwd(), config.resolve().parent
    folders = [folder, *folder.parents]
    for candidate in (here, *(f for f in folders if f == folder or here in f.parents)):
        if str(candidate) not in sys.path:
            sys.path.append(str(candidate))


def _instantiate(config: dict[str, Any], section: str, class_name: str | None) -> Any:
    """The object of a config section, made as LightningCLI makes it."""
    from jsonargparse import ArgumentParser

    values = config.get(section) or {}
    if "class_path" in values:
        class_name, values = values["class_path"], values.get("init_args") or {}
    if class_name is None:
        raise FxPipeError(
            f"The config does not say which class its `{section}` is.",
            observed=f"no class_path under `{section}`",
            expected="a class_path, or the class on the command line",
            todo=f"Add --{section} package.module.Class.",
        )
    module_name, _, name = class_name.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise FxPipeError(f"Cannot import {class_name}.", observed=str(error), todo=f"Check --{section}.") from error
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, section)
    try:
        parsed = parser.parse_object({section: values})
    except argparse.ArgumentError as error:
        raise FxPipeError(
            f"The config's `{section}` does not fit {class_name}.",
            observed=str(error),
            todo=f"Give `{section}.init_args` what the class takes, by name and type.",
        ) from error
    return getattr(parser.instantiate(parsed), section)


def _devices(config: dict[str, Any]) -> int:
    devices = (config.get("trainer") or {}).get("devices")
    if isinstance(devices, list):
        return len(devices)
    if isinstance(devices, int) and devices > 0:
        return devices
    raise FxPipeError(
        "The number of stages is not known.",
        observed=f"trainer.devices: {devices}",
        expected="a number of devices in the config",
        todo="Add --num-stages N.",
    )
