"""A model whose parameters are on the tiers can be read, saved, loaded and changed, and training does not notice."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from learner import assert_same, distance, learner, plain
from tiered import gpt2, options, step, tokens, two_groups
from torch import nn
from transformers import GPT2LMHeadModel

import gs_compile
from gs_compile.errors import OptimizerError, ReleasedParameterError, StepOrderError
from gs_compile.placeholders import is_released

PLACES = [
    pytest.param({"alpha": 0.0}, id="early"),
    pytest.param({"alpha": 0.5}, id="half"),
    pytest.param({"alpha": 1.0, "separate_device": True}, id="late"),
    pytest.param({"alpha": 0.5, "precision": "bf16", "separate_device": True}, id="bf16"),
]


def values(model):
    """What the parameters hold now, copied."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def inside(learner, **given):
    with gs_compile.materialize(learner.model, **given):
        return values(learner.model)


def same_tensors(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def trained():
    """Plain PyTorch after two steps."""
    return plain(2, lr=1e-3)[2]


make = partial(gs_compile.AdamW, lr=1e-3)


# Reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", PLACES)
def test_parameters_hold_their_values(changes, trained, tmp_path):
    with learner(tmp_path, make, **changes) as one:
        one.train(0, 1)
        engine = one.optimizer.engine
        found = inside(one)
        same_tensors(found, {name: engine.read(p) for name, p in one.model.named_parameters()})
        masters = inside(one, master=True)
        assert all(value.dtype == torch.float32 for value in masters.values())
        tolerance = 1e-6 if engine.options.precision == "model" else 1e-2
        assert distance(masters, values(trained)) < tolerance
        assert all(is_released(parameter) for parameter in one.model.parameters())
        assert one.model.transformer.wte.weight is one.model.lm_head.weight


@pytest.mark.parametrize("changes", PLACES)
def test_reading_changes_nothing(changes, tmp_path):
    """With all of it between steps, training goes on bit for bit, and is captured no more often."""
    with learner(tmp_path, make, **changes) as one:
        one.train(0, 1, 2)
        wanted = one.values()
    with learner(tmp_path, make, **changes) as one:
        for number in range(3):
            one.train(number)
            torch._dynamo.utils.counters.clear()
            with gs_compile.materialize(one.model), torch.no_grad():
                one.loss(7)
                one.model.generate(tokens(0)[:, :3], attention_mask=torch.ones(5, 3), max_new_tokens=2, pad_token_id=0)
            one.model.state_dict()
            one.optimizer.state_dict()
            assert not torch._dynamo.utils.counters["stats"]
        assert_same(one.values(), wanted)


def test_it_computes_what_the_compiled_model_does(tmp_path):
    with learner(tmp_path, make) as one:
        one.train(0)
        one.model.eval()
        with torch.no_grad():
            compiled = one.loss(1)
            with gs_compile.materialize(one.model) as model:
                eager = model(input_ids=tokens(1), labels=tokens(1)).loss
        torch.testing.assert_close(eager, compiled, rtol=1e-6, atol=0)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_training_and_evaluation_alternate(alpha, tmp_path):
    reference = gpt2()
    optimizer = torch.optim.AdamW(two_groups(reference), lr=1e-3)
    with learner(tmp_path, make, alpha=alpha) as one:
        for number in range(3):
            step(reference, optimizer, tokens(number))
            one.train(number)
            one.model.eval()
            with torch.no_grad():
                found, wanted = one.loss(7), reference.eval()(input_ids=tokens(7), labels=tokens(7)).loss
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
            one.model.train()
            reference.train()
        found = one.values()
    with learner(tmp_path, make, alpha=alpha) as one:
        one.train(0, 1, 2)
        assert_same(one.values(), found)


def test_training_inside_is_refused(tmp_path):
    with learner(tmp_path, make) as one:
        one.train(0)
        with gs_compile.materialize(one.model):
            with pytest.raises(StepOrderError, match="cannot be trained, only evaluated"):
                one.loss(1)
            one.optimizer.step()
        one.train(1)
        assert one.optimizer.num_steps == 2


def test_what_torch_compile_returns(tmp_path):
    """The other form: the compiled module is another one than the model."""
    model = gpt2()
    optimizer = make(two_groups(model))
    compiled = torch.compile(model, backend="greedysnake", options=options(tmp_path))
    step(compiled, optimizer, tokens(0))
    wanted = model.state_dict()
    assert {name.removeprefix("_orig_mod."): None for name in compiled.state_dict()} == dict.fromkeys(wanted)
    with gs_compile.materialize(compiled):
        same_tensors(values(model), {name: wanted[name] for name, _ in model.named_parameters()})
        with torch.no_grad():
            inner = compiled(input_ids=tokens(1), labels=tokens(1)).loss
        with pytest.raises(StepOrderError, match="cannot be trained"):
            compiled(input_ids=tokens(1), labels=tokens(1))
    with (
        gs_compile.materialize(model),
        torch.no_grad(),
        pytest.raises(StepOrderError, match="compiled model does not run"),
    ):
        compiled(input_ids=tokens(1), labels=tokens(1))
    with torch.no_grad():
        torch.testing.assert_close(compiled(input_ids=tokens(1), labels=tokens(1)).loss, inner, rtol=1e-5, atol=0)
    step(compiled, optimizer, tokens(1))
    assert optimizer.num_steps == 2
    optimizer.engine.tiers.close()


def test_between_backward_and_step_it_is_too_early(tmp_path):
    with learner(tmp_path, make) as one:
        one.loss(0).backward()
        with pytest.raises(StepOrderError, match=r"optimizer.step\(\) has not"), gs_compile.materialize(one.model):
            pass
        assert all(is_released(parameter) for parameter in one.model.parameters())
        one.optimizer.step()
        one.train(1)


def test_a_loss_outlives_a_reading(tmp_path):
    with learner(tmp_path, make, alpha=0.5) as one:
        one.train(0, 1)
        wanted = one.values()
    with learner(tmp_path, make, alpha=0.5) as one:
        one.train(0)
        loss = one.loss(1)
        inside(one)
        loss.backward()
        one.optimizer.step()
        assert_same(one.values(), wanted)


def test_blocks_nest_and_end_after_an_error(tmp_path):
    with learner(tmp_path, make) as one:
        one.train(0)
        with gs_compile.materialize(one.model):
            inside(one)
            assert not any(is_released(parameter) for parameter in one.model.parameters())

        def fail():
            with gs_compile.materialize(one.model, write=True):
                one.model.lm_head.weight.data.zero_()
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert all(is_released(parameter) for parameter in one.model.parameters())
        assert one.model.state_dict()["lm_head.weight"].abs().sum() > 0


def test_a_model_in_memory_is_left_alone():
    model = gpt2()
    before = values(model)
    with gs_compile.materialize(model, write=True) as same:
        assert same is model
        model(input_ids=tokens(0), labels=tokens(0)).loss.backward()
    same_tensors(values(model), before)


# Writing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", PLACES)
def test_changes_are_written_where_they_are_wanted(changes, tmp_path):
    with learner(tmp_path, make, **changes) as one:
        one.train(0)
        before = one.values()
        with gs_compile.materialize(one.model), torch.no_grad():
            one.model.transformer.wpe.weight.zero_()
        assert_same(one.values(), before)
        with gs_compile.materialize(one.model, write=True), torch.no_grad():
            one.model.transformer.wpe.weight[3].zero_()
        wanted = dict(before)
        wanted["transformer.wpe.weight"] = before["transformer.wpe.weight"].clone()
        wanted["transformer.wpe.weight"][3] = 0
        assert_same(one.values(), wanted)  # also masters that were not changed
        one.train(1)


def test_masters_are_written_as_they_are(tmp_path):
    with learner(tmp_path, make, precision="bf16") as one:
        one.train(0)
        with gs_compile.materialize(one.model, write=True, master=True), torch.no_grad():
            one.model.transformer.wpe.weight.fill_(1 / 3)
        assert one.values()["transformer.wpe.weight"].unique().tolist() == [torch.tensor(1 / 3).item()]
        assert one.model.state_dict()["transformer.wpe.weight"].dtype == torch.bfloat16
        one.train(1)


def test_a_change_gives_up_the_loss_before(tmp_path):
    with learner(tmp_path, make) as one:
        one.train(0)
        loss = one.loss(1)
        with gs_compile.materialize(one.model, write=True):
            pass
        with pytest.raises(RuntimeError):
            loss.backward()
        one.train(1)


def test_values_given_past_it_are_refused(tmp_path):
    with learner(tmp_path, make) as one:
        one.train(0)
        one.model.transformer.wpe.weight.data = torch.zeros(8, 32)
        with pytest.raises(OptimizerError, match=r"lives on the tiers, but was given other values"):
            one.loss(1)


# State dicts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", PLACES)
def test_a_state_dict_has_the_values(changes, tmp_path):
    with learner(tmp_path, make, **changes) as one:
        keys = list(one.model.state_dict())
        one.train(0, 1)
        wanted, found = inside(one), one.model.state_dict()
        assert list(found) == keys
        same_tensors({name: found[name] for name in wanted}, wanted)
        assert found["lm_head.weight"].data_ptr() == found["transformer.wte.weight"].data_ptr()
        same_tensors(
            one.model.transformer.h[1].state_dict(),
            {
                name.removeprefix("transformer.h.1."): value
                for name, value in found.items()
                if name.startswith("transformer.h.1.")
            },
        )


def test_a_state_dict_is_the_callers(tmp_path):
    with learner(tmp_path, make) as one:
        one.train(0)
        found = one.model.state_dict()
        before = found["lm_head.weight"].clone()
        found["lm_head.weight"].zero_()
        assert torch.equal(one.model.state_dict()["lm_head.weight"], before)
        found = one.model.state_dict()
        one.train(1)
        assert torch.equal(found["lm_head.weight"], before)
        assert not torch.equal(one.model.state_dict()["lm_head.weight"], before)


def test_a_model_that_holds_the_model(tmp_path):
    class Holder(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.inner = model

    with learner(tmp_path, make) as one:
        holder = Holder(one.model)
        one.train(0)
        assert torch.equal(holder.state_dict()["inner.lm_head.weight"], one.model.state_dict()["lm_head.weight"])


@pytest.mark.parametrize("changes", PLACES)
def test_loading_writes_through(changes, trained, tmp_path):
    with learner(tmp_path, make, **changes) as one:
        one.train(7)
        result = one.model.load_state_dict(trained.state_dict())
        assert not result.missing_keys
        assert not result.unexpected_keys
        same_tensors(inside(one, master=True), values(trained))
        assert all(is_released(parameter) for parameter in one.model.parameters())
        one.train(2)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_what_does_not_fit_is_torchs_error(assign, trained, tmp_path):
    with learner(tmp_path, make) as one:
        one.train(0)
        before, state = inside(one), dict(trained.state_dict())
        state["transformer.wpe.weight"] = torch.zeros(3, 32)
        with pytest.raises(RuntimeError, match=r"size mismatch for transformer.wpe.weight"):
            one.model.load_state_dict(state, assign=assign)
        found = inside(one)
        assert torch.equal(found["transformer.wpe.weight"], before["transformer.wpe.weight"])


def test_save_and_load_as_pretrained(tmp_path):
    with learner(tmp_path / "storage", make, alpha=0.5) as one:
        one.train(0, 1)
        one.model.save_pretrained(tmp_path / "saved")
        again = GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
        same_tensors(values(again), inside(one))
        assert again.lm_head.weight is again.transformer.wte.weight
        one.train(2)


def test_torch_save(tmp_path):
    with learner(tmp_path, make) as one:
        one.train(0)
        file = io.BytesIO()
        torch.save({"model": one.model.state_dict(), "optimizer": one.optimizer.state_dict()}, file)
        file.seek(0)
        found = torch.load(file)
        same_tensors(found["model"], one.model.state_dict())
        assert found["model"]["lm_head.weight"].data_ptr() == found["model"]["transformer.wte.weight"].data_ptr()
        assert found["optimizer"]["state"].keys() == one.optimizer.state_dict()["state"].keys()


# Copies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_copy_would_have_no_values(copies, tmp_path):
    with learner(tmp_path, make) as one:
        one.train(0)
        with pytest.raises(ReleasedParameterError, match="cannot be copied or pickled"):
            copies(one.model)


def test_a_copy_made_inside_has_values(tmp_path):
    with learner(tmp_path, make) as one:
        one.train(0)
        with gs_compile.materialize(one.model):
            copied = copy.deepcopy(one.model)
        same_tensors(values(copied), inside(one))
        one.train(1)
        assert copied.state_dict()["lm_head.weight"].isfinite().all()


# Before the first call ------------------------------------------------------------------------------------------------


def test_a_model_on_storage_that_has_not_run(tmp_path):
    model = gs_compile.init_on_storage(gpt2, storage=tmp_path / "initial")
    wanted = values(gpt2())
    with gs_compile.materialize(model):
        same_tensors(values(model), wanted)
        with torch.no_grad():
            assert model(input_ids=tokens(0), labels=tokens(0)).loss.isfinite()
    found = model.state_dict()
    same_tensors({name: found[name] for name in wanted}, wanted)
    with gs_compile.materialize(model, write=True), torch.no_grad():
        model.transformer.wpe.weight.fill_(2.0)
    model.load_state_dict({"transformer.wte.weight": wanted["transformer.wte.weight"] + 1}, strict=False)
    wanted["transformer.wpe.weight"] = torch.full((8, 32), 2.0)
    wanted["transformer.wte.weight"] = wanted["transformer.wte.weight"] + 1
    with learner(tmp_path / "storage", make, build=lambda: model) as one:
        with torch.no_grad():
            one.loss(0)
        same_tensors(inside(one), wanted)
        one.train(0)


# Memory ---------------------------------------------------------------------------------------------------------------

MEASURE = """
import resource, sys
import torch
from torch import nn
import gs_compile
from gs_compile.backend import greedysnake

def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 1024)
        self.blocks = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(int(sys.argv[2]))))
    def forward(self, ids):
        return self.blocks(self.embedding(ids)).square().mean()

torch.set_num_threads(1)
model = gs_compile.init_on_storage(Model, storage=sys.argv[1])
optimizer = gs_compile.AdamW(model.parameters())
ratios = {"parameter": 0, "checkpoint": 0, "optimizer": 0}
options = {"storage": sys.argv[1], "host_memory": "100MiB", "expert": {"compiler": "eager", "ratios": ratios}}
model.compile(backend=greedysnake, options=options)
model(torch.arange(4).view(1, 4)).backward()
optimizer.step()
optimizer.synchronize()
torch.save(model.blocks[0].weight.detach()[:1].clone(), sys.argv[1] + "/small")

before = status("VmRSS")
found = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
made = status("VmRSS") - before

def limit():  # of memory that no file stands for
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + (64 << 20), resource.RLIM_INFINITY))

limit()
torch.save(found, sys.argv[1] + "/saved")
del found
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
loaded = torch.load(sys.argv[1] + "/saved", mmap=True)  # a private mapping, which the limit counts as a whole
limit()
model.load_state_dict(loaded["model"])
optimizer.load_state_dict(loaded["optimizer"])
with gs_compile.materialize(model, write=True):
    model.blocks[0].weight.data.zero_()
print(made)
"""


@pytest.mark.parametrize("num_layers", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_memory_holds_a_piece_of_what_is_saved_and_loaded(num_layers, tmp_path):
    """192 MiB of values and states, or 768, within 64 MiB; what is in files is the kernel's to keep or drop."""
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(num_layers)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 64 << 20
    assert (tmp_path / "saved").stat().st_size > num_layers * 3 * (4 << 20)
