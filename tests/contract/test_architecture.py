"""Who may import whom (docs/design.md, section 3), and what every module owes its reader."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
every_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))

_BASE = {"types", "errors"}
_ANYTHING = None
# What each part may import from paceline, besides itself. A new part needs a line here.
MAY_IMPORT: dict[str, set[str] | None] = {
    "types": set(),
    "errors": set(),
    "record": _BASE,
    "measure": _BASE,
    "policy": _BASE,
    "collective": _BASE,
    "predict": _BASE,
    "decide": _BASE | {"policy", "collective", "predict"},
    "sim": _BASE | {"policy", "collective", "predict", "decide"},
    # At the end of a run the shell writes its report.
    "act": _BASE | {"policy", "collective", "predict", "decide", "measure", "record", "report"},
    "report": _BASE | {"record"},
    "__init__": _BASE | {"act", "measure"},
    "cli": _ANYTHING,
    "demo": _ANYTHING,
    "evaluate": _ANYTHING,
    "local": _ANYTHING,
    "__main__": _ANYTHING,
}
PURE = {"policy", "collective", "predict", "decide", "sim"}
IMPURE_MODULES = {"time", "os", "random", "socket", "threading", "asyncio", "subprocess", "logging"}
USES_DISTRIBUTED = {"act", "measure", "cli", "demo", "local"}


def part_of(path: Path) -> str:
    """The first component below the package: `act`, `types`, ..."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(tree: ast.Module) -> Iterator[str]:
    """Every module that is imported anywhere in the file; `from a import b` counts as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def forbidden_parts(part: str, tree: ast.Module) -> set[str]:
    """The parts of paceline that this file of `part` imports and must not."""
    targets = {name.split(".")[1] for name in imported(tree) if name.startswith("paceline.")}
    targets |= {"__init__" for name in imported(tree) if name == "paceline"}
    allowed = MAY_IMPORT[part]
    return set() if allowed is None else targets - allowed - {part}


def is_distributed(node: ast.AST) -> bool:
    """Whether the node reaches `torch.distributed` by attribute."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "distributed"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    )


def touches_distributed(tree: ast.Module) -> bool:
    """Whether the file imports torch.distributed or reaches it by attribute."""
    by_import = any(f"{name}.".startswith("torch.distributed.") for name in imported(tree))
    return by_import or any(is_distributed(node) for node in ast.walk(tree))


def test_there_is_something_to_check():
    assert {"types", "errors", "record", "measure", "policy", "predict", "decide", "act"} <= {
        part_of(path) for path in MODULES
    }


@every_module
def test_imports_only_what_its_part_may(path):
    part = part_of(path)
    assert part in MAY_IMPORT, f"{part} is new: say in MAY_IMPORT what it may import"
    assert forbidden_parts(part, tree_of(path)) == set()


@every_module
def test_imports_are_absolute(path):
    assert [name for name in imported(tree_of(path)) if name.startswith(".")] == []


@every_module
def test_pure_parts_reach_no_clock_no_system_no_randomness(path):
    if part_of(path) in PURE:
        assert {name.split(".")[0] for name in imported(tree_of(path))} & IMPURE_MODULES == set()


@every_module
def test_only_shells_touch_torch_distributed(path):
    if part_of(path) not in USES_DISTRIBUTED:
        assert not touches_distributed(tree_of(path))


@pytest.mark.parametrize(
    ("part", "source", "wrong"),
    [
        ("policy", "from paceline.decide.ledger import Lease", {"decide"}),
        ("policy", "import paceline.act.comm", {"act"}),
        ("predict", "def f():\n    from paceline import measure", {"measure"}),
        ("decide", "from paceline.predict.detector import Row\nfrom paceline.types import Rank", set()),
        ("act", "import paceline", {"__init__"}),
        ("report", "from paceline.record import read", set()),
        ("types", "from paceline.errors import ConfigError", {"errors"}),
        ("cli", "from paceline.act.attach import attach", set()),
    ],
)
def test_a_forbidden_import_is_seen(part, source, wrong):
    assert forbidden_parts(part, ast.parse(source)) == wrong


@pytest.mark.parametrize(
    ("source", "touches"),
    [
        ("import torch.distributed as dist", True),
        ("from torch import distributed", True),
        ("from torch.distributed.nn import all_reduce", True),
        ("import torch\ntorch.distributed.barrier()", True),
        ("import torch\ntorch.distributions.Normal(0, 1)", False),
        ("from torch import distributions", False),
    ],
)
def test_torch_distributed_is_seen(source, touches):
    assert touches_distributed(ast.parse(source)) == touches


def test_the_package_exports_what_it_says_sorted():
    public = {
        name for name, value in vars(paceline).items() if name[0] != "_" and not isinstance(value, types.ModuleType)
    }
    assert set(paceline.__all__) == public
    assert paceline.__all__ == sorted(paceline.__all__)


def test_the_package_takes_its_public_names_from_the_shell_and_nothing_else():
    taken = {name for name in imported(tree_of(ROOT / "__init__.py")) if ".errors." not in name}
    assert taken == {
        "paceline.act.attach.Pace",
        "paceline.act.attach.attach",
        "paceline.act.parameter_server.parameter_server",
        "paceline.measure.taps.expected_slow",
    }


@every_module
def test_first_line_says_what_the_module_is_for(path):
    doc = ast.get_docstring(tree_of(path))
    assert doc
    assert doc.splitlines()[0].strip().endswith((".", ":"))


def undocumented(tree: ast.Module) -> list[str]:
    """Public functions, classes and methods of a module that lack a docstring."""
    missing = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                missing.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(tree.body, "")
    return missing


@every_module
def test_what_is_public_in_pure_parts_is_documented(path):
    if part_of(path) in PURE | {"types", "errors", "record"}:
        assert undocumented(tree_of(path)) == []


def test_a_missing_docstring_is_seen():
    source = 'class A:\n    """Doc."""\n    def f(self): ...\n    def _g(self): ...\ndef h():\n    def inner(): ...\n'
    assert undocumented(ast.parse(source)) == ["A.f", "h"]
