"""A training run that plans loads no module that only prints or draws, and leaves torch's functions as they are. The
package loads nothing by itself: its names come when they are used.
"""

from __future__ import annotations

import os
import subprocess
import sys

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
        self.blocks = nn.ModuleList(Block(256, 256) for _ in range(8))
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
options = {"micro_batch_size": 2, "outputs": "loss", "host_memory": "6MiB", "expert": {"compiler": "eager"}}
model.compile(backend="greedysnake", options={**options, "storage": tempfile.mkdtemp()})
for _ in range(2):
    model(torch.ones(4, 256)).backward()
    optimizer.step()
    optimizer.zero_grad()
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


def test_a_training_run_loads_little_and_patches_nothing():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # with figures of a machine, as tests have them
    run = subprocess.run([sys.executable, "-c", TRAINING], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    hold("a training run", dict.fromkeys(filter(None, run.stdout.splitlines()), 1))
