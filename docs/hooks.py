"""Pages of the site that are generated from the code: the home page, options, command line, Python API and errors.

A page asks for its part by a line ``<!-- generated: NAME -->``. The first sentence of each part below says what it is made from.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_fxpipe"
REPOSITORY = "https://github.com/lightning-fxpipe/lightning-fxpipe/blob/main"
COMMANDS = ("plan", "simulate", "layouts", "inspect", "convert", "doctor")
OPTION_GROUPS = {
    "Start here": ("num_stages", "num_microbatches", "schedule", "balance", "activation_checkpointing", "device_memory_gib"),
    "Partition": ("stages_per_rank", "split_points", "stage_of", "device_speeds", "plan"),
    "Loss and batch": ("loss_reduction", "loss_weight", "batch_dim"),
    "Memory and speed": ("shard_optimizer_state", "compile"),
    "Checkpoints": ("gather_after_run", "save_distributed_checkpoint", "async_save"),
    "Processes": ("process_group_backend", "timeout", "start_method"),
}


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fills in the generated parts of a page; mkdocs calls this for each one."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda found: PARTS[found[1]](), markdown)


def home() -> str:
    """README.md, with links as the site needs them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/index.md)", "](start/quickstart.md)")
    text = text.replace("](docs/", "](")
    return re.sub(r"\]\(((?:[A-Z]+\.(?:md|cff))|LICENSE)\)", rf"]({REPOSITORY}/\1)", text)


def options() -> str:
    """The signature and docstring of ``FxPipeStrategy``, grouped by purpose."""
    import docstring_parser

    from lightning_fxpipe import FxPipeStrategy

    parameters = inspect.signature(FxPipeStrategy).parameters
    parsed = docstring_parser.parse(FxPipeStrategy.__doc__ or inspect.getdoc(FxPipeStrategy.__mro__[1]) or "")
    meanings = {parameter.arg_name: " ".join((parameter.description or "").split()) for parameter in parsed.params}
    grouped = {name for names in OPTION_GROUPS.values() for name in names}
    groups = {**OPTION_GROUPS, "More": tuple(name for name in parameters if name not in grouped)}
    lines = []
    for title, names in groups.items():
        if rows := [name for name in names if name in parameters]:
            lines += [f"## {title}", "", "| Option | Meaning | Default |", "|---|---|---|"]
            lines += [f"| `{name}` | {_cell(meanings[name])} | `{parameters[name].default!r}` |" for name in rows]
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
    """What ``lightning_fxpipe`` exports, by mkdocstrings."""
    import lightning_fxpipe

    names = sorted(lightning_fxpipe.__all__, key=str.lower)
    return "\n\n".join(f"::: lightning_fxpipe.{name}" for name in names)


def errors() -> str:
    """The messages in the package's source: every call of one of its error classes with a message."""
    kinds = {kind.name for kind in ast.walk(_tree(PACKAGE / "errors.py")) if isinstance(kind, ast.ClassDef)}
    found: dict[str, set[tuple[str, str]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for kind, what, todo in _messages(_tree(path), kinds):
            found.setdefault(kind, set()).add((what, todo))
    lines = []
    for kind in sorted(found):
        lines += [f"## {kind}", "", "| Message | What to do |", "|---|---|"]
        lines += [f"| {_cell(what)} | {_cell(todo)} |" for what, todo in sorted(found[kind])]
        lines.append("")
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
