"""What a process of the command line does without."""

from __future__ import annotations

import gc
import sys

import pytest

from gs_compile.cli import process
from gs_compile.cli.process import do_with_all, do_without


def test_what_no_plan_needs_is_not_loaded(monkeypatch):
    monkeypatch.setattr(process, "LEFT_OUT", ("colorsys", "gc"))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    try:
        do_without()
        assert not gc.isenabled()
        with pytest.raises(ImportError):
            import colorsys
        assert sys.modules["gc"] is gc  # what is there stays
    finally:
        do_with_all()
    assert gc.isenabled()
    import colorsys

    assert colorsys
