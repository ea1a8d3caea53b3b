"""Each error of the package says what to do, and is named by a test that meets it. Read from the syntax of both."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_layering import MODULES, room_of, tree_of

RUN = 4  # words: a fragment of a text that is no other text's, too
# Which no user can meet, and why.
SAFEGUARDS = {
    "The results of the microbatches cannot be concatenated.": "a warning; the batch runs as one microbatch",
    "The calls that need the whole batch cannot run after all other calls.": "as above",
    " cannot be repeated with the same arguments.": "the trace has been found or made for these arguments",
}
LEFT_OUT = {"checkpoint", "distributed.failure", "distributed.lifeline"}
LOOKED_AT = [module for module in MODULES if not LEFT_OUT & {module, room_of(module)}]


@cache
def kinds() -> frozenset[str]:
    """Names of the error classes, those of single modules included, and of functions that pass a text on to one."""
    names = {"FxPipeError"}
    for module in ["errors", *MODULES]:
        for node in ast.walk(tree_of(module)):
            is_kind = isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} & names
            passes_on = isinstance(node, ast.FunctionDef) and [arg.arg for arg in node.args.args][:1] == ["what"]
            if is_kind or passes_on:
                names.add(node.name)  # type: ignore[attr-defined]
    return frozenset(names)


def errors_of(tree: ast.Module) -> Iterator[tuple[ast.Call, list[str]]]:
    """Each error that is made, and the constant parts of its texts, one for each alternative."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).rpartition(".")[2] in kinds():
            text = node.args[0]
            texts = [text.body, text.orelse] if isinstance(text, ast.IfExp) else [text]
            if found := [part for one in texts if (part := constant_part(one))]:
                yield node, found


def constant_part(text: ast.expr) -> str:
    """A text without what is put into it: its longest part."""
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    return max(
        (part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)), key=len, default=""
    )


def runs(text: str) -> set[tuple[str, ...]]:
    """All that follows on each other in a text: ``RUN`` words, or all of a shorter one."""
    words = re.findall(r"[\w'-]+", text)
    return {tuple(words[start : start + RUN]) for start in range(max(1, len(words) - RUN + 1))}


@cache
def own_runs() -> dict[str, set[tuple[str, ...]]]:
    """What of each text is no other's."""
    texts = {text for module in LOOKED_AT for _, found in errors_of(tree_of(module)) for text in found}
    count = Counter(run for text in texts for run in runs(text))
    return {text: {run for run in runs(text) if count[run] == 1} for text in texts}


@cache
def named_in_tests() -> frozenset[tuple[str, ...]]:
    """Runs of all strings in tests, of every length that is looked for; of patterns without their escapes."""
    lengths = {len(run) for found in own_runs().values() for run in found}
    named = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if path != Path(__file__) and isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = re.findall(r"[\w'-]+", node.value.replace("\\", ""))
                named |= {
                    tuple(words[start : start + length]) for length in lengths for start in range(len(words) - length + 1)
                }
    return frozenset(named)


def test_every_error_is_named_by_a_test() -> None:
    unnamed = {text for text, own in own_runs().items() if not own & named_in_tests()}
    assert unnamed - SAFEGUARDS.keys() == set()
    assert SAFEGUARDS.keys() <= own_runs().keys()


@pytest.mark.parametrize("module", LOOKED_AT)
def test_every_error_says_what_to_do(module: str) -> None:
    """What was found may be added later, by ``check_agreement``."""
    lacking = []
    for call, texts in errors_of(tree_of(module)):
        is_class = isinstance(call.func, ast.Name) and call.func.id[0].isupper()
        if is_class and "todo" not in {keyword.arg for keyword in call.keywords} and texts[0] not in SAFEGUARDS:
            lacking.append(f"line {call.lineno}: {texts[0]}")
    assert lacking == []


def test_errors_are_found_in_every_form() -> None:
    source = (
        "raise TraceError('One.', todo='x')\nerror = errors.BatchError(f'Two {a} and many {b}.')\n"
        "def f(): return UnsupportedError('Three.' if a else 'Four.')\nraise other.what\nraise ValueError('Five.')\n"
        "raise NoModelCall('Six.')\n_misuse('Seven.', root)\nPartitionError(error.what)\n"
    )
    found = [text for _, texts in errors_of(ast.parse(source)) for text in texts]
    assert sorted(found) == [" and many ", "Four.", "One.", "Seven.", "Six.", "Three."]
