"""threads: how many threads torch computes with, in this process and for one thread; and processes without threads.

What `torch.set_num_threads(n)` does, by experiment (torch 2.13, OpenMP): it sets the number of the calling thread, and
the default. A thread takes the default when it first asks for its number or computes, even if it has set one before;
from then on it keeps its number, whatever others set. So the number of one thread alone is set after asking for it, and
the default is put back from a new thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import torch

from gs_compile.errors import ForkError, StepOrderError
from gs_compile.machine import num_ranks, usable_cores

log = logging.getLogger(__name__)

_default = threading.Lock()  # the default is read, changed and put back as one action


def limit_threads(count: int) -> None:
    """The calling thread computes with `count` threads from now on; other threads, and later ones, keep theirs.

    A thread that computes for the first time during this call may inherit `count`. MKL has one number for the whole
    process, which is the same afterwards: only torch's own kernels are limited.
    """
    torch.get_num_threads()  # so that this thread does not take the default later
    with _default:
        inherited: list[int] = []
        _in_new_thread(lambda: inherited.append(torch.get_num_threads()))
        torch.set_num_threads(count)
        _in_new_thread(lambda: torch.set_num_threads(inherited[0]))


def correct_thread_count() -> int:
    """The calling thread's number of threads, after undoing torchrun's OMP_NUM_THREADS=1 where more cores are there.

    torchrun sets it for several processes on a node if the user has not: the optimizer would have one core. Any other
    number is the user's own and stays. Only a node's first process logs the correction as a warning.
    """
    count, environment = torch.get_num_threads(), os.environ
    processes = num_ranks()
    is_launched = "TORCHELASTIC_RUN_ID" in environment and processes > 1
    if count > 1 or not is_launched or environment.get("OMP_NUM_THREADS") != "1":
        return count
    share = max(1, usable_cores() // processes)
    if share > count:
        torch.set_num_threads(share)
        is_first = environment.get("LOCAL_RANK", "0") == "0"
        log.log(
            logging.WARNING if is_first else logging.DEBUG,
            "torchrun set OMP_NUM_THREADS=1, but each of the %d processes here has %d cores: computing with as many "
            "threads. To choose the number, set OMP_NUM_THREADS yourself, to more than 1.",
            processes,
            share,
        )
    return share


FOR_OTHERS = 2  # cores for the thread that launches on a device, and for those that move data


def update_threads(beside_compute: bool, num_here: int = 1) -> int:
    """The threads of updates: half of this process's if the CPU computes the model too, and all cores but two if a
    device does.

    If a launcher has not bound the `num_here` ranks of this machine to cores, each rank has its share of the cores.
    OMP_NUM_THREADS is obeyed if the user has set it.
    """
    count, is_bound = correct_thread_count(), len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)
    share = usable_cores() // (1 if is_bound else num_here)
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":  # 1 is torchrun's
        if not beside_compute:
            count = min(count, share - FOR_OTHERS)
        elif num_here > 1:
            count = min(count, share)
    return max(1, count // (2 if beside_compute else 1))


def _in_new_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def refuse_without_threads(pid: int, *, uses_storage: bool) -> None:
    """Raise `ForkError` in a child of the process `pid`, which has the threads of a run, and `StepOrderError` if the
    interpreter is ending: it starts no more threads, and those that move data of storage start when they are needed.
    """
    if os.getpid() != pid:
        raise ForkError(
            f"this process was forked from {pid}, which trains this model, and has none of its threads: use the model "
            "in that process, or give this process the tensors of a state_dict()"
        )
    if uses_storage and not threading.main_thread().is_alive():
        raise StepOrderError(
            "the interpreter is ending, and starts no more threads, which move data: make state dicts and steps before "
            "the script ends, for example in try ... finally, not in atexit"
        )
