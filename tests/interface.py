"""The public interface as text: names with their signatures, options, commands with their flags, formats of files.

`python tests/interface.py` prints it. docs/interface.md has it, and `test_interface.py` holds the two together.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import gs_compile
from gs_compile import errors
from gs_compile.cli.main import EXIT_CODES, INTERRUPTED, TERMINATED, app
from gs_compile.planner.measure import profile
from gs_compile.planner.request import Request
from gs_compile.program import ir
from gs_compile.runtime.storage import manifest
from gs_compile.runtime.trace import Total
from gs_compile.status import form
from gs_compile.status.step import StepInfo

ROOT = Path(__file__).parents[1]
PARTS = (gs_compile.Options, gs_compile.Expert, gs_compile.Ratios)  # whose fields have a part of their own
PAGE = ROOT / "docs" / "interface.md"
# Methods and attributes are public where a page names them.
PAGES = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) if page != PAGE)
NAMED = {*re.findall(r"\.([a-z]\w*)\b", PAGES), *re.findall(r"`([a-z]\w*)\(", PAGES)}


def text() -> str:
    """All of it; a line for each thing that somebody's code, script or file may rest on."""
    parts = {
        "Names of gs_compile": _names(gs_compile),
        "Names of gs_compile.hf": _names(gs_compile.hf),
        "Options of the backend": _fields(gs_compile.Options),
        'Options under "expert"': _fields(gs_compile.Expert),
        "Ratios": _fields(gs_compile.Ratios),
        "Fields of a plan's request": _fields(Request),
        "Numbers of gs_compile.metrics, the last three of each lane": iter(_metrics()),
        "Errors and warnings": _errors(),
        "Commands": _commands(typer.main.get_command(app), "greedysnake"),
        "Exit codes, by the first that fits": _exit_codes(),
        "Formats of files": iter(
            (
                f"machine profile {profile.FORMAT}",
                f"commit of a durable run {manifest.FORMAT}",
                f"status of a run {form.FORMAT}",
                f"text of a program {ir.VERSION}",
            )
        ),
    }
    return "\n".join(f"{title}\n" + "".join(f"    {line}\n" for line in lines) for title, lines in parts.items())


def _names(module: Any) -> Iterator[str]:
    listed: dict[tuple[str, ...], str] = {}  # the members of a class, and the first class that has them
    for name in sorted(each for each in module.__all__ if not each.startswith("_")):
        found = getattr(module, name)
        if found in PARTS or not callable(found) or name.endswith("Error"):
            yield name
            continue
        yield name + ("" if dataclasses.is_dataclass(found) else _signature(found))
        members = tuple(_public(found)) if inspect.isclass(found) else ()
        if members and (first := listed.setdefault(members, name)) != name:
            yield f"    as {first}"
        else:
            yield from (f"    .{member}" for member in members)


def _public(kind: type) -> Iterator[str]:
    """The members of a class that a page names, with their signatures."""
    for member, value in sorted(_members(kind).items()):
        if member in NAMED and not member.startswith("_"):
            yield member + (_signature(value) if inspect.isfunction(value) else "")


def _members(kind: type) -> dict[str, Any]:
    """Methods, properties, fields and what is assigned to `self`, of a class and those of ours that it is made of."""
    found: dict[str, Any] = {}
    for each in reversed([each for each in inspect.getmro(kind) if each.__module__.startswith("gs_compile.")]):
        code = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(each))))
        stored = [node for node in code if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
        found |= {node.attr: None for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}
        found |= dict.fromkeys(each.__annotations__) | vars(each)
    return found


def _signature(found: Any) -> str:
    """Names of parameters, what they are where they are left out, and where they have to be named."""
    words, is_named = [], False
    for each in inspect.signature(found).parameters.values():
        if each.name == "self":
            continue
        if each.kind == each.KEYWORD_ONLY and not is_named:
            words, is_named = [*words, "*"], True
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        is_named = is_named or each.kind == each.VAR_POSITIONAL
        words.append(stars + each.name + ("" if each.default is each.empty else _default(each.default)))
    return f"({', '.join(words)})"


def _default(value: Any) -> str:
    """A question mark where it is no plain value."""
    is_plain = isinstance(value, int | float | str | None) or (isinstance(value, tuple) and len(value) < 4)
    return f"={value!r}" if is_plain else "?"


def _fields(kind: Any) -> Iterator[str]:
    for each in filter(lambda each: each.init, dataclasses.fields(kind)):
        given = "" if each.default is dataclasses.MISSING else _default(each.default)
        given = " = ?" if each.default_factory is not dataclasses.MISSING else given.replace("=", " = ", 1)
        yield f"{each.name}: {each.type}{given}"


def _metrics() -> list[str]:
    info = StepInfo(**{each.name: 1 for each in dataclasses.fields(StepInfo)} | {"lanes": {"LANE": Total(1.0, 1)}})
    return [*info.metrics()]


def _exit_codes() -> Iterator[str]:
    for kinds, code in EXIT_CODES:
        names = (each.__name__ for each in (kinds if isinstance(kinds, tuple) else (kinds,)))
        yield f"{code}: {', '.join(names)}"
    yield f"{INTERRUPTED}: interrupted"
    yield f"{TERMINATED}: terminated"


def _errors() -> Iterator[str]:
    for name, kind in sorted(vars(errors).items()):
        if inspect.isclass(kind) and issubclass(kind, Exception) and not name.startswith("_"):
            yield f"{name}({', '.join(base.__name__ for base in kind.__bases__ if not base.__name__.startswith('_'))})"


def _commands(command: Any, name: str) -> Iterator[str]:
    yield " ".join([name, *sorted(max(each.opts, key=len) for each in command.params)])
    for each, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{name} {each}")


if __name__ == "__main__":
    print(text())  # noqa: T201  (that is what it is for)
