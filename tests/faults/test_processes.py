"""What a process leaves behind when it ends without a word, and when it is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiered import files_in

from gs_compile.errors import LeftoverError
from gs_compile.runtime.store import Store

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = """
import sys, time
import torch
import gs_compile
from captured import Tiny, batch

torch.set_num_threads(1)
model = Tiny()
optimizer = gs_compile.AdamW(model.parameters())
ratios = {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0}
expert = {"compiler": "eager", "alpha": 0.5, "ratios": ratios}
options = {"micro_batch_size": 2, "storage": sys.argv[1], "host_memory": "100MiB", "expert": expert}
model.compile(backend="greedysnake", options=options)
for _ in range(2):
    loss = model(*batch())
    loss.backward()
    optimizer.step()
print("trained", flush=True)
if sys.argv[2] == "wait":
    time.sleep(100)
if sys.argv[2] == "raise":
    raise SystemExit(3)
"""


def run(directory, what):
    command = [sys.executable, "-c", SCRIPT, str(directory), what]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": "/usr/bin:/bin", "HOME": str(directory)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=directory, env=environment, **pipes)


@pytest.mark.parametrize("what", ["end", "raise"])
def test_a_process_that_ends_leaves_nothing(tmp_path, what):
    with run(tmp_path, what) as process:
        out, err = process.communicate(timeout=120)
    assert (out, process.returncode) == ("trained\n", {"end": 0, "raise": 3}[what]), err
    assert "Exception" not in err
    assert not [name for name in files_in(tmp_path) if "greedysnake-run" in name]


def test_a_process_that_is_killed_leaves_files_that_the_next_run_names(tmp_path):
    with run(tmp_path, "wait") as process:
        assert process.stdout.readline() == "trained\n"
        process.kill()
    with pytest.raises(LeftoverError, match=r"a run was killed and left \d+ files, \d+ bytes.*delete the folder"):
        Store([tmp_path])
