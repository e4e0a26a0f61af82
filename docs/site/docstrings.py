"""Docstrings of this package as Markdown: what a docstring says of its parameters, line by line, becomes a list.

name: what it is,            * **name**: what it is,
    going on                   going on
other: ...                   * **other**: ...
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"((?:[a-z_]\w*(?:, )?)+): (?=\S)")


class Lists(griffe.Extension):
    """Called by mkdocstrings for every object that it reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring whose entries are lists."""
    lines: list[str] = []
    in_entry = False
    for line in text.splitlines():
        entry = ENTRY.match(line)
        if entry and (in_entry or not lines or not lines[-1]):
            lines += [""] * (not in_entry) + [f"* **{entry[1]}**: {line[entry.end() :]}"]
            in_entry = True
        else:
            in_entry = in_entry and line.startswith("    ")
            lines.append(line.replace("    ", "  ", 1) if in_entry else line)
    return "\n".join(lines)
