"""Pages of the site that are generated from the code: the home page, options, command line, Python API and errors.

A page contains a line ``<!-- generated: NAME -->`` for each part; the docstrings below name the source of each.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_fxpipe"
REPOSITORY = "https://github.com/lightning-fxpipe/lightning-fxpipe/blob/main"
OTHER_MESSAGES = {"inform": "Log lines", "warn": "Warnings"}
COMMANDS = ("plan", "simulate", "layouts", "inspect", "convert", "doctor")
EXPORTING = ("lightning_fxpipe", "lightning_fxpipe.simulation", "lightning_fxpipe.pictures")
# "- Memory and speed: ``compile``, ...", over one line or several.
_GROUP = re.compile(r"^ *- ([^:`]+): (``\w+``(?:,\s+``\w+``)*)", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fills in the generated parts of a page; mkdocs calls this for each one."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda found: PARTS[found[1]](), markdown)


def home() -> str:
    """README.md, with links as the site needs them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/index.md)", "](start/quickstart.md)")
    text = text.replace("](docs/", "](")
    return re.sub(r"\]\(((?:[A-Z]+\.(?:md|cff))|LICENSE)\)", rf"]({REPOSITORY}/\1)", text)


def options() -> str:
    """The signature and docstring of ``FxPipeStrategy``, in the groups that the docstring lists."""
    from lightning_fxpipe import FxPipeStrategy

    return _tables_of_options(inspect.getdoc(FxPipeStrategy) or "", inspect.signature(FxPipeStrategy).parameters)


def _tables_of_options(text: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    import docstring_parser

    described = docstring_parser.parse(text).params
    meanings = {each.arg_name: " ".join((each.description or "").split()) for each in described}
    groups = {title: re.findall(r"``(\w+)``", names) for title, names in _GROUP.findall(text.partition("Args:")[0])}
    grouped = {name for names in groups.values() for name in names}
    groups["More"] = [name for name in parameters if name not in grouped]
    lines = []
    for title, names in groups.items():
        if names:
            lines += [f"## {title}", "", "| Option | Meaning | Default |", "|---|---|---|"]
            lines += [f"| `{name}` | {_cell(meanings[name])} | `{parameters[name].default!r}` |" for name in names]
            lines.append("")
    return "\n".join(lines)


def command_line() -> str:
    """The ``--help`` of each command."""
    from lightning_fxpipe.__main__ import main

    lines = []
    for command in COMMANDS:
        printed = io.StringIO()
        with (
            mock.patch.dict(os.environ, {"COLUMNS": "110", "NO_COLOR": "1"}),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.suppress(SystemExit),
        ):
            main([command, "--help"])
        if printed.getvalue():
            lines += [f"## `fxpipe {command}`", "", "```text", printed.getvalue().rstrip(), "```", ""]
    return "\n".join(lines)


def python_api() -> str:
    """The names that the package and two subpackages export, by mkdocstrings."""
    lines = []
    for module in EXPORTING:
        if names := sorted(getattr(importlib.import_module(module), "__all__", ()), key=str.lower):
            lines += [f"## {module}", *(f"::: {module}.{name}" for name in names)]
    return "\n\n".join(lines)


def errors() -> str:
    """The messages in the package's source: every call of one of its error classes, ``warn`` and ``inform`` with a message."""
    kinds = {kind.name for kind in ast.walk(_tree(PACKAGE / "errors.py")) if isinstance(kind, ast.ClassDef)}
    kinds |= {*OTHER_MESSAGES}
    found: dict[str, set[tuple[str, str]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for kind, what, todo in _messages(_tree(path), kinds):
            found.setdefault(kind, set()).add((what, todo))
    lines = []
    for kind in sorted(found):  # error classes are capitalised, so they precede functions
        if kind in OTHER_MESSAGES:
            lines += [f"## {OTHER_MESSAGES[kind]}", "", *(f"- {_cell(what)}" for what, _ in sorted(found[kind])), ""]
        else:
            lines += [f"## {kind}", "", "| Message | What to do |", "|---|---|"]
            lines += [*(f"| {_cell(what)} | {_cell(todo)} |" for what, todo in sorted(found[kind])), ""]
    return "\n".join(lines)


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _messages(tree: ast.Module, kinds: set[str]) -> Iterator[tuple[str, str, str]]:
    """Class, message and advice of each error that a module makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds and node.args:
            what = _text(node.args[0])
            todo = next((_text(keyword.value) for keyword in node.keywords if keyword.arg == "todo"), "")
            if what.strip("… "):
                yield node.func.id, what, todo


def _text(node: ast.expr) -> str:
    """A string as it is in the source, with … for each value that is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return f"{_text(node.body)} / {_text(node.orelse)}"
    return "…"


def _cell(text: str) -> str:
    """A text that is safe in a cell of a table."""
    text = " ".join(text.split()).replace("``", "`").replace("|", "\\|").replace("<", "&lt;")
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text)


PARTS: dict[str, Callable[[], str]] = {
    "home": home,
    "options": options,
    "command_line": command_line,
    "python_api": python_api,
    "errors": errors,
}
