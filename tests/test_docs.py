"""The documents name files that exist, and are short enough to be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FILE = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|md|json|html))`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)[^)]*\)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_links_exist(path):
    text = path.read_text()
    missing = [
        name for name in FILE.findall(text) if not any((each / name).exists() for each in (ROOT, ROOT / "gs_compile"))
    ]
    missing += [link for link in LINK.findall(text) if not (path.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize(("name", "most"), [("README.md", 150), ("ARCHITECTURE.md", 140)])
def test_what_is_read_first_is_short(name, most):
    assert len((ROOT / name).read_text().splitlines()) <= most
