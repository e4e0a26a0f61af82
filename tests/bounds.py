"""The library's source, its lines of code, and how figures are held against a bound that is not met everywhere.

`over_bounds.json` lists what is over a bound, with its figure: no figure may rise, and an entry that is no longer needed
fails the test.
"""

from __future__ import annotations

import ast
import io
import json
import tokenize
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
KNOWN: dict[str, dict[str, int]] = json.loads((ROOT / "tests" / "over_bounds.json").read_text())


def files() -> dict[str, Path]:
    """Every source file of the library by its place in the package; links are not followed."""
    found = {}
    for folder in ("gs_compile", "passes", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            place = path.relative_to(ROOT)
            if folder != "gs_compile":
                found[f"gs_compile/{place}"] = path
            elif place.parts[1] not in ("passes", "runtime"):
                found[str(place)] = path
    return found


@cache
def library() -> dict[str, str]:
    """The source of each module of the library by its name."""
    names = {place: place.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for place in files()}
    return {names[place]: path.read_text() for place, path in files().items()}


def beside(folder: str) -> dict[str, str]:
    """The source of each Python file of a folder that is not of the library, by its path."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / folder).rglob("*.py")}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def walked(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a source: to find them takes longer than to look at them."""
    return tuple(ast.walk(parsed(source)))


@cache
def code_lines(source: str) -> frozenset[int]:
    """The numbers of the lines that hold code: no docstrings, blank lines, comments or imports."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in walked(source):
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
                found.difference_update(range(node.lineno, node.end_lineno + 1))
    return frozenset(found)


def hold(bound: str, offenders: dict[str, int]) -> None:
    """Compare what is over a bound with what is known to be."""
    known = KNOWN.get(bound, {})
    assert {name: figure for name, figure in offenders.items() if figure > known.get(name, 0)} == {}, bound
    assert known.keys() - offenders.keys() == set(), f"met now, take it out of over_bounds.json: {bound}"
