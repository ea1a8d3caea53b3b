"""A fault, and the tests that must notice it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


class StaleMutant(ValueError):
    """The code that a mutant changes, or a test that must notice it, is not there any more."""


@dataclass(frozen=True)
class Mutant:
    """One change of the package.

    Attributes:
        file: The file, in the package.
        old: Text that is there exactly once.
        new: What it becomes.
        tests: Tests that must fail then, in ``tests``: the narrowest that do. One is enough.
        meaning: What is wrong then, in a line.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    meaning: str

    def __str__(self) -> str:
        return f"{self.file}: {self.meaning}"

    def applied(self, root: Path = ROOT) -> str:
        """The file's text with the change.

        Raises:
            StaleMutant: The text is not there exactly once, or what comes out is no Python.
        """
        text = (root / "lightning_fxpipe" / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise StaleMutant(f"{self}\n  this occurs {count} times, not once:\n{self.old}")
        changed = text.replace(self.old, self.new)
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise StaleMutant(f"{self}\n  no Python any more: {error}") from error
        return changed

    def node_ids(self) -> list[str]:
        """The tests as pytest names them.

        Raises:
            StaleMutant: One is not there.
        """
        for test in self.tests:
            file, _, name = test.partition("::")
            path = ROOT / "tests" / file
            if not path.is_file() or f"def {name.partition('[')[0]}" not in path.read_text(encoding="utf-8"):
                raise StaleMutant(f"{self}\n  there is no test {test}")
        return [f"tests/{test}" for test in self.tests]
