"""A model whose parameters are on the tiers can be read, saved, loaded and changed, and training does not notice."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter
from functools import partial

import pytest
import torch
from learner import PLACES, gpt2, inside, learner, same_tensors, values
from tiered import loss_of, options, step, tokens, two_groups
from zoo import small

import gs_compile
from gs_compile.errors import ReleasedParameterError, StepOrderError, UncapturedWarning
from gs_compile.model.engine import Engine
from gs_compile.model.residency import is_offloaded, residency_of
from gs_compile.runtime.codecs import CODECS
from gs_compile.runtime.tiers import Tiers

KEEPS_CAPTURES = True

make = partial(gs_compile.AdamW, lr=1e-3)


# Reading --------------------------------------------------------------------------------------------------------------


def test_reading_changes_nothing(tmp_path):
    """With all of it between steps, training goes on bit for bit, and is captured no more often."""
    changes = {"alpha": 0.5, "precision": "bf16", "separate_device": True}
    with learner(tmp_path, make, **changes) as one:
        one.train(0, 1, 2)
        wanted = one.values()
    with learner(tmp_path, make, **changes) as one:
        for number in range(3):
            one.train(number)
            with torch.no_grad():
                one.loss(7)
            torch._dynamo.utils.counters.clear()
            with gs_compile.materialize(one.model), torch.no_grad():
                one.loss(7)
            one.model.state_dict()
            one.optimizer.state_dict()
            assert not torch._dynamo.utils.counters["stats"]
        same_tensors(one.values(), wanted)


def test_training_and_evaluation_alternate(tmp_path):
    """What evaluation computes is plain PyTorch's, compiled and materialized."""
    reference = gpt2()
    optimizer = torch.optim.AdamW(two_groups(reference), lr=1e-3)
    with learner(tmp_path, make, alpha=0.5) as one:
        for number in range(3):
            step(reference, optimizer, tokens(number))
            one.train(number)
            one.model.eval()
            with torch.no_grad():
                wanted = loss_of(reference.eval(), tokens(7))
                torch.testing.assert_close(one.loss(7), wanted, rtol=1e-5, atol=0)
                with gs_compile.materialize(one.model):
                    torch.testing.assert_close(one.loss(7), wanted, rtol=1e-5, atol=0)
            one.model.train()
            reference.train()


@pytest.mark.parametrize("room_nbytes", [0, 1 << 30])
def test_streaming_reads_what_is_used(room_nbytes, tmp_path, monkeypatch):
    """Once for each use, and once for the block what there is room for; a step in between is not needed."""
    reads = Counter()
    read = Tiers.read
    monkeypatch.setattr(Tiers, "read", lambda self, place: (reads.update([place]), read(self, place))[1])
    monkeypatch.setattr(Engine, "room_nbytes", room_nbytes)
    with learner(tmp_path, make, alpha=0.5) as one:
        for number in range(2):
            one.train(number)
            with torch.no_grad():
                wanted = one.loss(7)
            reads.clear()
            with gs_compile.streaming(one.model), torch.no_grad():
                for _ in range(3):
                    torch.testing.assert_close(one.loss(7), wanted, rtol=1e-5, atol=0)
            number_of_uses = {3, 6} if room_nbytes == 0 else {1}  # the embedding is the head too
            assert set(reads.values()) == number_of_uses
            assert len(reads) == len(list(one.model.parameters()))
        with gs_compile.streaming(one.model), pytest.raises(StepOrderError, match="cannot be trained, only evaluated"):
            one.loss(7)


def test_what_is_written_inside_of_streaming_is_the_whole_master(tmp_path):
    """Where masters are split and in memory, a new upper half was there with the old lower one."""
    found = []
    for place in (0.0, 1.0):
        ratios = dict.fromkeys(("parameter", "optimizer", "checkpoint"), place)
        with learner(tmp_path, make, precision="bf16", masters="split", ratios=ratios) as one:
            one.train(0)
            with gs_compile.streaming(one.model), torch.no_grad():
                one.model.transformer.h[0].mix.weight.mul_(0.3)
            found.append(one.values())
    same_tensors(*found)


def test_a_state_dict_of_an_evaluation_is_a_copy_that_steps_do_not_change(tmp_path):
    """Where the evaluation reads parameters where they live, as `generate` does: a script keeps the best state so."""
    with learner(tmp_path, make, ratios=dict.fromkeys(("parameter", "optimizer", "checkpoint"), 1.0)) as one:
        one.train(0)
        with gs_compile.streaming(one.model), torch.no_grad():
            one.loss(7)
            weight = next(one.model.parameters())
            view, inside_it = weight.detach(), one.model.state_dict()
            assert view.tolist() == weight.tolist()
        behind_it = one.model.state_dict()
        wanted = {name: values.clone() for name, values in inside_it.items()}
        one.train(1)
        first = next(iter(wanted))
        assert not torch.equal(one.model.state_dict()[first], wanted[first])
        same_tensors(inside_it, wanted)
        same_tensors(behind_it, wanted)


def test_what_torch_compile_returns(tmp_path):
    """The other form: the compiled module is another one than the model."""
    torch._dynamo.reset()
    model = gpt2()
    optimizer = make(two_groups(model))
    compiled = torch.compile(model, backend="greedysnake", options=options(tmp_path))
    step(compiled, optimizer, tokens(0))
    wanted = model.state_dict()
    assert {name.removeprefix("_orig_mod."): None for name in compiled.state_dict()} == dict.fromkeys(wanted)
    with gs_compile.materialize(compiled):
        same_tensors(values(model), {name: wanted[name] for name, _ in model.named_parameters()})
        with torch.no_grad():
            inner = loss_of(compiled, tokens(1))
        with pytest.raises(StepOrderError, match="cannot be trained"):
            loss_of(compiled, tokens(1))
    with (
        gs_compile.materialize(model),
        torch.no_grad(),
        pytest.raises(StepOrderError, match="compiled model does not run"),
    ):
        loss_of(compiled, tokens(1))
    with torch.no_grad():
        torch.testing.assert_close(loss_of(compiled, tokens(1)), inner, rtol=1e-5, atol=0)
    step(compiled, optimizer, tokens(1))
    assert optimizer.num_steps == 2
    optimizer.engine.tiers.close()


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
        same_tensors(one.values(), wanted)


def test_blocks_nest_and_end_after_an_error(tmp_path):
    with learner(tmp_path, make) as one:
        one.train(0)
        with gs_compile.materialize(one.model):
            inside(one)
            assert not any(is_offloaded(parameter) for parameter in one.model.parameters())
            with pytest.raises(StepOrderError, match="cannot be trained, only evaluated"):
                one.loss(1)
            one.optimizer.step()

        def fail():
            with gs_compile.materialize(one.model, write=True):
                one.model.lm_head.weight.data.zero_()
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert all(is_offloaded(parameter) for parameter in one.model.parameters())
        assert one.model.state_dict()["lm_head.weight"].abs().sum() > 0
        one.train(1)
        assert one.optimizer.num_steps == 2


# Writing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", PLACES)
def test_changes_are_written_where_they_are_wanted(changes, tmp_path):
    with learner(tmp_path, make, **changes) as one:
        one.train(0)
        before = one.values()
        with gs_compile.materialize(one.model), torch.no_grad():
            one.model.transformer.wpe.weight.zero_()
        same_tensors(one.values(), before)
        with gs_compile.materialize(one.model, write=True), torch.no_grad():
            one.model.transformer.wpe.weight[3].zero_()
        wanted = dict(before)
        for name in {"transformer.wpe.weight", "transformer.wpe.weight.master"} & before.keys():
            wanted[name] = before[name].clone()
            wanted[name][3] = 0
        same_tensors(one.values(), wanted)  # also masters that were not changed
        loss = one.loss(1)
        with gs_compile.materialize(one.model, write=True):
            pass
        with pytest.raises(StepOrderError, match="dropped when"):
            loss.backward()
        one.train(1)


def test_a_block_in_another_stores_what_it_writes(tmp_path):
    """The outer one dropped it without a word."""
    with learner(tmp_path, make) as one:
        one.train(0)
        weight = one.model.transformer.wpe.weight
        with gs_compile.materialize(one.model):
            with gs_compile.materialize(one.model, write=True), torch.no_grad():
                weight.fill_(2)
            with torch.no_grad():
                weight.fill_(3)
        assert weight.unique().tolist() == [2]


@pytest.mark.parametrize("write", [True, False])
def test_a_parameter_of_another_shape_is_not_stored(tmp_path, write):
    """As of resize_token_embeddings: the first of its elements were, and later calls had two shapes of it."""
    with learner(tmp_path, make) as one:
        one.train(0)
        before = one.values()

        def resize():
            with gs_compile.materialize(one.model, write=write):
                one.model.lm_head.weight.data = torch.zeros(80, 32)

        if write:
            with pytest.raises(ReleasedParameterError, match=r"of shape \(70, 32\) was given shape \(80, 32\)"):
                resize()
        else:
            resize()
        assert one.model.lm_head.weight.shape == (70, 32)
        same_tensors(one.values(), before)
        one.train(1)


def test_masters_are_written_as_they_are(tmp_path):
    with learner(tmp_path, make, precision="bf16") as one:
        one.train(0)
        with gs_compile.materialize(one.model, write=True, master=True), torch.no_grad():
            one.model.transformer.wpe.weight.fill_(1 / 3)
        assert one.values()["transformer.wpe.weight"].unique().tolist() == [torch.tensor(1 / 3).item()]
        assert one.model.state_dict()["transformer.wpe.weight"].dtype == torch.bfloat16
        one.train(1)


# Copies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_copy_has_values_only_if_it_is_made_inside(copies, tmp_path):
    with learner(tmp_path, make) as one:
        one.train(0)
        with pytest.raises(ReleasedParameterError, match="cannot be copied or pickled"):
            copies(one.model)
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
            assert loss_of(model, tokens(0)).isfinite()
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


@pytest.mark.parametrize("codec", ["", "nf4"])
def test_a_copy_of_a_model_on_storage_that_has_not_run(codec, tmp_path):
    """As PEFT makes of modules that are trained beside adapters: tied as the model is, and apart from it."""
    model = gs_compile.init_on_storage(gpt2, storage=tmp_path)
    weight = model.transformer.h[0].mix.weight
    if codec:
        place = residency_of(weight)
        place.stash, place.codec = CODECS[codec].encode(weight.detach().clone()), codec
    wanted = values(model)
    copied = copy.deepcopy(model)
    assert all(is_offloaded(parameter) for parameter in copied.parameters())
    assert copied.lm_head.weight is copied.transformer.wte.weight
    same_tensors(values(copied), wanted)
    with torch.no_grad():
        copied.transformer.h[0].mix.weight.fill_(2.0)
    assert (copied.transformer.h[0].mix.weight == 2).all()  # what is encoded would be rounded, with a warning
    same_tensors(values(model), wanted)


@pytest.mark.parametrize(("name", "tiered"), [pytest.param("gpt2", False, marks=pytest.mark.slow), ("qwen3", True)])
def test_generate_of_a_compiled_model_runs_as_written(name, tiered, tmp_path, monkeypatch):
    """A call with a cache is no step in layers. Also outside of `streaming` it keeps what there is room for."""
    torch._dynamo.reset()
    reads, read = Counter(), Tiers.read
    monkeypatch.setattr(Tiers, "read", lambda tiers, span, **given: reads.update([span]) or read(tiers, span, **given))
    model, reference = small(name), small(name)
    optimizer = (gs_compile if tiered else torch.optim).AdamW(model.parameters())
    model.compile(backend="greedysnake", options=options(tmp_path))
    ids = tokens(0)
    before = step(model, optimizer, ids)
    reference.load_state_dict(model.state_dict())
    expected = reference.generate(ids[:, :3], max_new_tokens=2, do_sample=False)
    reads.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = model.generate(ids[:, :3], max_new_tokens=2, do_sample=False)
    words = [each.message.message for each in told if each.category is UncapturedWarning]  # in two captures
    assert ["their own input" in each for each in words] == [True] * tiered
    assert torch.equal(found, expected)
    assert set(reads.values()) == ({1} if tiered else set())
    with gs_compile.streaming(model):
        assert torch.equal(model.generate(ids[:, :3], max_new_tokens=2, do_sample=False), expected)
    assert step(model, optimizer, ids) < before
    if tiered:
        assert optimizer.engine.reader is None
        reference.load_state_dict(model.state_dict())
        expected = reference.generate(ids[:, :3], max_new_tokens=2, do_sample=False)
        assert torch.equal(model.generate(ids[:, :3], max_new_tokens=2, do_sample=False), expected)
        optimizer.engine.tiers.close()
