"""A training run that plans loads no module that only prints or draws, and leaves torch's functions as they are. The
package loads nothing by itself: its names come when they are used. It logs and traces what torch is asked to.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from bounds import ROOT, hold

TRAINING = """
import sys, tempfile, gs_compile
assert not {"torch", "transformers"} & sys.modules.keys()
import torch
from torch import nn
from types import CellType, FunctionType

class Block(nn.Linear):
    def forward(self, x):
        return x + torch.tanh(super().forward(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(256, 256) for _ in range(3))
        self.head = nn.Linear(256, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()

def ours(function, depth=0):
    cells = getattr(function, "__closure__", None) or ()
    inside = [cell.cell_contents for cell in cells if cell != CellType()]
    inside = [each for each in inside if isinstance(each, FunctionType) and depth < 4]
    return str(function.__globals__.get("__name__")).startswith("gs_compile") or any(ours(each, depth + 1) for each in inside)

from gs_compile.planner.cost import timing
timing.SECONDS = 0.1  # the code is timed, in short
model = Model()
optimizer = gs_compile.AdamW(model.parameters(), lr=1e-3)
options = {"micro_batch_size": 2, "outputs": "loss", "host_memory": "2MiB", "expert": {"compiler": "eager"}}
model.compile(backend="greedysnake", options={**options, "storage": tempfile.mkdtemp()})
for _ in range(2):
    model(torch.ones(4, 256)).backward()
    optimizer.step()
    optimizer.zero_grad()
states = model.state_dict(), optimizer.state_dict()  # end with the interpreter
for name, module in [each for each in sys.modules.items() if each[0].split(".")[0] == "torch"]:
    for key, value in list(vars(module).items()):
        for below, each in [("", value), *(vars(value).items() if isinstance(value, type) else ())]:
            if isinstance(each, FunctionType) and ours(each):
                print("patched", f"{name}.{key}.{below}".strip("."))
print(*("loaded " + name for name in ("rich", "typer", "matplotlib", "transformers") if name in sys.modules), sep="\\n")
assert "cvxpy" in sys.modules, "this run is to plan"
import gs_compile.model.inspection
assert gs_compile.inspect.__call__
assert [name for name in gs_compile.__all__ if not hasattr(gs_compile, name)] == []
assert gs_compile.hf.attach and gs_compile.hf.prepare and gs_compile.hf.TrainerMixin
assert "transformers" not in sys.modules
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the run has printed and logged, and what it has traced."""
    folder = tmp_path_factory.mktemp("trace")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # with figures of a machine, as tests have them
    environment |= {"TORCH_LOGS": "+gs_compile", "TORCH_TRACE": str(folder)}
    run = subprocess.run([sys.executable, "-c", TRAINING], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (trace,) = folder.iterdir()
    return run, trace.read_text()


def test_a_training_run_loads_little_and_patches_nothing(trained):
    hold("a training run", dict.fromkeys(filter(None, trained[0].stdout.splitlines()), 1))


def test_its_end_says_nothing(trained):
    """A script's state dicts end with the interpreter."""
    assert "ignored" not in trained[0].stderr


def test_its_logs_and_trace_artifacts(trained):
    run, trace = trained
    summary = next(line for line in run.stderr.splitlines() if "3 layers of 1 class, 2 micro-batches of 2" in line)
    assert summary.startswith("I")
    forward = r"x1_0\.device\S*(, \S+)* = forward\(x0_0\.device, w0"
    assert re.search(forward, run.stderr)
    artifacts = dict(re.findall(r'"artifact": {"name": "gs_compile_(\w+)".*\n((?:\t.*\n)*)', trace))
    assert artifacts.keys() >= {"program", "layers", "loss"}
    assert re.search(forward, artifacts["program"])
    assert "class 0: 3 layers: 0-2" in artifacts["layers"]
    assert "mean" in artifacts["loss"]
    assert '"frame_id": 0' in next(line for line in trace.splitlines() if "gs_compile_program" in line)
