"""The bounds of the source tree, read from its folders: who imports whom, how long things are, what touches torch.

    errors, machine, options, progress, schedules, version < program < placement < capture < passes | runtime < codegen
    < planner < status < model < hf < cli

Left never imports right; `passes` and `runtime` never import each other."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import get_args

import bounds
import pytest
from bounds import ROOT, beside, code_lines, hold, library, parsed, walked

import gs_compile
from gs_compile.schedules import Schedule

LAYERS = (
    ("errors", "machine", "options", "progress", "schedules", "version"),
    ("program",),
    ("placement",),
    ("capture",),
    ("passes", "runtime"),
    ("codegen",),
    ("planner",),
    ("status",),
    ("model",),
    ("hf",),
    ("cli",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MAY_ASK_THE_DEVICE = ("gs_compile.capture.", "gs_compile.runtime.stream")
MAY_NAME_SCHEDULES = ("gs_compile.passes.baselines.", "gs_compile.schedules")
COMPARED = [name for name in get_args(Schedule) if name != "vertical"]
NAMED = re.compile(rf'(?:^|["\'])({"|".join(COMPARED)})(?:$|["\'])|\b({"|".join(COMPARED)}) (?:schedule|order)')
PRIVATE = {"_cdata", "_typed_storage", "_version", "_weak_ref", "__closure__", "cell_contents"}
MUTABLE = {  # module-level state that changes, each with its reason in ARCHITECTURE.md
    "gs_compile.codegen.compiled.compilations_of",
    "gs_compile.codegen.codes._codes",
    "gs_compile.runtime.kernels._memory",
    "gs_compile.runtime.forks._parent",
    "gs_compile.runtime.threads._default",
}


def imports(module: str, source: str) -> Iterator[str]:
    """The modules that a file imports anywhere in it, by absolute name; a `from` that names a module gives this."""
    for node in walked(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{name}.{alias.name}" if f"{name}.{alias.name}" in library() else name


def wrong_imports(module: str, source: str) -> list[str]:
    """What a module imports although it stands to the right of it, is the other wing, or has another name."""
    found = []
    mine = LEVEL.get(module.split(".")[1], len(LAYERS)) if "." in module else len(LAYERS)
    for name in imports(module, source):
        top, _, rest = name.partition(".")
        folder = rest.split(".")[0]
        if top in ("passes", "runtime") or (top == "cvxpy" and not module.startswith("gs_compile.planner.lp.")):
            found.append(name)
        elif top == "gs_compile" and mine < len(LAYERS):
            theirs = LEVEL.get(folder, len(LAYERS) - 1)  # a public name of the package itself is for the last layer
            if theirs > mine or (theirs == mine and len(LAYERS[mine]) == 2 and folder != module.split(".")[1]):
                found.append(name)
    return found


def functions(source: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of a file with its qualified name."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            name = f"{prefix}{child.name}." if is_function or isinstance(child, ast.ClassDef) else prefix
            if is_function:
                yield name[:-1], child
            yield from walk(child, name)

    return walk(parsed(source), "")


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len(given) - (bool(given) and given[0].arg in ("self", "cls"))


def may_take_many(module: str, name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Constructors of public classes, which take what torch's take, and commands of the command line."""
    is_command = module.startswith("gs_compile.cli.") and bool(node.decorator_list)
    return is_command or (name.endswith(".__init__") and name.split(".")[0] in gs_compile.__all__)


def long_files(sources: dict[str, str]) -> dict[str, int]:
    """The files of more than 300 lines of code."""
    sizes = {name: len(code_lines(source)) for name, source in sources.items() if source.count("\n") >= 300}
    return {name: size for name, size in sizes.items() if size > 300}


def long_functions(sources: dict[str, str]) -> dict[str, int]:
    """The functions of more than 40 lines of code, from `def` on."""
    found = {}
    for module, source in sources.items():
        for name, node in functions(source):
            lines = range(node.lineno, node.end_lineno + 1)
            if len(lines) > 40 and (size := len(code_lines(source).intersection(lines))) > 40:
                found[f"{module}.{name}"] = size
    return found


def with_many_parameters(sources: dict[str, str]) -> dict[str, int]:
    """The functions of more than 7 parameters, but for those that may take many."""
    return {
        f"{module}.{name}": num_parameters(node)
        for module, source in sources.items()
        for name, node in functions(source)
        if num_parameters(node) > 7 and not may_take_many(module, name, node)
    }


def touches(source: str) -> int:
    """How often a file asks for a device's type, uses `torch.cuda`, or uses what torch keeps private."""
    found = 0
    for node in walked(source):
        if isinstance(node, ast.Attribute):
            found += node.attr == "is_cuda" or node.attr in PRIVATE
            if node.attr in ("cuda", "type") or node.attr.startswith("_"):
                owner = ast.unparse(node.value)
                found += owner == "torch" and node.attr == "cuda"
                found += node.attr == "type" and owner.endswith("device")
                found += owner.split(".")[0] == "torch" and node.attr.startswith("_") and not node.attr.startswith("__")
        elif isinstance(node, ast.Compare) and "'meta'" in map(ast.unparse, node.comparators):
            found += not ast.unparse(node.left).endswith(".type")  # which is counted already
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += "cuda" in names or any(name.startswith("_") for name in names)
    return found


def names_cuda(source: str) -> bool:
    """Whether a file uses `torch.cuda`; the runtime serves any accelerator."""
    for node in walked(source):
        if isinstance(node, ast.Attribute) and node.attr == "cuda" and ast.unparse(node) == "torch.cuda":
            return True
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = [*(getattr(node, "module", None) or "").split("."), *(alias.name for alias in node.names)]
            if "cuda" in names or "torch.cuda" in names:
                return True
    return False


def schedules_named(source: str) -> list[str]:
    """The schedules to compare with that code names: as identifiers, in imports, or in strings; docstrings may."""
    docs = {id(node.value) for node in walked(source) if isinstance(node, ast.Expr)}
    found: list[str] = []
    for node in walked(source):
        words = [getattr(node, field, None) for field in ("id", "attr", "arg", "name")]
        words += (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []
        found += [word for word in words if word in COMPARED]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found += [first or second for first, second in NAMED.findall(node.value)]
    return found


def mutable(source: str) -> Iterator[str]:
    """Names of a module that are neither constants, functions nor types but hold an object that may change."""
    for node in parsed(source).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for name in (target.id for target in targets if isinstance(target, ast.Name)):
            is_object = isinstance(node.value, ast.Call | ast.List | ast.Dict | ast.Set | ast.DictComp)
            is_constant = (
                name.isupper() or name.startswith("__") or name.strip("_")[:1].isupper() or name in ("app", "log")
            )
            of_weak_keys = isinstance(node.value, ast.Call) and "Weak" in ast.unparse(node.value.func)
            if is_object and (of_weak_keys or not is_constant):
                yield name
    yield from (name for node in walked(source) if isinstance(node, ast.Global) for name in node.names)


def test_imports_go_left():
    found = {module: wrong_imports(module, source) for module, source in library().items()}
    hold("imports", {module: len(wrong) for module, wrong in found.items() if wrong})


def test_no_circles():
    edges = {
        module: {name for name in imports(module, source) if name in library()} for module, source in library().items()
    }
    circles = {}
    while True:
        try:
            TopologicalSorter(edges).prepare()
        except CycleError as error:
            circle = error.args[1]
            circles[" > ".join(sorted(circle[1:]))] = 1
            edges[circle[1]].discard(circle[0])
        else:
            break
    hold("circles", circles)


def test_files_are_short():
    sources = library() | beside("tests") | beside("examples") | beside("benchmarks")
    hold("lines of code of a file", long_files(sources))


def test_no_two_test_files_have_one_name():
    """Each is a module of its bare name: of two, one imports the other's."""
    count = Counter(path.rpartition("/")[2] for path in beside("tests"))
    assert [name for name, number in count.items() if number > 1 and name != "conftest.py"] == []


def test_functions_are_short_and_take_few_parameters():
    hold("lines of code of a function", long_functions(library()))
    hold("parameters of a function", with_many_parameters(library()))


def test_one_place_knows_the_device_and_torch_inside():
    found = {
        module: touches(source) for module, source in library().items() if not module.startswith(MAY_ASK_THE_DEVICE)
    }
    hold("device types and private interfaces", {module: number for module, number in found.items() if number})


def test_one_file_names_cuda():
    found = {module for module, source in library().items() if names_cuda(source)}
    assert found - {"gs_compile.cli.doctor"} == {"gs_compile.runtime.stream"}


def test_schedules_to_compare_with_are_named_in_their_own_folder():
    others = {name: source for name, source in library().items() if not name.startswith(MAY_NAME_SCHEDULES)}
    named = {module: schedules_named(source) for module, source in others.items()}
    assert {module: names for module, names in named.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("if schedule == 'single': pass", ["single"]),
        ("from gs_compile.passes.baselines.lifetime import Room", ["lifetime"]),
        ("from gs_compile.passes.baselines import lifetime", ["lifetime"]),
        ("lifetime.decide(program)", ["lifetime"]),
        ("plan(horizontal=True)", ["horizontal"]),
        ("f'in the horizontal order of {n}'", ["horizontal"]),
        ("x = 'choose expert.schedule=\"lifetime\"'", ["lifetime"]),
        ('def f():\n    """The horizontal order."""', []),
        ("x = 'a single file'\nlifetimes = SCHEDULES[name].variants", []),
    ],
)
def test_schedules_that_are_named_are_found(source, names):
    assert schedules_named(source) == names


def test_module_level_state_is_listed():
    found = {f"{module}.{name}" for module, source in library().items() for name in mutable(source)}
    text = (ROOT / "ARCHITECTURE.md").read_text()
    hold("mutable state", dict.fromkeys(found - MUTABLE, 1))
    assert found >= MUTABLE
    assert len(MUTABLE) <= 5
    assert [name for name in MUTABLE if name.rpartition(".")[2] not in text] == []


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("passes.snake", "from gs_compile.runtime.issue import run", True),
        ("passes.snake", "from ..runtime import issue", True),
        ("runtime.issue", "import gs_compile.passes.snake", True),
        ("passes.snake", "def later():\n    from gs_compile.model.backend import run", True),
        ("passes.snake", "from passes.vertical import vertical", True),
        ("passes.snake", "import cvxpy", True),
        ("program.ir", "from gs_compile.placement.verify import verify", True),
        ("model.call", "import gs_compile", True),
        ("passes.snake", "from .vertical import vertical\nfrom gs_compile.program.ir import Program", False),
        ("planner.lp.solve", "import cvxpy\nfrom gs_compile.passes.lower import lower", False),
        ("cli.main", "import gs_compile\nfrom gs_compile.model.backend import run", False),
    ],
)
def test_wrong_imports_are_found(module, source, wrong):
    assert bool(wrong_imports(f"gs_compile.{module}", source)) == wrong


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("x.is_cuda", 1),
        ("torch.cuda.Stream()", 1),
        ("device.type == 'cuda'", 1),
        ("device.type == 'meta'", 1),
        ("device == 'meta'", 1),
        ("torch._C.f(storage._cdata)", 2),
        ("from torch._dynamo import reset", 1),
        ("from torch import cuda", 1),
        ("torch.__version__", 0),
    ],
)
def test_touches_are_counted(source, number):
    assert touches(source) == number


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("x = 1\n\n# why\ny = 2  # how\n", 2),
        ('"""A module.\n\nIts reasons."""\nimport os\nfrom os import (\n    path,\n)\n', 0),
        ('def f(\n    x,\n):\n    """Say x."""\n    import os\n\n    return x\n', 4),
        ('class A:\n    """A."""\n\n    b: int\n    """What b is."""\n', 2),
        ('text = """\none\n\ntwo\n"""\n', 5),
        ("f(\n    1,\n\n    # why\n    2,\n)\n", 4),
    ],
    ids=["comments", "head", "function", "class", "string", "call"],
)
def test_lines_of_code_are_counted(source, number):
    assert len(code_lines(source)) == number


def test_long_files_and_functions_are_found():
    assert long_files({"m": "x = 1\n# why\n" * 300, "n": "x = 1\n" * 301}) == {"n": 301}
    body = "        x = 1\n\n" * 39
    short = f"class A:\n    def f(self):\n{body}"
    assert long_functions({"m": short}) == {}
    assert long_functions({"m": f"{short}        return x\n"}) == {"m.A.f": 41}


def test_many_parameters_are_found():
    seven, eight = (f"def f({', '.join('abcdefgh'[:number])}): pass\n" for number in (7, 8))
    command = f"@app.command()\n{eight}"
    found = with_many_parameters({"gs_compile.m": seven, "gs_compile.n": eight, "gs_compile.cli.m": command})
    assert found == {"gs_compile.n.f": 8}
    method = "class {}:\n    def __init__(self, a, b, c, d, e, f, g, h): pass\n"
    assert with_many_parameters({"m": method.format("SGD") + method.format("Other")}) == {"m.Other.__init__": 8}


def test_a_figure_may_not_rise_and_an_entry_that_is_met_is_refused(monkeypatch):
    monkeypatch.setattr(bounds, "KNOWN", {"lines": {"m": 50}})
    hold("lines", {"m": 50})
    for offenders in ({"m": 51}, {"m": 50, "n": 41}, {}):
        with pytest.raises(AssertionError):
            hold("lines", offenders)
