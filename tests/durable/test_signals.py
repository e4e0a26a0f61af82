"""A durable run that is asked to end does so at once: its commit is made or not begun, and the next run goes on."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
from children import NUM_STEPS
from test_directories import holds_values, left
from test_kills import assert_ends_as, assert_goes_on, assert_kept

from gs_compile.errors import StorageError
from gs_compile.runtime.storage import system
from gs_compile.runtime.storage.store import Store

CODES = {"SIGTERM": (143,), "SIGINT": (-2, 130)}  # Python ends by the signal itself, which a shell shows as 130


def ends(server, uninterrupted, directory, signals, **how):
    """A run that is sent `signals`, which another goes on from; the first of both, and what it has written."""
    ended = server.run(directory, signals=signals, num_steps=10_000, **how)
    said = server.said()
    again = signals[1:]  # Python itself tells of a KeyboardInterrupt that comes into its own end
    assert again or "Exception ignored" not in said
    left = server.run(directory)
    if left.found > NUM_STEPS:
        assert left.code == 0, server.said()
        assert_goes_on(ended, left, 1, server)
    elif ended.found >= 0:
        assert_goes_on(ended, left, 1, server)
        assert_ends_as(uninterrupted, left, server)
    assert_kept(directory)
    return ended, said


@pytest.mark.parametrize(
    "count", [3, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])], ids=["some", "all"]
)
@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_run_that_is_asked_to_end(server, uninterrupted, tmp_path, name, count):
    """At random moments, with syncs that take their time; and with a second signal, which waits for nothing.

    A run that does not end is killed, which is another code.
    """
    numbers = random.Random(name if count < 10 else None)
    for number in range(count):
        directory = tmp_path / str(number)
        begun = [name, numbers.uniform(0.05, 2.0)]
        again = [[name, numbers.uniform(0, 0.1)]] if number % 3 == 2 else []
        ended, said = ends(server, uninterrupted, directory, [begun, *again], slow=0.02)
        if not again:
            assert ended.code in CODES[name], (ended, said)
        else:
            assert ended.code in (*CODES[name], -15, -2), (ended, said)


def test_the_end_of_a_run_removes_nothing_that_a_commit_is_about_to_name(tmp_path, monkeypatch):
    """A second SIGINT ends the wait for the thread that commits: that goes on in the middle of the removal here."""
    left(tmp_path, "one")
    store = Store([tmp_path / "one"], durable=True, resume=())
    new = {part.value: store.allocate(f"{part.value}.0", part.nbytes) for part in store.former.parts}
    made = replace(store.former, step=4, parts=tuple(each.stored(name) for name, each in new.items()))
    is_begun, is_removed, errors, unlink = threading.Event(), threading.Event(), [], system.unlink

    def make():
        is_begun.set()
        assert is_removed.wait(60)
        return made

    def commit():
        try:
            store.commit([*new.values()], make)
        except StorageError as error:
            errors.append(str(error))

    def remove(name, folder_fd):
        unlink(name, folder_fd)
        is_removed.set()
        committing.join(0.2)

    committing = threading.Thread(target=commit)
    committing.start()
    assert is_begun.wait(60)
    with monkeypatch.context() as patched:
        patched.setattr(system, "unlink", remove)
        store.close()
    committing.join()
    assert "the commit of step 4 came after the end of its run" in errors[0]
    with Store([tmp_path / "one"], durable=True, resume=()) as again:
        assert again.former.step == 3
        assert holds_values(again)
