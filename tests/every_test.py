"""What every test has: figures in the place of measurements, captures of its own, garbage that is looked for seldom."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import figures
import pytest
import torch
from lowered import lower_once
from tiered import Harness, capture_cheaply, collect_seldom, our_threads, shared

from gs_compile.model import engine, first_step
from gs_compile.planner.cost import timing
from gs_compile.runtime.storage.drive import Drive

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # every model is built from its configuration
os.environ.pop(figures.ENVIRONMENT, None)
figures.give()  # no test plans from what it measures

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # started in the background, Python and what it starts have none
torch.set_num_threads(1)  # for tiny models more only get in each other's way
capture_cheaply()
lower_once()

YOUNG = 50_000  # objects that may refer to others, made since the last collection and not gone: that is a capture
LEFT = 8_000_000  # blocks of memory that wait to be looked at together, dead or alive: that is a search through all there are


def pytest_collection_finish():
    gc.enable()
    collect_seldom()


@pytest.fixture(autouse=True)
def fresh_dynamo(captures_of_a_module):
    """Each test captures its own models, unless its module says KEEPS_CAPTURES.

    What tests before it have left for good is passed over by the collections that first calls and Accelerate make.
    """
    if not Harness.are_kept:
        Harness.forget_captures()
    young, num_collections, _ = gc.get_count()
    if young > YOUNG or num_collections:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def captures_of_a_module(request):
    """A module that keeps its captures from test to test begins without any, and without threads of modules before."""
    Harness.are_kept = getattr(request.module, "KEEPS_CAPTURES", False)
    Harness.forget_captures()
    if sys.getallocatedblocks() > Harness.num_alive + LEFT or our_threads():
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        Harness.num_alive = sys.getallocatedblocks()


@pytest.fixture(autouse=True, scope="session")
def freed_beside(tmp_path_factory):
    """Another thread frees the files that runs remove: a file system that discards their blocks takes 4 ms for each.

    Until then each has a name elsewhere, beside the one that goes.
    """
    folder, numbers, discard = tmp_path_factory.mktemp("removed"), itertools.count(), Drive._discard

    def discarded(drive, fd, name):
        aside = folder / str(next(numbers))
        with contextlib.suppress(OSError):  # on another file system
            os.link(drive.folder / name, aside)
        discard(drive, fd, name)
        pool.submit(os.unlink, aside)

    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patched:
        pool.submit(folder.exists).result()  # the thread is there: some tests count them
        patched.setattr(Drive, "_discard", discarded)
        yield


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def harness(request):
    """The tiny model of the module, MODEL as arguments of `shared`, or the usual one."""
    return shared(**getattr(request.module, "MODEL", {}))


@pytest.fixture
def as_for_users(monkeypatch):
    """First calls and ends of optimizers collect what is garbage; other tests do without: `capture_cheaply`."""
    for module in (engine, first_step):
        monkeypatch.setattr(module, "gc", gc)


@pytest.fixture
def given_figures(monkeypatch):
    """The figures as they are in `figures.py`, whatever the seed: a test that needs these ones says so."""
    monkeypatch.delenv(figures.SEED, raising=False)
    monkeypatch.setenv(figures.ENVIRONMENT, str(figures.MACHINE))


@pytest.fixture
def measured(monkeypatch):
    """The code and the drives are measured, in short: such a test asks what is measured, not how well."""
    for owner, name, measure in figures.MEASURED:
        monkeypatch.setattr(owner, name, measure)
    monkeypatch.setattr(timing, "SECONDS", 0.1)


@pytest.fixture
def slow_code(monkeypatch):
    """The computation binds, and what levels save of it follows from their operations."""

    def timed(workload, *_):
        costs = {unit: replace(cost, seconds=(1.0, 3.0)) for unit, cost in workload.costs.items()}
        return replace(workload, costs=costs)

    monkeypatch.setattr("gs_compile.planner.at_hand.timed", timed)
    monkeypatch.setattr("gs_compile.planner.cost.timing.timed_levels", lambda workload, *_: workload)
