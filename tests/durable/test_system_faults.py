"""Faults from outside: strace lets a run's system calls fail, and knows nothing of this package; and a long run."""

from __future__ import annotations

import gc
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tiered import Harness, adamw, gpt2, options, step, tokens

from gs_compile.runtime.storage.folder import LOCK
from gs_compile.runtime.storage.manifest import NAME
from gs_compile.runtime.storage.stored import FOLDER

KEEPS_CAPTURES = True
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import hashlib, os, sys, threading, torch
import gs_compile
from setups import ids, tiny

torch.set_num_threads(1)
model = tiny()
optimizer = gs_compile.AdamW(model.parameters(), lr=1e-2)
ratios = {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0}
options = {"micro_batch_size": 2, "storage": sys.argv[1], "host_memory": "100MiB", "durability": "step"}
options |= {"expert": {"compiler": "eager", "recompute": "all", "alpha": 0.5, "ratios": ratios}}
model.compile(backend="greedysnake", options=options)
descriptors = len(os.listdir("/proc/self/fd"))
try:
    gs_compile.resume(model, optimizer, storage=sys.argv[1])
    while optimizer.num_steps < 4:
        model(ids()).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    found = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print("learned", hashlib.sha256(found).hexdigest())
except gs_compile.errors.GreedySnakeError as error:
    print("ended", type(error).__name__, error)
    left = len([each for each in os.listdir("/proc/self/fd") if "greedysnake" in os.path.realpath(f"/proc/self/fd/{each}")])
    print(left, [each.name for each in threading.enumerate() if each.name.startswith("greedysnake")])
"""
FAULTS = [
    "pwritev,pwritev2:error=EIO:when=3",
    "pwritev,pwritev2:error=ENOSPC:when=9",
    "pwritev,pwritev2:error=EINTR:when=2+3",
    "preadv,preadv2:error=EIO:when=4",
    "preadv,preadv2:error=EINTR:when=2+3",
    "fdatasync:error=EIO:when=2",
    "fdatasync:error=EDQUOT:when=5",
    "fallocate:error=ENOSPC:when=4",
    "rename,renameat,renameat2:error=EIO:when=2",
    "fsync:error=EIO:when=1",
    "flock:error=ENOLCK:when=1",
]


def run(folder, *before):
    """What the script prints."""
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": os.environ["PATH"], "HOME": str(folder)}
    command = [*before, sys.executable, "-c", SCRIPT, str(folder / "storage")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    found = subprocess.run(command, env=environment, text=True, timeout=300, check=False, **pipes)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_system_call_that_fails_costs_no_committed_step(fault, undisturbed, tmp_path):
    """The same bits, or a named error that leaves no thread, descriptor or file; the next run learns the same."""
    calls = fault.partition(":")[0]
    log = tmp_path / "strace.txt"
    traced = ("strace", "-f", "--seccomp-bpf", "-o", str(log), "-e", f"trace={calls}", "-e", f"inject={fault}")
    found = run(tmp_path, *traced)
    assert "(INJECTED)" in log.read_text()
    if found != undisturbed:
        first, second = found.splitlines()
        assert re.match("ended (LaneError|Storage\\w*Error) .*(failed|are free)", first)
        assert "EINTR" not in fault
        assert second == "0 []"
        files = {path.name for path in tmp_path.glob(f"storage/{FOLDER}/*")}
        assert files <= {LOCK} or NAME in files  # a lock that cannot be taken may be another's
        assert run(tmp_path) == undisturbed


def used():
    """MiB in memory, descriptors, and threads."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return resident, len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_long_run_takes_no_more_than_a_short_one(tmp_path):
    """1,500 steps of batches of 1 to 9 rows and 2 to 8 tokens. What is measured once each size has been met stays."""
    harness, draw = Harness(gpt2), random.Random(0)
    step_of = {0: used()}
    with harness.fresh(adamw, options(tmp_path, alpha=0.5)) as optimizer:
        for number in range(1500):
            size, length = (9, 8) if number == 0 else (draw.randint(1, 9), draw.randint(2, 8))
            step(harness.model, optimizer, tokens(number, size)[:, :length].contiguous())
            if number in (499, 999, 1499):
                optimizer.synchronize()
                step_of[number] = used()
    (memory, *others), (later, *same), (last, *rest) = (step_of[number] for number in (499, 999, 1499))
    assert others == same == rest
    assert last - memory < 4, step_of  # all sizes have been met by the 500th step
    assert last - later < 2, step_of
