"""Classes of errors, what they print, and their page docs/errors.md say the same."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from bounds import ROOT, library, walked

from gs_compile import errors
from gs_compile.errors import GreedySnakeError, GreedySnakeWarning, name_of

PAGE = ROOT / "docs" / "errors.md"
LEAST_WORDS = 16  # characters that an example and a message have in common, whatever its values are


def kinds(root: type[Exception]) -> Iterator[type[Exception]]:
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield kind
            yield from kinds(kind)


KINDS = {name_of(kind): kind for root in (GreedySnakeError, GreedySnakeWarning) for kind in kinds(root)}
ENTRIES = dict(re.findall(r"^### ([a-z-]+)\n\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def test_every_class_has_one_entry_and_no_entry_is_of_another():
    assert ENTRIES.keys() == KINDS.keys()
    assert len(KINDS) == len({kind for root in (GreedySnakeError, GreedySnakeWarning) for kind in kinds(root)})


@pytest.mark.parametrize("name", KINDS)
def test_a_message_ends_with_its_name(name):
    error = KINDS[name]("what was found") if not issubclass(KINDS[name], OSError) else KINDS[name](5, "what was found")
    assert str(error).endswith(f"what was found [{name}]")
    assert error.message.endswith("what was found")


@cache
def strings() -> str:
    """All strings of the package, without the values that they are filled with."""
    nodes = (node for source in library().values() for node in walked(source))
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


@pytest.mark.parametrize("name", KINDS)
def test_an_entry_says_what_happened_why_and_what_to_do_with_an_example_of_the_packages_own(name):
    entry = ENTRIES[name]
    assert entry.startswith(f"`{KINDS[name].__name__}`")
    assert re.findall(r"^\* \*\*(.*?):\*\*", entry, re.MULTILINE) == ["What happened", "Why", "What to do", "Example"]
    example = re.search(r"\*\*Example:\*\* (`+)(.*)\1", entry)
    assert example, "the example stands between backticks"
    pieces = (example[2][at : at + LEAST_WORDS] for at in range(len(example[2]) - LEAST_WORDS + 1))
    assert any(piece in strings() for piece in pieces), f"nothing in the package says: {example[2]}"
