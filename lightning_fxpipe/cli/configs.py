"""Reads a LightningCLI config: its model, a batch of its data, and the options of a command."""

from __future__ import annotations

import argparse
import json
import pydoc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import Namespace, get_loader
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_fxpipe._compat.lightning import silence_lightning
from lightning_fxpipe._compat.loops import first_loader_batch
from lightning_fxpipe.errors import FxPipeError

# Other sections of a config are about the run: neither a model nor a batch depends on them.
_SECTIONS = ("model", "data", "trainer")


class Work(NamedTuple):
    """A command's options, the LightningModule that they are about, and the first batch of its training data."""

    options: Namespace
    model: Any
    batch: Any


def read_work(command: str, purpose: str, arguments: Sequence[str], add_options: Callable[[Any], None]) -> Work:
    """Reads a command's arguments, and makes the model and a batch; ``add_options`` adds the command's own options.

    Raises:
        argparse.ArgumentError: An option is unknown or has a wrong value.
        FxPipeError: The config cannot be read.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", "-c", type=Path, action="append", default=[])
    first.add_argument("--model-class")
    first.add_argument("--data-class")
    known, rest = first.parse_known_args(arguments)
    here, folders = Path.cwd(), [path.resolve().parents for path in known.config]
    around = [each for parents in folders for level, each in enumerate(parents) if level < 2 or here in each.parents]
    sys.path += [str(path) for path in (here, *around) if str(path) not in sys.path]
    cli = _ConfigCLI(
        _imported(known.model_class, "--model-class"),
        _imported(known.data_class, "--data-class"),
        run=False,
        save_config_callback=None,
        auto_configure_optimizers=False,
        parser_kwargs={"prog": f"fxpipe {command}", "description": purpose, "exit_on_error": False},
        args=[*(part for path in known.config for part in ("--config", _sections(path, known))), *rest],
        add_options=add_options,
    )
    options = cli.config
    for name in ("model", "data"):
        if options.get(name) is None:
            what = f"The config defines no {name}." if known.config else f"No config, and no --{name}."
            todo = f"Pass --{name} package.module.Class, or --config FILE, a LightningCLI config with a section `{name}`."
            raise FxPipeError(what, todo=todo)
    sections = Namespace(model=options.model, data=options.data)  # type: ignore[no-untyped-call]
    made = cli.parser.instantiate(sections)
    silence_lightning()
    made.data.prepare_data()
    made.data.setup("fit")
    return Work(options, made.model, first_loader_batch(made.data.train_dataloader()))


class _ConfigCLI(LightningCLI):
    """A LightningCLI that makes nothing: the Trainer of a config may be for other machines."""

    def __init__(self, *args: Any, add_options: Callable[[Any], None], **kwargs: Any) -> None:
        self._add_options = add_options
        super().__init__(*args, **kwargs)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the command's options. A seed is accepted and has no effect: shapes do not depend on it."""
        parser.add_argument("--seed_everything", default=False, help=argparse.SUPPRESS)
        self._add_options(parser)
        group = parser.add_argument_group("config of a program with fixed classes, such as LightningCLI(MyModel, MyData)")
        group.add_argument("--model-class", metavar="CLASS", help="import path of the LightningModule")
        group.add_argument("--data-class", metavar="CLASS", help="import path of the LightningDataModule")

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the model and the data; of the Trainer any option is accepted."""
        parser.add_argument("--trainer", type=dict, default={}, help="Trainer options; only `devices` is used")
        model, data = self.model_class, self.datamodule_class
        parser.add_lightning_class_args(model or LightningModule, "model", subclass_mode=model is None, required=False)
        parser.add_lightning_class_args(data or LightningDataModule, "data", subclass_mode=data is None, required=False)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses arguments that are not those of ``sys.argv``, without Lightning's warning about that."""
        self.config = parser.parse_args(args)

    def instantiate_classes(self) -> None:
        """Makes nothing."""


def _sections(path: Path, known: argparse.Namespace) -> str:
    """The sections of a config that count, as JSON; ``known`` has the options for classes that it does not name."""
    try:
        config = get_loader("yaml")(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FxPipeError(f"No such file: {path}", todo="Pass the path of a LightningCLI config to --config.") from None
    except Exception as error:  # the parser's errors have no common class
        todo = "Pass a YAML file to --config."
        raise FxPipeError("Cannot read the config.", where=str(path), observed=str(error), todo=todo) from error
    if not isinstance(config, dict):
        todo = "Pass a LightningCLI config to --config, with sections such as `model` and `data`."
        raise FxPipeError("The config is not a mapping.", where=str(path), observed=str(type(config)), todo=todo)
    config = config.get("fit") or config  # a config may have a section for each subcommand
    for name in ("model", "data"):
        if isinstance(config.get(name), dict) and "class_path" not in config[name] and vars(known)[f"{name}_class"] is None:
            raise FxPipeError(
                f"The config does not name the class of its {name}.",
                where=str(path),
                observed=f"options in the section `{name}` without class_path",
                expected="class_path and init_args, unless the class is given on the command line",
                todo=f"Pass --{name}-class package.module.Class: the class that the program passes to LightningCLI.",
            )
    return json.dumps({name: config[name] for name in _SECTIONS if config.get(name) is not None})


def _imported(class_path: str | None, option: str) -> Any:
    kind = None if class_path is None else pydoc.locate(class_path)
    if class_path is not None and kind is None:
        raise FxPipeError(f"Cannot import {class_path}.", todo=f"Check {option}.")
    return kind
