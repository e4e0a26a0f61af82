"""docs/interface.md is the public interface as it is."""

from __future__ import annotations

import os
import re

from interface import PAGE, text


def test_the_page_has_the_public_interface():
    page = PAGE.read_text()
    written = re.search(r"```text\n(.*?)```", page, re.DOTALL)
    assert written
    if os.environ.get("EXPECTTEST_ACCEPT"):
        PAGE.write_text(page.replace(written[1], text()))
    else:
        assert written[1] == text(), "what somebody's code may rest on has changed; EXPECTTEST_ACCEPT=1 writes the page"
