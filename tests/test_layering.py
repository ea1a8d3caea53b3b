"""The rules of the package's source, read from its syntax: who imports whom, who knows private names, what is documented."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lightning_fxpipe

PACKAGE = "lightning_fxpipe"
FOLDER = Path(lightning_fxpipe.__file__).parent
DESIGN = Path(__file__).parents[1] / "docs" / "design.md"
MAX_LINES = 500

# A room imports only from those before it: data flows in this order. The first and the last line are modules of no room.
ROOMS = (
    *("errors", "rng"),
    *("_compat", "pytree", "user_code", "reporting", "distributed", "microbatch", "metrics"),
    *("simulation", "recording", "tracing", "planner", "independence", "deferred_init", "stages", "schedules", "data"),
    *("optim", "hooks", "runtime", "checkpoint", "launch", "pictures", "strategy"),
    *("__init__", "pl", "cli", "__main__"),
)
# The command line must plan without a strategy; importing from the package itself would bring it in by the back door.
NEVER_IMPORTED = {"cli": {"strategy", "__init__"}, "__main__": {"strategy", "__init__"}}
# What knows Lightning, besides the room `strategy`; the rest would run with any Trainer.
KNOW_LIGHTNING = {
    *(
        "_compat.torch",
        "_compat.lightning",
        "_compat.loops",
        "reporting.messages",
        "hooks.hook_code",
        "hooks.hook_readers",
        "hooks.user_hooks",
        "optim.precision",
    ),
    *("checkpoint.stage_state", "launch.launching", "pl", "__init__", "cli.configs"),
}
# Rooms from which users import; the others do so from the package itself.
EXPORT_NAMES = {"simulation", "pictures"}
WITHOUT_TORCH = {
    "errors",
    "reporting",
    "reporting.names",
    "reporting.table",
    "planner",
    "planner.alternatives",
    "planner.plan",
    "simulation.actions",
    "simulation.costs",
    "simulation.simulator",
}
ANY_EXCEPTION = ("Exception", "BaseException")
KNOW_PRIVATE_NAMES = {
    *("_compat.torch", "_compat.fake_calls", "_compat.fake_sizes", "_compat.checkpoints", "_compat.autograd", "_compat.modes"),
    "_compat.operators",
    *(
        "_compat.lightning",
        "_compat.loops",
        "_compat.loggers",
        "_compat.step_hooks",
        "_compat.device_mesh",
    ),
}
LIGHTNING = {"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"}
# Underscored by convention, yet public: a namedtuple's.
PUBLIC_UNDERSCORED = {"_fields", "_replace", "_asdict"}


def _module_of(path: Path) -> str:
    parts = path.relative_to(FOLDER).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


# By path: `tracing.trace`, `errors`; a room itself is its `__init__`.
FILES = {_module_of(path): path for path in FOLDER.rglob("*.py")}
MODULES = sorted(FILES)


def room_of(module: str) -> str:
    """The room of a module; of one in no room, itself."""
    return module.partition(".")[0]


@cache
def tree_of(module: str) -> ast.Module:
    """The syntax tree of a module of the package."""
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, dotted name of what is imported, local name), imports inside functions and under TYPE_CHECKING included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}", alias.asname or alias.name


def package_modules_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module of this package) for each import from the package; ``__init__`` for what is imported from its top."""
    for line, name, _ in imports_of(tree):
        top, *rest = name.split(".")
        if top == PACKAGE:
            known = (".".join(rest[:count]) for count in range(len(rest), 0, -1))
            yield line, next((module for module in known if module in FILES), "__init__")


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


def test_every_room_has_its_place_in_the_order() -> None:
    assert {room_of(module) for module in MODULES} == set(ROOMS)


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_only_from_those_above_it(module: str) -> None:
    room = room_of(module)
    allowed = {*ROOMS[: ROOMS.index(room) + 1]} - NEVER_IMPORTED.get(room, set())
    offending = [f"line {line}: {name}" for line, name in package_modules_of(tree_of(module)) if room_of(name) not in allowed]
    assert offending == []


@pytest.mark.parametrize("room", sorted({room_of(module) for module in MODULES if "." in module}))
def test_modules_of_a_room_import_each_other_in_one_direction(room: str) -> None:
    """Imports inside functions, too, of which Python would not complain."""
    members = [module for module in MODULES if room_of(module) == room]
    inside = {module: {name for _, name in package_modules_of(tree_of(module))} & {*members} for module in members}
    while free := [module for module, needed in inside.items() if not needed & inside.keys()]:
        for module in free:
            del inside[module]
    assert inside == {}


def test_imports_are_absolute() -> None:
    """One way to write them: these tests, and who searches for a module, need to know no other."""
    relative = [f"{m}: {name}" for m in MODULES for _, name, _ in imports_of(tree_of(m)) if name.startswith(".")]
    assert relative == []


def test_imports_are_found_in_every_form() -> None:
    """The tests here would pass on a package whose imports they cannot see."""
    source = (
        "import lightning_fxpipe.planner.plan as p\nfrom lightning_fxpipe import strategy, PartitionPlan\n"
        "from lightning_fxpipe.runtime import batch_run\ndef f():\n    from lightning_fxpipe.errors import FxPipeError\n"
        "from . import step\n"
    )
    assert list(package_modules_of(ast.parse(source))) == [
        (1, "planner.plan"),
        (2, "strategy"),
        (2, "__init__"),
        (3, "runtime.batch_run"),
        (5, "errors"),
    ]
    assert "..step" in [name for _, name, _ in imports_of(ast.parse(source))]


@pytest.mark.parametrize("room", [room for room in ROOMS if (FOLDER / room).is_dir()])
def test_the_map_of_a_room_has_every_module_in_it(room: str) -> None:
    described = set(re.findall(r"``(\w+)``", ast.get_docstring(tree_of(room)) or ""))
    assert {module.partition(".")[2] for module in MODULES if module.startswith(f"{room}.")} - described == set()
    if room not in EXPORT_NAMES:
        assert tree_of(room).body[1:] == []  # whoever imports a module does not wait for its neighbours


def test_the_rooms_are_those_that_the_design_describes() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", DESIGN.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert rows == [room for room in ROOMS if (FOLDER / room).is_dir()]


def test_names_in_the_design_are_those_of_modules() -> None:
    rooms = "|".join(ROOMS)
    named = set(re.findall(rf"`((?:{rooms})\.\w+)`", DESIGN.read_text(encoding="utf-8")))
    assert len(named) > 50
    assert named - FILES.keys() == set()


@pytest.mark.parametrize("module", [m for m in MODULES if m not in KNOW_LIGHTNING and room_of(m) != "strategy"])
def test_lightning_is_known_to_few_modules(module: str) -> None:
    offending = [(line, name) for line, name, _ in imports_of(tree_of(module)) if name.split(".")[0] in LIGHTNING]
    assert offending == []


@pytest.mark.parametrize("module", sorted(WITHOUT_TORCH))
def test_plans_and_errors_need_neither_torch_nor_lightning(module: str) -> None:
    heavy = {"torch", "torchmetrics", *LIGHTNING}
    assert [(line, name) for line, name, _ in imports_of(tree_of(module)) if name.split(".")[0] in heavy] == []
    # Through another module of the package they would come all the same.
    assert {name for _, name in package_modules_of(tree_of(module))} <= WITHOUT_TORCH


def silent_handlers(tree: ast.Module) -> list[int]:
    """Lines where any exception is caught, and neither raised, looked at nor put on record."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "suppress":
            found += [node.lineno for argument in node.args if ast.unparse(argument) in ANY_EXCEPTION]
        if not isinstance(node, ast.ExceptHandler) or not _catches_all(node):
            continue
        inside = [child for statement in node.body for child in ast.walk(statement)]
        named = {child.id for child in inside if isinstance(child, ast.Name)}
        records = any(isinstance(child, ast.Attribute) and child.attr == "debug" for child in inside)
        if not (records or node.name in named or any(isinstance(child, ast.Raise) for child in inside)):
            found.append(node.lineno)
    return sorted(found)


def _catches_all(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or any(ast.unparse(node) in ANY_EXCEPTION for node in ast.walk(handler.type))


@pytest.mark.parametrize("module", MODULES)
def test_no_exception_is_swallowed_without_a_record(module: str) -> None:
    assert silent_handlers(tree_of(module)) == []


def test_silent_handlers_are_found_in_every_form() -> None:
    source = (
        "try:\n f()\nexcept Exception:\n pass\n"
        "try:\n f()\nexcept (ValueError, BaseException) as error:\n g()\n"
        "try:\n f()\nexcept:\n g()\n"
        "with suppress(KeyError, Exception):\n f()\n"
        "try:\n f()\nexcept ValueError:\n pass\n"
        "try:\n f()\nexcept Exception as error:\n g(error)\n"
        "try:\n f()\nexcept BaseException:\n g()\n raise\n"
        "try:\n f()\nexcept Exception:\n logger.debug('')\n"
    )
    assert silent_handlers(ast.parse(source)) == [3, 7, 11, 13]


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


@pytest.mark.parametrize("module", [module for module in MODULES if module != "distributed.replica"])
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
        f"line {node.lineno}: {ast.unparse(node)}"
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
    """Returns True if a class has that of another one."""
    first = node.body[0] if isinstance(node, ast.ClassDef) else None
    return isinstance(first, ast.Assign) and ast.unparse(first.targets[0]) == "__doc__"


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_has_a_docstring(module: str) -> None:
    tree = tree_of(module)
    missing = [] if ast.get_docstring(tree) else ["the module itself"]
    assert [*missing, *undocumented(tree.body, f"{module}.")] == []


# A first line begins with a verb or a noun; these begin a clause that stands for one.
_CLAUSE = re.compile(r"(What|Whether|Where|Those|The same|As|Of)\b")


def clauses(tree: ast.Module) -> list[str]:
    """Returns the first words of docstrings that begin with a clause."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds))
    return [text[:40] for text in found if _CLAUSE.match(text)]


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_begin_with_a_verb_or_a_noun(module: str) -> None:
    assert clauses(tree_of(module)) == []


def test_clauses_are_found_in_every_docstring() -> None:
    source = (
        "'What it is.'\nclass C:\n    'Those of it.'\n    def f(self):\n        'Whether.'\ndef g():\n    'Whatever it is.'\n"
    )
    assert clauses(ast.parse(source)) == ["What it is.", "Those of it.", "Whether."]


def test_missing_docstrings_are_found() -> None:
    source = (
        "def f(): pass\nclass C:\n    'doc'\n    def m(self): pass\n    @override\n    def n(self): pass\n"
        "    def _p(self): pass\nclass _D:\n    def m(self): pass\ndef g():\n    'doc'\n    def local(): pass\n"
    )
    assert list(undocumented(ast.parse(source).body, "")) == ["f", "C.m"]


@pytest.mark.parametrize("module", MODULES)
def test_no_file_is_too_long_to_read_at_once(module: str) -> None:
    assert len(FILES[module].read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_the_tests_for_other_versions_are_there() -> None:
    """A file that was moved would end their whole run."""
    tests = Path(__file__).parent
    listed = [line.partition("::")[0] for line in (tests / "core.txt").read_text(encoding="utf-8").split()]
    assert len(listed) > 10
    assert [name for name in listed if not (tests.parent / name).exists()] == []
