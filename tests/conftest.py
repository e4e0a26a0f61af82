"""What a session has before it has tests; every_test.py has the rest, which imports torch."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import settings

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process that tests start would compile the package again

settings.register_profile("any speed", deadline=None, max_examples=12)  # other examples in every run
settings.register_profile("many", deadline=None, max_examples=100)  # of `make slow`
settings.load_profile("any speed")


def pytest_configure(config):
    """The process that deals tests out to workers, which wait for it, runs none."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        gc.disable()  # until all is imported and collected: it stays
        config.pluginmanager.import_plugin("every_test")


def pytest_collection_modifyitems(items):
    """Tests of ranks first: one worker has them all, while others take files of the rest."""
    items.sort(key=lambda item: item.path.parent.name != "ranks")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """One worker has all tests of ranks, and one server that ranks are forked from: it takes a quarter of a minute."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "ranks" if "tests/ranks/" in nodeid else super()._split_scope(nodeid)

    return Scheduling(config, log)
