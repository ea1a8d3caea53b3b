"""Reads the options of ``FxPipeStrategy`` from its docstring and signature, for the documentation."""

from __future__ import annotations

import inspect
import re

import docstring_parser

from lightning_fxpipe import FxPipeStrategy


def option_groups() -> dict[str, list[tuple[str, str, object]]]:
    """Returns the options by purpose, in the order of the docstring: the name, the meaning and the default of each."""
    documented = docstring_parser.parse(inspect.getdoc(FxPipeStrategy) or "", docstring_parser.DocstringStyle.GOOGLE)
    meanings = {one.arg_name: " ".join((one.description or "").split()) for one in documented.params}
    parameters = inspect.signature(FxPipeStrategy).parameters
    listed = (documented.long_description or "").partition("Options by purpose:")[2]
    return {
        title: [(name, meanings[name], parameters[name].default) for name in re.findall(r"``(\w+)``", names)]
        for title, names in re.findall(r"^- ([^:]+):((?:.|\n(?!- ))+)", listed, flags=re.MULTILINE)
    }
