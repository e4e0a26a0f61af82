"""What the site has beside docs/*.md: pages of the repository's root, the examples, the command line; and how links
between any of these, which are written for a reader of the repository, lead to the site's pages.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import indent
from typing import Any

import typer

import gs_compile
import gs_compile.hf
from gs_compile.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
AT_THE_ROOT = {  # pages, and the files that they are made of
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash"}
LINK = re.compile(r"\[([^\]\[]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
DIRECTIVE = re.compile(r"^::: ([\w.]+)\n(?: {4}.*\n)*", re.MULTILINE)


def made() -> Mapping[str, str]:
    """The pages that are in no file of docs/, by their names there."""
    return {
        **{page: (ROOT / name).read_text() for page, name in AT_THE_ROOT.items()},
        "licence.md": "# Licence\n\nGreedySnake has the Apache License 2.0.\n\n"
        f"```text\n{(ROOT / 'LICENSE').read_text()}```\n",
        "command_line.md": "".join(_commands()),
        "examples.md": "".join(_examples()),
    }


def undocumented() -> list[str]:
    """Public names without a docstring of their own, or that no page of docs/reference has."""
    told = {name for page in (DOCS / "reference").glob("*.md") for name in DIRECTIVE.findall(page.read_text())}
    public = {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in (gs_compile, gs_compile.hf)
        for name in module.__all__
        if name not in ("__version__", "hf")
    }
    return [name for name, found in public.items() if name not in told or not found.__doc__]


def _examples() -> Iterator[str]:
    yield "# Examples\n\nScripts that run without changes. Each begins with its command; click to unfold its code.\n"
    for path in sorted((ROOT / "examples").glob("[a-z]*.*")):
        yield f"\n## {path.name}\n"
        if path.suffix == ".ipynb":
            yield from _cells(json.loads(path.read_text()))
            continue
        if path.suffix == ".py":
            yield f"\n{ast.get_docstring(ast.parse(path.read_text()))}\n"
        fenced = f"```{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}```"
        yield f'\n??? example "{path.name}"\n\n{indent(fenced, " " * 4)}\n'


def _cells(notebook: Mapping[str, Any]) -> Iterator[str]:
    """A notebook's text, and its code in fences."""
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        yield f"\n```python\n{text}\n```\n" if cell["cell_type"] == "code" else f"\n{text}\n"


def _commands() -> Iterator[str]:
    yield "# Command line\n\nAll commands with their options, from their own help. "
    yield "`python -m gs_compile` is the same as `greedysnake`.\n"
    yield from _command(typer.main.get_command(app), "greedysnake")


def _command(command: Any, name: str) -> Iterator[str]:
    context = typer.Context(command, info_name=name)
    yield f"\n## {name}\n\n{command.help}\n\n    {' '.join([name, *command.collect_usage_pieces(context)])}\n"
    records = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
    if records:
        yield "\n| option | meaning |\n| --- | --- |\n"
        yield from (f"| {_cell(_named(option))} | {_cell(text)} |\n" for option, text in records)
    for each, inner in getattr(command, "commands", {}).items():
        yield from _command(inner, f"{name} {each}")


def _named(option: str) -> str:
    """An option, and what it takes: "--after PASS" as "`--after` PASS"."""
    name, _, takes = option.partition(" ")
    return f"`{name}` {takes}".rstrip()


def _cell(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", " &#124; ").replace("  ", " ")


def linked(markdown: str, page: str) -> str:
    """A page's text with links to pages of the site, by their titles; what the site does not have is named alone."""
    folder = (ROOT / AT_THE_ROOT[page] if page in AT_THE_ROOT else DOCS / page).parent

    def there(found: re.Match[str]) -> str:
        text, link, anchor = found[1], found[2], found[3] or ""
        path = Path(os.path.normpath(folder / link))
        uri = _page_of(path)
        if uri is None:
            return text if path.exists() else found[0]
        if uri == "examples.md":
            anchor = f"#{path.name.lower().replace('.', '')}"
        name = _title(path) if text.endswith(".md") else text
        return f"[{name}]({os.path.relpath(uri, Path(page).parent)}{anchor})"

    return LINK.sub(there, markdown)


def _page_of(path: Path) -> str | None:
    """The page that is made of a file, or the file of the site."""
    for page, name in {**AT_THE_ROOT, "licence.md": "LICENSE"}.items():
        if path == ROOT / name:
            return page
    if path.is_relative_to(ROOT / "examples"):
        return "examples.md"
    return path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) else None


def _title(path: Path) -> str:
    """A page's own, in the place of its file's name."""
    return path.read_text().partition("\n")[0].removeprefix("# ")


def plain(markdown: str) -> str:
    """A page of the reference with the docstrings in it, for llms.txt."""
    return DIRECTIVE.sub(_documented, markdown)


def _documented(directive: re.Match[str]) -> str:
    module, _, name = directive[1].rpartition(".")
    found = getattr(__import__(module, fromlist=[name]), name)
    return f"### {name}\n\n{inspect.getdoc(found)}\n"


def first_sentence(markdown: str) -> str:
    """Of the first paragraph of a page that is prose, without links."""
    paragraphs = [each.replace("\n", " ") for each in markdown.split("\n\n")]
    prose = next((each for each in paragraphs if re.match(r"[A-Z`]|\*\*", each)), "")
    return re.split(r"(?<=[.:])\s", re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", prose).replace("**", ""))[0]
