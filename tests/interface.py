"""The public interface as text: names with their signatures, options, commands with their flags, formats of files.

`python tests/interface.py` prints it. docs/interface.md has it, and `test_interface.py` holds the two together.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import gs_compile
from gs_compile import errors
from gs_compile.cli.main import app
from gs_compile.planner.measure import profile
from gs_compile.planner.request import Request
from gs_compile.program import ir
from gs_compile.runtime.storage import manifest
from gs_compile.status import form

ROOT = Path(__file__).parents[1]
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
        "Errors and warnings": _errors(),
        "Commands": _commands(typer.main.get_command(app), "greedysnake"),
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
    for name in sorted(each for each in module.__all__ if not each.startswith("_")):
        found = getattr(module, name)
        if dataclasses.is_dataclass(found) or not callable(found) or name.endswith("Error"):  # see the other parts
            yield name
            continue
        yield name + _signature(found)
        own = (
            [each for each in inspect.getmro(found) if each.__module__.startswith("gs_compile.")]
            if inspect.isclass(found)
            else []
        )
        members = {method: value for each in reversed(own) for method, value in vars(each).items()}
        for method, value in sorted(members.items()):
            if method in NAMED:
                yield f"    .{method}" + (_signature(value) if inspect.isfunction(value) else "")


def _signature(found: Any) -> str:
    """Names of parameters, a question mark for those that may be left out, and where they have to be named."""
    words, is_named = [], False
    for each in inspect.signature(found).parameters.values():
        if each.name == "self":
            continue
        if each.kind == each.KEYWORD_ONLY and not is_named:
            words, is_named = [*words, "*"], True
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        is_named = is_named or each.kind == each.VAR_POSITIONAL
        words.append(stars + each.name + "?" * (each.default is not each.empty))
    return f"({', '.join(words)})"


def _fields(kind: Any) -> Iterator[str]:
    for each in dataclasses.fields(kind):
        yield f"{each.name}: {each.type}"


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
