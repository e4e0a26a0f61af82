"""A durable run that is killed at any moment goes on from its last commit, bit for bit, under any placement; one that is
asked to end does so at once: its commit is made or not begun, and the next run goes on.
"""

from __future__ import annotations

import itertools
import random

import pytest
from children import NUM_STEPS, PLACES, POINTS, Server
from tiered import files_in

from gs_compile.runtime.storage import manifest
from gs_compile.runtime.storage.folder import STATUS, folder_in
from gs_compile.runtime.storage.last_commit import names_in

WHENS = ("before", "after")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("server"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def uninterrupted(server, tmp_path_factory):
    """Runs that are not durable, to their end, by their number of steps."""
    found = {}
    for number in (NUM_STEPS, NUM_STEPS + 1):
        found[number] = server.run(tmp_path_factory.mktemp("uninterrupted"), durability=0, num_steps=number)
        assert found[number].code == 0, server.said()
    return found


def assert_goes_on(before, now, durability, server):
    """What one process has found of the one that was killed: at most the closed step whose commit was under way and
    those that were not to be committed are done again.
    """
    due = max(before.found, (before.done - 1) // durability * durability)
    assert due <= now.found <= before.done + 1, (before, now, server.said())
    assert now.found == before.found or now.found % durability == 0 or now.found == NUM_STEPS


def assert_ends_as(uninterrupted, ended, server):
    assert ended.code == 0, (ended, server.said())
    assert ended.digests == uninterrupted[ended.done].digests
    assert ended.threads == []


def assert_kept(*directories):
    """The files of the last commit are there, and no others but what the run has last said of itself."""
    for directory in directories:
        folder = folder_in(directory)
        found = {path.name for path in folder.iterdir()} - {STATUS}
        assert found == set(names_in(manifest.read(folder), folder))


def chain(server, uninterrupted, directories, kills, **how):
    """A run that is killed as `kills` say, one process after the other, until one ends; how many were killed.

    A kill that the last process has not come to is left in `kills`.
    """
    before, killed = None, 0
    while True:
        is_over = before is not None and before.done >= NUM_STEPS  # else each kill could make it a step longer
        ended = server.run(*directories, **{**how, **(kills[0] if kills and not is_over else {})})
        assert ended.code in (0, -9), server.said()
        assert ended.losses == {step: uninterrupted[NUM_STEPS + 1].losses[step] for step in ended.losses}
        if before is not None and ended.found >= 0:
            assert_goes_on(before, ended, how.get("durability", 1), server)
        if ended.code == 0:
            assert_ends_as(uninterrupted, ended, server)
            assert_kept(*directories)
            return killed
        killed += 1
        del kills[0]
        if ended.found >= 0:  # else it was killed before it had looked
            before = ended


@pytest.fixture(scope="module")
def calls(server, uninterrupted, tmp_path_factory):
    """The calls of a durable run that is not killed, by name; its seconds."""
    ended = server.run(tmp_path_factory.mktemp("calls"))
    assert_ends_as(uninterrupted, ended, server)
    return ended.calls, ended.seconds


def kills(numbers, calls, count):
    """At random moments, at random calls, and while a process still takes up what the one before has left."""
    of, seconds = calls
    for _ in range(count):
        name = numbers.choice(POINTS)
        kill = numbers.choice(
            (
                {"kill_after": numbers.uniform(0, seconds)},
                {"kill_after": numbers.uniform(0, seconds / 4)},
                {"at": [name, numbers.randrange(of[name] + 1), numbers.choice((*WHENS, "half"))]},
            )
        )
        yield {**kill, "place": numbers.choice([*PLACES])}


FIRST = {"rename": 0, "sync_folder": 2, "unlink": 1, "open_file": 30, "datasync": 12, "pwritev": 90}
LATER = [("rename", 1, "before"), ("rename", 1, "after"), ("sync_folder", 3, "before"), ("datasync", 30, "after")]
EACH = [(name, number, when) for name, number in FIRST.items() for when in WHENS] + [("pwritev", 40, "half"), *LATER]
# Between the calls of a commit: what a kill leaves of each call itself, test_power_loss.py has.
SOME = [("pwritev", 40, "half"), ("datasync", 12, "after"), ("rename", 0, "before"), ("rename", 0, "after")]
SOME += [("unlink", 1, "after"), ("rename", 1, "before")]


@pytest.mark.parametrize(
    ("place", "kinds"), [("mixed", SOME), *(pytest.param(each, EACH, marks=pytest.mark.slow) for each in PLACES)]
)
def test_a_kill_at_each_point_of_a_commit(server, uninterrupted, tmp_path, place, kinds):
    """Before and after each kind of call, and within a write; of the commits of new processes and of those after."""
    points = [{"at": each} for each in kinds]
    for number in itertools.count():
        killed = chain(server, uninterrupted, [tmp_path / str(number)], points, place=place)
        if not points:
            break
        assert killed, f"a whole run does not come to {points[0]}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2, 12))
def test_kills_at_random_moments(server, uninterrupted, calls, tmp_path, seed):
    """Each process of a run may have another placement."""
    numbers, killed, number = random.Random(seed), 0, 0
    while killed < 200:
        number += 1
        directories = [tmp_path / f"{number}a", tmp_path / f"{number}b"][: 1 + number % 2]
        each = [*kills(numbers, calls, 8)]
        killed += chain(server, uninterrupted, directories, each, durability=numbers.choice((1, 1, 3)))


# Asked to end ---------------------------------------------------------------------------------------------------------

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


def test_a_run_without_commits_that_is_asked_to_end_leaves_nothing(server, tmp_path):
    ended = server.run(tmp_path, signals=[("SIGTERM", 0.3)], num_steps=10_000, durability=0)
    assert (ended.code, ended.armed) == (143, True), server.said()
    assert not {"Traceback", "Exception"} & {word.strip(":") for word in server.said().split()}
    assert files_in(tmp_path) == []


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
        begun = [name, numbers.uniform(0.05, 0.8 if count < 10 else 2.0)]
        again = [[name, numbers.uniform(0, 0.1)]] if number % 3 == 2 else []
        ended, said = ends(server, uninterrupted, directory, [begun, *again], slow=0.02)
        if not again:
            assert ended.code in CODES[name], (ended, said)
        else:
            assert ended.code in (*CODES[name], -15, -2), (ended, said)
