"""The site's pages: those that are generated name all that is in the code, and words that the project avoids are found."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_fxpipe
from lightning_fxpipe import FxPipeStrategy

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CODESPELL = [sys.executable, "-m", "codespell_lib", "-D", "-", "-D", "docs/codespell.txt"]


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation() -> None:
    class Loader(yaml.SafeLoader): ...

    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"[\w/-]+\.md", str(yaml.load(text, Loader)["nav"]))
    assert sorted(named) == [page.relative_to(DOCS).as_posix() for page in PAGES]


def test_every_option_is_described_once(hooks: Any) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| `.+` \|$", hooks.options(), flags=re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(inspect.signature(FxPipeStrategy).parameters)


def test_options_are_in_the_groups_of_the_docstring(hooks: Any) -> None:
    def strategy(a: int = 1, b: str = "x", c: bool = False) -> None:
        """Trains.

        - Cuts: ``b``,
          ``a``
        - Loss: ``c``

        Args:
            a: First.
            b: Second ``"x"`` or
                third.
            c: Last.
        """

    page = hooks._tables_of_options(inspect.getdoc(strategy), inspect.signature(strategy).parameters)
    lines = [line for line in page.splitlines() if line and not line.startswith(("| Option", "|---"))]
    assert lines == [
        "## Cuts",
        "| `b` | Second `\"x\"` or third. | `'x'` |",
        "| `a` | First. | `1` |",
        "## Loss",
        "| `c` | Last. | `False` |",
    ]


def test_every_export_is_on_the_page_of_the_python_api(hooks: Any) -> None:
    named = set(re.findall(r"^::: lightning_fxpipe\.(\w+)$", hooks.python_api(), flags=re.MULTILINE))
    assert named >= set(lightning_fxpipe.__all__)


def test_every_command_has_its_help(hooks: Any) -> None:
    page = hooks.command_line()
    for command in ("plan", "simulate", "layouts", "inspect", "convert"):
        assert f"## `fxpipe {command}`" in page
    assert page.count("usage: ") == page.count("## ")


def test_an_error_is_listed_with_its_advice(hooks: Any) -> None:
    code = """
        def check(name):
            raise TraceError(f"Cannot trace {name}.", where=name, todo="Use " "another." if name else "Name it.")
    """
    assert [*hooks._messages(ast.parse(textwrap.dedent(code)), {"TraceError"})] == [
        ("TraceError", "Cannot trace ….", "Use another. / Name it.")
    ]
    page = hooks.errors()
    assert "Cannot form … stages." in page
    assert page.count("\n| ") > 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_its_python_can_be_parsed(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        if not block.startswith("--8<--"):
            ast.parse(block)


def test_generated_parts_are_known(hooks: Any) -> None:
    wanted = [name for page in PAGES for name in re.findall(r"<!-- generated: (\w+) -->", page.read_text(encoding="utf-8"))]
    assert sorted(wanted) == sorted(hooks.PARTS)


def test_each_avoided_word_and_phrase_is_found(tmp_path: Path) -> None:
    avoided = [line.partition("->")[0] for line in (DOCS / "codespell.txt").read_text(encoding="utf-8").splitlines()]
    (tmp_path / "page.md").write_text("\n".join(f"Here {phrase} stands." for phrase in avoided))
    run = subprocess.run([*CODESPELL, tmp_path / "page.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert len(run.stdout.splitlines()) == len(avoided) > 20


def test_every_recorded_span_is_on_the_page_about_recording() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in Path(lightning_fxpipe.__path__[0]).rglob("*.py"))
    named = set(re.findall(r"\.(?:during|undivided)\(\"([^\"]+)\"\)", code))
    page = (DOCS / "how-to" / "recording.md").read_text(encoding="utf-8").partition("## Spans")[2].partition("\n\nIf ")[0]
    rows = {name for row in re.findall(r"^\| (`.+?) \| ", page, flags=re.MULTILINE) for name in re.findall(r"`(.+?)`", row)}
    assert len(named) >= 5
    assert rows == named | {"training_step", "1F0", "1B0", "1I0", "1W0"}
