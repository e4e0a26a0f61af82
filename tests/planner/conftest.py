"""Tests of the planner count what equal models move and keep once: each program that is lowered for that takes time."""

from __future__ import annotations

import pytest

from gs_compile.planner.lp.counting import Counted


@pytest.fixture(scope="session", autouse=True)
def counted_once():
    known = {}

    def counted(*given, **settings):
        found = Counted(*given, **settings)
        return known.setdefault(found.key, found)

    with pytest.MonkeyPatch.context() as patched:
        for module in ("gs_compile.planner.problem", "planned"):
            patched.setattr(f"{module}.Counted", counted)
        yield
