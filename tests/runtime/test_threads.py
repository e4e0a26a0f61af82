"""One thread's number of threads is its own; torchrun's 1 is corrected, a user's number is not."""

from __future__ import annotations

import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gs_compile.runtime import threads
from gs_compile.runtime.threads import correct_thread_count, limit_threads

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def own_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def launched(monkeypatch):
    """As torchrun starts a process, on a machine of 16 cores; keywords change the environment, None removes."""

    def launch(cores=16, **changed):
        for name, value in (TORCHRUN | changed).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        monkeypatch.setattr(threads, "usable_cores", lambda: cores)
        torch.set_num_threads(1)

    return launch


def in_new_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_limit_is_one_threads_own():
    with ThreadPoolExecutor(1) as limited, ThreadPoolExecutor(1) as other:
        assert other.submit(torch.get_num_threads).result() == 2
        limited.submit(limit_threads, 3).result()
        assert limited.submit(torch.get_num_threads).result() == 3
        assert other.submit(torch.get_num_threads).result() == 2
        assert torch.get_num_threads() == 2
        assert in_new_thread(torch.get_num_threads) == 2


def test_a_limit_reaches_openmp():
    def openmp():
        found = re.search(r"omp_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info())
        return int(found[1]) if found else pytest.skip("torch is built without OpenMP")

    def limited():
        limit_threads(4)
        return openmp()

    assert in_new_thread(limited) == 4
    assert in_new_thread(openmp) == openmp() == 2


def test_limits_set_at_once_leave_the_default():
    barrier = threading.Barrier(6)

    def limit(count):
        barrier.wait()
        limit_threads(count)
        return torch.get_num_threads()

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(limit, range(1, 7))) == [1, 2, 3, 4, 5, 6]
    assert in_new_thread(torch.get_num_threads) == 2


def test_torchruns_one_is_corrected_and_said_once(launched, caplog):
    launched()
    with caplog.at_level(logging.WARNING):
        assert correct_thread_count() == correct_thread_count() == torch.get_num_threads() == 8
    assert in_new_thread(torch.get_num_threads) == 8
    launched(LOCAL_RANK="1")
    assert correct_thread_count() == 8  # and says nothing
    assert [record.getMessage() for record in caplog.records] == [
        "torchrun set OMP_NUM_THREADS=1, but each of the 2 processes here has 8 cores: computing with as many threads. "
        "To choose the number, set OMP_NUM_THREADS yourself, to more than 1."
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"TORCHELASTIC_RUN_ID": None},  # not torchrun
        {"LOCAL_WORLD_SIZE": "1"},  # torchrun leaves the variable alone for one process
        {"LOCAL_WORLD_SIZE": None},
        {"cores": 3},  # one for each process
        {"OMP_NUM_THREADS": "3"},  # the user's
        {"OMP_NUM_THREADS": None},
    ],
)
def test_another_one_is_not_corrected(changed, launched, caplog):
    launched(**changed)
    assert correct_thread_count() == torch.get_num_threads() == 1
    assert not caplog.records


def test_a_number_set_since_stays(launched):
    launched()
    torch.set_num_threads(3)
    assert correct_thread_count() == torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("num_here", "cores", "environment", "beside", "alone"),
    [(1, 8, None, 4, 6), (4, 16, None, 2, 2), (4, 3, None, 1, 1), (4, 8, "8", 4, 8), (2, 6, None, 2, 2)],
    ids=["one rank", "its share", "one at least", "the user's", "bound"],
)
def test_the_updates_of_a_rank_have_its_share_of_the_cores(num_here, cores, environment, beside, alone, monkeypatch):
    """Where no launcher says how many ranks there are, and none has bound them to cores of their own.

    Half of them beside a computation on the CPU; beside a device all but two, in which others launch and move data.
    """
    bound_to = 4 if cores == 6 else cores
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environment:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(bound_to)))
    monkeypatch.setattr(threads.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(threads, "usable_cores", lambda: bound_to)
    monkeypatch.setattr(threads, "correct_thread_count", lambda: bound_to if environment is None else int(environment))
    assert threads.update_threads(beside_compute=True, num_here=num_here) == beside
    assert threads.update_threads(beside_compute=False, num_here=num_here) == alone
