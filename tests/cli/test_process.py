"""What a process of the command line does without, and the second one beside it."""

from __future__ import annotations

import gc
import os
import sys

import pytest

from gs_compile.cli import process
from gs_compile.cli.process import Beside, do_with_all, do_without, is_own

NAME = __name__  # the second process loads this file


def of(number):
    if number < 0:
        raise ValueError(f"{number} is less than 0")
    return number, os.getpid()


def ends(first):
    """In the second process without an answer."""
    if os.getpid() != first:
        os._exit(1)
    return "here"


def test_a_function_is_called_in_a_second_process_which_ends():
    with Beside(NAME) as other:
        number, where = other.call("of", 3)()
        assert (number, where == os.getpid()) == (3, False)
    with pytest.raises(ProcessLookupError):
        os.kill(where, 0)


def test_its_error_is_raised_here():
    with Beside(NAME) as other, pytest.raises(ValueError, match="-1 is less than 0"):
        other.call("of", -1)()


def test_where_it_ends_without_an_answer_this_process_answers():
    with Beside(NAME) as other:
        assert other.call("ends", os.getpid())() == "here"
    for is_asked in (True, False):
        with Beside(NAME) as other:
            result = other.call("ends", os.getpid()) if is_asked else None
            other._process.kill()  # as it is loading
            other._process.join()
            assert (result or other.call("ends", os.getpid()))() == "here"


def test_what_no_plan_needs_is_not_loaded(monkeypatch):
    monkeypatch.setattr(process, "LEFT_OUT", ("colorsys", "gc"))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    try:
        do_without()
        assert is_own()
        with pytest.raises(ImportError):
            import colorsys
        assert sys.modules["gc"] is gc  # what is there stays
    finally:
        do_with_all()
    assert not is_own()
    import colorsys

    assert colorsys
