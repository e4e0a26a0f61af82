"""Who may import whom, read from the source (the table is in ARCHITECTURE.md).

    program, config, errors, machine  <  the rest of the ground  <  passes/*, runtime/*  <  the roof

The wings never import each other, and nothing below the roof imports it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400

# A new file in gs_compile/ takes its place in one of these three.
FOUNDATION = {"program", "config", "errors", "machine"}
GROUND = {
    "forms",
    "fx",
    "gradients",
    "graph",
    "initialise",
    "mapped",
    "materialized",
    "placeholders",
    "placement",
    "profile",
    "reference",
    "signatures",
    "speculation",
    "text",
    "traffic",
    "verify",
    "workload",
}
ROOF = {
    "__init__",
    "__main__",
    "backend",
    "blueprint",
    "bridge",
    "capture",
    "check",
    "checks_machine",
    "checks_software",
    "checks_storage",
    "cli",
    "command_inspect",
    "command_plan",
    "command_probe",
    "command_simulate",
    "doctor",
    "draw",
    "engine",
    "explain",
    "flops",
    "inspection",
    "keeper",
    "lifetimes",
    "members",
    "named",
    "optim",
    "compilation",
    "choice",
    "planner",
    "prediction",
    "reasons",
    "settle",
    "step_plan",
    "planning",
    "profiles",
    "tables",
    "report",
    "timeline",
    "timing",
    "workloads",
}

# What each part may import of this package.
MAY_IMPORT = {
    "foundation": {"foundation"},
    "ground": {"foundation", "ground"},
    "passes": {"foundation", "ground", "passes"},
    "runtime": {"foundation", "ground", "runtime"},
    "roof": {"foundation", "ground", "passes", "runtime", "roof"},
}


class Import(NamedTuple):
    line: int
    module: str  # absolute, as "gs_compile.passes.snake"
    relative: bool
    deferred: bool  # inside a function: it runs when called, so it makes no cycle


def part_of(module: str) -> str:
    """The part of the house an absolute module name of this package belongs to; KeyError if nobody has said."""
    _, *rest = module.split(".")
    first = rest[0] if rest else "__init__"
    if first in ("passes", "runtime"):
        return first
    for part, names in (("foundation", FOUNDATION), ("ground", GROUND), ("roof", ROOF)):
        if first in names:
            return part
    raise KeyError(module)


def module_of(path: Path) -> str:
    """The import name of a source file, given relative to the root."""
    parts = path.with_suffix("").parts
    package = () if parts[0] == "gs_compile" else ("gs_compile",)
    return ".".join((*package, *parts))


def imports(module: str, source: str) -> Iterator[Import]:
    """Every import of a file, at whatever depth, with relative names made absolute."""

    def walk(node: ast.AST, deferred: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(child.lineno, alias.name, False, deferred)
            elif isinstance(child, ast.ImportFrom):
                yield from imported_from(child, deferred)
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, deferred or is_function)

    def imported_from(node: ast.ImportFrom, deferred: bool) -> Iterator[Import]:
        base = [*module.split(".")[: -node.level]] if node.level else []
        name = ".".join([*base, *(node.module or "").split(".")]).strip(".")
        if name in ("gs_compile", "gs_compile.passes", "gs_compile.runtime"):  # `from package import its_module`
            for alias in node.names:
                yield Import(node.lineno, f"{name}.{alias.name}", node.level > 0, deferred)
        else:
            yield Import(node.lineno, name, node.level > 0, deferred)

    return walk(ast.parse(source), False)


def violations(module: str, source: str) -> list[str]:
    """What a file imports and may not, one line each."""
    mine = part_of(module)
    found = []
    for item in imports(module, source):
        where = f"{module}:{item.line}: imports {item.module}"
        top = item.module.split(".")[0]
        if top in ("passes", "runtime"):
            found.append(f"{where}: a wing's name is gs_compile.{top}")
        if top == "cvxpy" and module != "gs_compile.planner.lp.solve":
            found.append(f"{where}: only passes/place.py solves")
        if top != "gs_compile":
            continue
        try:
            theirs = part_of(item.module)
        except KeyError:
            theirs = "roof"  # a name of gs_compile/__init__.py, such as `inspect`
        allowed = MAY_IMPORT[mine] | ({"ground"} if mine == "foundation" and item.deferred else set())
        if theirs not in allowed:
            found.append(f"{where}: {mine} may not import {theirs}")
        elif mine in ("passes", "runtime") and item.relative != (theirs == mine):
            found.append(f"{where}: inside a wing, siblings are imported relatively and the ground absolutely")
    return found


def sources(*folders: str) -> list[Path]:
    """Python files of top-level folders, relative to the root; the links in gs_compile/ are not followed."""
    found = []
    for folder in folders:
        depth = "*.py" if folder == "gs_compile" else "**/*.py"
        found += [path.relative_to(ROOT) for path in sorted((ROOT / folder).glob(depth))]
    return found


def test_every_file_of_gs_compile_has_its_place():
    unplaced = []
    for path in sources("gs_compile"):
        try:
            part_of(module_of(path))
        except KeyError:
            unplaced.append(str(path))
    assert not unplaced, f"say in tests/test_architecture.py whether ground or roof: {unplaced}"


def test_a_file_has_one_place():
    assert len(FOUNDATION | GROUND | ROOF) == len(FOUNDATION) + len(GROUND) + len(ROOF)


def test_the_wings_are_flat():
    for wing in ("passes", "runtime"):
        assert not [path for path in (ROOT / wing).rglob("*.py") if path.parent != ROOT / wing]


@pytest.mark.parametrize("path", sources("gs_compile", "passes", "runtime"), ids=str)
def test_imports_go_down(path):
    module = module_of(path)
    assert not violations(module, (ROOT / path).read_text())


@pytest.mark.parametrize("path", sources("gs_compile", "passes", "runtime", "tests", "examples", "benchmarks"), ids=str)
def test_files_are_short(path):
    assert len((ROOT / path).read_text().splitlines()) < MAX_LINES


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("gs_compile.passes.snake", "from gs_compile.runtime.executor import run", "passes may not import runtime"),
        ("gs_compile.passes.snake", "from gs_compile.runtime import executor", "passes may not import runtime"),
        ("gs_compile.passes.snake", "from ..runtime import executor", "passes may not import runtime"),
        ("gs_compile.runtime.executor", "import gs_compile.passes.snake", "runtime may not import passes"),
        ("gs_compile.passes.snake", "from gs_compile.model.backend import run", "passes may not import roof"),
        ("gs_compile.passes.snake", "import gs_compile", "passes may not import roof"),
        ("gs_compile.passes.snake", "from gs_compile.passes.vertical import vertical", "siblings"),
        ("gs_compile.passes.snake", "from ..program import Program", "siblings"),
        ("gs_compile.passes.snake", "import cvxpy", "only passes/place.py"),
        ("gs_compile.passes.snake", "def solve():\n    import cvxpy.settings", "only passes/place.py"),
        ("gs_compile.passes.snake", "from passes.vertical import vertical", "a wing's name"),
        ("gs_compile.placement.verify", "from .passes import snake", "ground may not import passes"),
        (
            "gs_compile.placement.verify",
            "def check():\n    from gs_compile import capture",
            "ground may not import roof",
        ),
        ("gs_compile.program.ir", "from gs_compile.program.text import parse", "foundation may not import ground"),
        (
            "gs_compile.program.ir",
            "def dump():\n    from gs_compile.capture.dynamo import x",
            "foundation may not import roof",
        ),
    ],
)
def test_a_forbidden_import_is_found(module, source, complaint):
    (found,) = violations(module, source)
    assert complaint in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gs_compile.passes.snake", "from .vertical import vertical\nfrom gs_compile.program.ir import Program"),
        ("gs_compile.planner.lp.solve", "import cvxpy"),
        ("gs_compile.runtime.executor", "from . import lanes\nimport torch"),
        ("gs_compile.program.ir", "def dump():\n    from gs_compile.program.text import format_program"),
        ("gs_compile.placement.verify", "from gs_compile.errors import ProgramError\nfrom .text import format_program"),
        ("gs_compile.model.backend", "from gs_compile.passes.snake import snake\nfrom .runtime.executor import run"),
    ],
)
def test_an_allowed_import_passes(module, source):
    assert violations(module, source) == []
