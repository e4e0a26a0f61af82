"""State dicts of a model on the tiers have its values, and give it others, within a piece of its size in memory."""

from __future__ import annotations

import inspect
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from learner import PLACES, distance, inside, learner, plain, same_tensors, values
from torch import nn
from transformers import GPT2LMHeadModel
from zoo import small

import gs_compile
from gs_compile.model import files
from gs_compile.model.residency import is_offloaded

KEEPS_CAPTURES = True


@pytest.fixture(scope="module")
def trained():
    """Plain PyTorch after two steps."""
    return plain(2, lr=1e-3)[2]


make = partial(gs_compile.AdamW, lr=1e-3)


def test_mapped_memory_is_given_back_where_python_leaves_assertions_out(tmp_path):
    calls = []
    names = {**vars(files), "_madvise": lambda *given: calls.append(given)}
    exec(compile(inspect.getsource(files.leave_memory), files.__file__, "exec", optimize=1), names)  # as python -O does
    names["leave_memory"](files.map_file(tmp_path, 4096))
    assert len(calls) == 1


# State dicts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", PLACES)
def test_a_state_dict_has_the_values(changes, trained, tmp_path):
    with learner(tmp_path, make, **changes) as one:
        keys = list(one.model.state_dict())
        one.train(0, 1)
        wanted, found = inside(one), one.model.state_dict()
        assert list(found) == keys
        masters = inside(one, master=True)
        assert {value.dtype for value in masters.values()} == {torch.float32}
        assert distance(masters, values(trained)) < (1e-2 if "precision" in changes else 1e-6)
        assert all(is_offloaded(parameter) for parameter in one.model.parameters())
        same_tensors({name: found[name] for name in wanted}, wanted)
        assert found["lm_head.weight"].data_ptr() == found["transformer.wte.weight"].data_ptr()
        part, prefix = one.model.transformer.h[1].state_dict(), "transformer.h.1."
        same_tensors(part, {name.removeprefix(prefix): found[name] for name in found if name.startswith(prefix)})
        holder = nn.ModuleDict({"inner": one.model})
        assert torch.equal(holder.state_dict()["inner.lm_head.weight"], found["lm_head.weight"])


def test_no_step_changes_a_state_dict(tmp_path):
    with learner(tmp_path, make) as one:
        one.train(0)
        found = one.model.state_dict()
        before = found["lm_head.weight"].clone()
        one.train(1)
        assert torch.equal(found["lm_head.weight"], before)
        assert not torch.equal(one.model.state_dict()["lm_head.weight"], before)


@pytest.mark.parametrize("changes", PLACES)
def test_loading_writes_through(changes, trained, tmp_path):
    with learner(tmp_path, make, **changes) as one:
        one.train(7)
        result = one.model.load_state_dict(trained.state_dict())
        assert not result.missing_keys
        assert not result.unexpected_keys
        same_tensors(inside(one, master=True), values(trained))
        assert all(is_offloaded(parameter) for parameter in one.model.parameters())
        one.train(2)


def test_save_and_load_as_pretrained(tmp_path):
    with learner(tmp_path / "storage", make, partial(small, "gpt2"), alpha=0.5) as one:
        one.train(0, 1)
        one.model.save_pretrained(tmp_path / "saved")
        again = GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
        same_tensors(values(again), inside(one))
        assert again.lm_head.weight is again.transformer.wte.weight
        one.train(2)


# Memory ---------------------------------------------------------------------------------------------------------------

MEASURE = """
import pathlib, resource, sys
import torch
from torch import nn
import gs_compile
from gs_compile.model import storage_init
from gs_compile.model.backend import greedysnake

def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 1024)
        self.blocks = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
        for layer in self.blocks:
            nn.init.trunc_normal_(layer.weight, std=0.02)
    def forward(self, ids):
        return self.blocks(self.embedding(ids)).square().mean()

torch.set_num_threads(1)
storage_init.CACHE_NBYTES = 8 << 20
with storage_init.NewTensorsInFiles(storage_init.directory(pathlib.Path(sys.argv[1]))):
    nn.init.trunc_normal_(nn.Linear(300, 300).weight)
nn.Sequential(nn.Linear(8, 8))(torch.ones(8)).sum().backward()
before = status("VmHWM")
model = gs_compile.init_on_storage(Model, storage=sys.argv[1])
built = status("VmHWM") - before
optimizer = gs_compile.AdamW(model.parameters())
ratios = {"parameter": 0, "checkpoint": 0, "optimizer": 0}
options = {"storage": sys.argv[1], "host_memory": "100MiB", "expert": {"compiler": "eager", "recompute": "all", "alpha": 0.0, "ratios": ratios}}
model.compile(backend=greedysnake, options=options)
model(torch.arange(4).view(1, 4)).backward()
optimizer.step()
optimizer.synchronize()
torch.save(model.blocks[0].weight.detach()[:1].clone(), sys.argv[1] + "/small")

def now():  # from which on the peak counts
    open("/proc/self/clear_refs", "w").write("5")
    return status("VmRSS")

before = now()
found = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
made = status("VmHWM") - before

def limit():  # of memory that no file stands for
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + (64 << 20), resource.RLIM_INFINITY))

limit()
torch.save(found, sys.argv[1] + "/saved")
del found
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
loaded = torch.load(sys.argv[1] + "/saved", mmap=True)  # a private mapping, which the limit counts as a whole
limit()
before = now()
model.load_state_dict(loaded["model"])
optimizer.load_state_dict(loaded["optimizer"])
taken = status("VmHWM") - before
with gs_compile.materialize(model, write=True):
    model.blocks[0].weight.data.zero_()
print(built, made, taken)
"""


def test_memory_holds_a_piece_of_what_is_built_saved_and_loaded(tmp_path):
    """A model of 32 MiB is built within its cache of 8 MiB and what one operation on a weight of 4 MiB needs.

    Its 96 MiB of values and states are read, and loaded, within two chunks, and saved within 64 MiB beside what is in
    files: that is the kernel's to keep.
    """
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built, made, taken = map(int, done.stdout.split()[-3:])
    assert built < (3 * 4 + 8) << 20
    assert max(made, taken) < 32 << 20  # two chunks
    assert (tmp_path / "saved").stat().st_size > 8 * 3 * (4 << 20)
