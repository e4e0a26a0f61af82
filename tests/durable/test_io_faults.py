"""Each call of the system that a durable run makes fails in turn, in each way that it can: the same bits in the end, or
a named error at once; nothing stays but what the last commit names, and the next run goes on from there.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from killed import resumed
from tiered import adamw, files_in, options, our_threads, outcome, step, tokens

from gs_compile.errors import GreedySnakeError
from gs_compile.runtime.storage import system
from gs_compile.runtime.storage.folder import STATUS
from gs_compile.runtime.storage.manifest import NAME, read
from gs_compile.runtime.storage.stored import FOLDER

KEEPS_CAPTURES = True
NUM_STEPS = 2  # of the run that fails; the one that goes on takes one more
SECONDS = 60  # an error surfaces at once; what is more is a loaded machine
ROOM = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EDQUOT": errno.EDQUOT}
AGAIN = {"EINTR": errno.EINTR, "EAGAIN": errno.EAGAIN}
MOVED = {"short": -1, "zero": 0}
WAYS = {
    "open_file": {**ROOM, **AGAIN},
    "open_folder": ROOM,
    "make_folder": ROOM,
    "fallocate": {**ROOM, **AGAIN},
    "preadv": {"EIO": errno.EIO, **AGAIN, **MOVED},
    "pwritev": {**ROOM, **AGAIN, **MOVED},
    "datasync": {**ROOM, **AGAIN},
    "rename": ROOM,
    "sync_folder": ROOM,
}


class Calls:
    """Calls of the system by name, over all threads; `arm` says which of them is to fail, and how."""

    def __init__(self, patched) -> None:
        self.number: Counter[str] = Counter()
        self.failed_at = 0.0
        self._lock = threading.Lock()
        self._armed: tuple[str, int, str] | None = None
        for name in WAYS:
            patched.setattr(system, name, partial(self._call, name, getattr(system, name)))

    def arm(self, name, index, way):
        self._armed = name, index, way

    def _call(self, name, real, *arguments):
        with self._lock:
            index, self.number[name] = self.number[name], self.number[name] + 1
        if self._armed is None or self._armed[:2] != (name, index):
            return real(*arguments)
        self.failed_at = time.monotonic()
        how = WAYS[name][self._armed[2]]
        if how > 0:
            raise OSError(how, os.strerror(how))
        return real(*arguments) // 2 if how else 0


def given(folder):
    """Parts on SSD, and copies of what lives in memory."""
    return {**options(folder, alpha=0.5, ratios={"optimizer": 0.5}), "durability": "step"}


def train(harness, optimizer, numbers):
    for number in numbers:
        step(harness.model, optimizer, tokens(number))
    return outcome(harness.model, optimizer, [], [])


@pytest.fixture(scope="module")
def clean_run(harness, tmp_path_factory):
    """What a run comes to, what a step more makes of it, and how many calls of each name the run makes."""
    with pytest.MonkeyPatch.context() as patched:
        calls = Calls(patched)
        with harness.fresh(adamw, given(tmp_path_factory.mktemp("clean"))) as optimizer:
            found, numbers = train(harness, optimizer, range(NUM_STEPS)), calls.number.copy()
            return found, train(harness, optimizer, [NUM_STEPS]), numbers


def fails(harness, wanted, folder, name, index, way):
    """A run whose call fails. Whether it has ended with a named error, and not with the right values."""
    with pytest.MonkeyPatch.context() as patched, harness.fresh(adamw, given(folder)) as optimizer:
        calls = Calls(patched)
        calls.arm(name, index, way)
        try:
            assert not train(harness, optimizer, range(NUM_STEPS)).differences(wanted)
        except GreedySnakeError as error:
            raised = error
        else:
            return False
        assert time.monotonic() - calls.failed_at < SECONDS
    is_tried_again = name in ("preadv", "pwritev") and way in (*AGAIN, "short")
    assert not is_tried_again or "the commit of step" in str(raised)
    causes = [raised]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    assert any(isinstance(each, OSError) for each in causes), causes
    return True


def assert_only_the_commit(folder, *, both):
    """The step that it is of; 0: there is none. both: a commit that failed in its last call may count, or not."""
    assert our_threads() == []
    found = read(folder / FOLDER)
    named = {file.name for part in found.parts for file in part.files} if found else set()
    there = {each.name for each in folder.glob(f"{FOLDER}/*")} - {STATUS}
    assert there == (named | {NAME} if found else set()) or (both and named <= there), files_in(folder)
    return found.step if found else 0


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def cases(numbers, count):
    """`count` calls of each name in each way, others in every run; without a count the same one of each name."""
    draw = random.Random(None if count else 1)
    for name, ways in WAYS.items():
        if total := numbers[name]:
            for way in ways if count else draw.sample(list(ways), 1):
                yield from ((name, index, way) for index in draw.sample(range(total), min(count or 1, total)))


@pytest.mark.parametrize("count", [0, pytest.param(2, marks=pytest.mark.slow)], ids=["some", "more"])
def test_any_call_may_fail_in_any_way(harness, clean_run, tmp_path, count):
    wanted, wanted_later, numbers = clean_run
    assert sum(numbers.values()) > 200
    ended = Counter()
    for case in cases(numbers, count):
        folder = tmp_path / "-".join(map(str, case))
        before = descriptors()
        has_failed = fails(harness, wanted, folder, *case)
        ended[case[0], case[2]] += has_failed
        start = assert_only_the_commit(folder, both=case[0] in ("rename", "sync_folder"))
        assert descriptors() <= before, case
        if has_failed:  # otherwise it has come to its end
            again = resumed(harness, adamw, given(folder)) if start else harness.fresh(adamw, given(folder))
            with again as optimizer:
                assert not train(harness, optimizer, range(start, NUM_STEPS + 1)).differences(wanted_later), case
    assert ended["fallocate", "ENOSPC"] or not count
    assert sum(ended.values()) >= 4
