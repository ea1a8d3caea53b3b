"""The rules of the package's source, read from its syntax: who imports whom, who knows private names, what is documented."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lightning_fxpipe

PACKAGE = "lightning_fxpipe"
FOLDER = Path(lightning_fxpipe.__file__).parent
MAX_LINES = 500

# A module imports only from those before it: data flows in this order.
ORDER = [
    *(
        "errors",
        "replacing",
        "lru",
        "table",
        "plan",
        "rng",
        "roots",
        "_compat",
        "_compat_lightning",
        "_compat_autograd",
        "_compat_modes",
        "containers",
        "sending",
        "shapes",
        "sizes",
        "bytecode",
        "codenames",
        "contents",
        "codecontents",
        "frames",
        "iterators",
        "kinds",
        "snapshot",
        "exchange",
        "placement",
        "writes",
        "madeup",
        "undo",
        "weighting",
        "structure",
        "wording",
        "messages",
        "silence",
        "inputgradient",
        "stepcode",
        "metriccalls",
        "memos",
        "metricstates",
        "signals",
        "objects",
        "torchcalls",
        "parameteruse",
        "examples",
        "checkpointing",
        "probe",
        "calls",
        "distributions",
        "randomness",
        "reads",
        "codereads",
        "prelude",
        "recurrent",
        "graphwriter",
        "heldtensors",
        "looks",
        "innerresults",
        "firstcall",
        "record",
        "steprecord",
        "recordable",
        "recording",
        "fakerun",
        "trace",
        "tracelog",
        "repeat",
        "recompute",
        "reorder",
        "cost",
        "partition",
        "granularity",
        "microbatch",
        "region",
        "span",
        "survey",
        "planning",
        "units",
        "stepplan",
        "following",
    ),
    *(
        "rows",
        "valueuse",
        "division",
        "split",
        "schedule",
        "batchnorms",
        "independence",
        "memory",
        "regionpass",
        "replay",
        "metrics",
        "step",
        "groups",
        "topology",
        "commands",
        "replica",
        "agreement",
        "sparing",
        "loading",
        "stagetraces",
        "passsetup",
        "batchtraces",
        "interleaved",
        "interleaving",
        "batchpasses",
        "regionrun",
        "batchresult",
        "runtime",
        "gradients",
        "jointpass",
        "drawing",
        "remake",
        "deferred",
        "materialise",
        "shard",
        "gather",
    ),
    *("options", "lifeline", "connections", "failure", "tracebacks", "launcher", "launching"),
    *(
        "twins",
        "optimizers",
        "coupling",
        "wholemodel",
        "hookcode",
        "wholestep",
        "hooks",
        "jointstep",
        "locations",
        "safetensorfiles",
        "formats",
        "folders",
        "collect",
        "saving",
        "checkpoint",
        "writing",
        "support",
        "runplan",
        "attributes",
        "examplerun",
        "precision",
        "session",
        "checkpointhooks",
        "replicastrategy",
        "checkpointstrategy",
        "strategy",
        "pl",
        "__init__",
        "converting",
        "inspecting",
        "commands_checkpoint",
        "__main__",
    ),
]
# The command line must plan without a strategy; importing from the package itself would bring it in by the back door.
NEVER_IMPORTED = {"__main__": {"session", "strategy", "__init__"}}
KNOW_LIGHTNING = {
    "_compat",
    "examplerun",
    "_compat_lightning",
    "messages",
    "hookcode",
    "hooks",
    "support",
    "runplan",
    "precision",
    "checkpoint",
    "checkpointhooks",
    "checkpointstrategy",
    "replicastrategy",
    "session",
    "launching",
    "strategy",
    "pl",
    "__init__",
    "__main__",
}
WITHOUT_TORCH = {"errors", "table", "plan"}
KNOW_PRIVATE_NAMES = {"_compat", "_compat_autograd", "_compat_modes", "_compat_lightning"}
LIGHTNING = {"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"}
# Underscored by convention, yet public: a namedtuple's.
PUBLIC_UNDERSCORED = {"_fields", "_replace", "_asdict"}

MODULES = sorted(path.stem for path in FOLDER.glob("*.py"))


@cache
def tree_of(module: str) -> ast.Module:
    """The syntax tree of a module of the package."""
    return ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8"))


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, dotted name of what is imported, local name), imports inside functions and under TYPE_CHECKING included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            # The package is flat, so a relative import is one from the package.
            source = ".".join(filter(None, [PACKAGE if node.level else "", node.module or ""]))
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}", alias.asname or alias.name


def package_modules_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module of this package) for each import from the package; ``__init__`` for what is imported from its top."""
    for line, name, _ in imports_of(tree):
        top, *rest = name.split(".")
        if top == PACKAGE:
            yield line, rest[0] if rest and rest[0] in MODULES else "__init__"


def is_private(name: str) -> bool:
    """Whether one underscore leads the name; two on both sides are Python's own."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def dotted(node: ast.expr) -> list[str]:
    """``["torch", "_C", "x"]`` for ``torch._C.x``; empty where the chain does not begin with a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def test_every_module_has_its_place_in_the_order() -> None:
    assert [module for module in MODULES if module not in ORDER] == []


def test_no_folder_hides_modules_from_these_tests() -> None:
    assert [path for path in FOLDER.rglob("*.py") if path.parent != FOLDER] == []


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_those_before_it(module: str) -> None:
    allowed = set(ORDER[: ORDER.index(module)]) - NEVER_IMPORTED.get(module, set())
    offending = [
        f"{module}.py:{line} imports {name}" for line, name in package_modules_of(tree_of(module)) if name not in allowed
    ]
    assert offending == []


def test_imports_are_found_in_every_form() -> None:
    """The tests here would pass on a package whose imports they cannot see."""
    source = (
        "import lightning_fxpipe.plan as p\nfrom lightning_fxpipe import strategy, PartitionPlan\n"
        "from .runtime import x\nfrom . import step\ndef f():\n    from lightning_fxpipe.errors import FxPipeError\n"
    )
    assert list(package_modules_of(ast.parse(source))) == [
        (1, "plan"),
        (2, "strategy"),
        (2, "__init__"),
        (3, "runtime"),
        (4, "step"),
        (6, "errors"),
    ]


@pytest.mark.parametrize("module", [module for module in MODULES if module not in KNOW_LIGHTNING])
def test_lightning_is_known_to_few_modules(module: str) -> None:
    offending = [(line, name) for line, name, _ in imports_of(tree_of(module)) if name.split(".")[0] in LIGHTNING]
    assert offending == []


@pytest.mark.parametrize("module", sorted(WITHOUT_TORCH))
def test_plans_and_errors_need_neither_torch_nor_lightning(module: str) -> None:
    heavy = {"torch", "torchmetrics", *LIGHTNING}
    assert [(line, name) for line, name, _ in imports_of(tree_of(module)) if name.split(".")[0] in heavy] == []
    # Through another module of the package they would come all the same.
    assert {name for _, name in package_modules_of(tree_of(module))} <= WITHOUT_TORCH


def private_uses(tree: ast.Module) -> list[str]:
    """Private names of torch and Lightning that a module imports or reaches through a name that it imported."""
    foreign = {"torch", "torchmetrics", *LIGHTNING}
    from_foreign = [(line, name, local) for line, name, local in imports_of(tree) if name.split(".")[0] in foreign]
    found = [(line, name) for line, name, _ in from_foreign if any(map(is_private, name.split(".")))]
    roots = {local for _, _, local in from_foreign}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            chain = dotted(node)
            if chain and chain[0] in roots:
                found.append((node.lineno, ".".join(chain)))
    return [f"line {line}: {name}" for line, name in sorted(found)]


@pytest.mark.parametrize("module", [module for module in MODULES if module not in KNOW_PRIVATE_NAMES])
def test_private_names_of_torch_and_lightning_are_used_in_compat_only(module: str) -> None:
    assert private_uses(tree_of(module)) == []


def test_private_uses_are_found_in_every_form() -> None:
    source = (
        "import torch\nfrom torch import nn\nfrom torch.utils import _pytree\nimport lightning.fabric._x\n"
        "torch._C.f()\nnn.Module._call_impl\ntorch.__version__\nself._mine\n"
    )
    assert private_uses(ast.parse(source)) == [
        "line 3: torch.utils._pytree",
        "line 4: lightning.fabric._x",
        "line 5: torch._C",
        "line 6: nn.Module._call_impl",
    ]


@pytest.mark.parametrize("module", [module for module in MODULES if module != "replica"])
def test_the_packages_own_collectives_are_not_those_that_user_code_sees(module: str) -> None:
    """``torch.distributed`` answers as one replica while a run is on."""
    seen = {line: name for line, name, local in imports_of(tree_of(module)) if name == "torch.distributed"}
    assert seen == {}


@cache
def own_private_names() -> set[str]:
    """Private attributes, methods and functions that the package itself defines."""
    names = set(PUBLIC_UNDERSCORED)
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node)[:1] == ["self"]:
                names.add(node.attr)
    return names


@pytest.mark.parametrize("module", [module for module in MODULES if module not in KNOW_PRIVATE_NAMES])
def test_private_attributes_of_objects_are_the_packages_own(module: str) -> None:
    """``tensor._version`` or ``trainer._data_connector`` is a private name too, though no import shows it."""
    own = own_private_names()
    imported = {local for _, _, local in imports_of(tree_of(module))}  # the test above looks after these; sys._getframe is fine
    offending = [
        f"{module}.py:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own
        if dotted(node)[:1] not in [[name] for name in imported]
    ]
    assert offending == []


def undocumented(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    """Public functions, classes and methods without a docstring; an ``@override`` has that of the method it overrides."""
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        inherited = "override" in decorators or any(decorator.endswith(".setter") for decorator in decorators)
        if not inherited and ast.get_docstring(node) is None and not _takes_a_docstring(node):
            yield f"{prefix}{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node.body, f"{prefix}{node.name}.")


def _takes_a_docstring(node: ast.AST) -> bool:
    """Whether a class has that of another one."""
    first = node.body[0] if isinstance(node, ast.ClassDef) else None
    return isinstance(first, ast.Assign) and ast.unparse(first.targets[0]) == "__doc__"


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_has_a_docstring(module: str) -> None:
    tree = tree_of(module)
    missing = [] if ast.get_docstring(tree) else [f"{module}.py itself"]
    assert [*missing, *undocumented(tree.body, f"{module}.")] == []


def test_missing_docstrings_are_found() -> None:
    source = (
        "def f(): pass\nclass C:\n    'doc'\n    def m(self): pass\n    @override\n    def n(self): pass\n"
        "    def _p(self): pass\nclass _D:\n    def m(self): pass\ndef g():\n    'doc'\n    def local(): pass\n"
    )
    assert list(undocumented(ast.parse(source).body, "")) == ["f", "C.m"]


@pytest.mark.parametrize("module", MODULES)
def test_no_file_is_too_long_to_read_at_once(module: str) -> None:
    assert len((FOLDER / f"{module}.py").read_text(encoding="utf-8").splitlines()) <= MAX_LINES
