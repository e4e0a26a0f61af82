"""State dicts of several ranks: DTensors, saved on some ranks and loaded on as many others."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
import transformers
from launch import Fleet
from learner import same_tensors
from rank_learner import compiled, learner
from safetensors.torch import load_file, save_file
from tiered import gpt2, shared, tokens
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only
from zoo import small

import gs_compile
from gs_compile.errors import RankError
from gs_compile.hf import fitting
from gs_compile.model import files
from gs_compile.model.engine import Engine
from gs_compile.model.files import whole
from gs_compile.model.materialize import on_first_rank

KEEPS_CAPTURES = True  # each process captures its own


def saves(info, tmp_path, precision, goes_on):
    with learner(info, tmp_path, shared(precision)) as one:
        one.train(0, 1)
        model, optimizer = get_state_dict(one.model, one.optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "2")
        found = {"saved": one.values()}
        if goes_on:
            one.train(2)
            found["trained"] = one.values()
        return found


def loads(info, tmp_path, precision, source, goes_on, target=None):
    """On ranks that then train, or store all once more."""
    folder = tmp_path / f"on{info.number}"
    folder.mkdir(exist_ok=True)
    with learner(info, folder, shared(precision), seed=1 + info.rank) as one:
        one.call() if target else one.train(7)
        model, optimizer = get_state_dict(one.model, one.optimizer)
        checkpoint.load(state := {"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / source)
        set_state_dict(one.model, one.optimizer, model_state_dict=model, optim_state_dict=state["optimizer"])
        found = {"loaded": one.values()}
        if target:
            model, optimizer = get_state_dict(one.model, one.optimizer)
            checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / target)
        if goes_on:
            one.train(2)
            found["trained"] = one.values()
        return found


@pytest.mark.parametrize(
    ("precision", "numbers", "back"),
    [
        ("bf16", (3,), False),
        *(
            pytest.param(*each, True, marks=pytest.mark.slow)
            for each in (("bf16", (3,)), ("bf16", (1,)), ("model", (1, 4)))
        ),
    ],
)
def test_from_two_ranks_to_others_and_back(precision, numbers, back, pair, tmp_path):
    saved, other = pair.run(saves, tmp_path, precision=precision, goes_on=back)
    for name, values in saved.items():
        same_tensors(other[name], values)
    for number in numbers:
        given = {"precision": precision, "source": "2", "goes_on": False, "target": f"{number}" if back else None}
        with Fleet(number) as fleet:
            for each in fleet.run(loads, tmp_path, **given):
                same_tensors(each["loaded"], saved["saved"])
    given = {"precision": precision, "source": f"{number}", "goes_on": True}
    for each in pair.run(loads, tmp_path, **given) if back else ():
        same_tensors(each["loaded"], saved["saved"])
        same_tensors(each["trained"], saved["trained"])


def uses_alone(model, wanted, tmp_path):
    """What one rank makes of a state dict that all have taken is made of whole tensors."""
    wanted = {name: wanted[name] for name in model}
    ways = {
        "half": Tensor.half,
        "bfloat16": lambda value: value.to(torch.bfloat16),
        "clone": Tensor.clone,
        "array": lambda value: torch.from_numpy(value.cpu().numpy().copy()),
        "view": lambda value: value.detach()[1:],
        "sum": lambda value: torch.add(1, value).sum(),
    }
    for name, way in ways.items():
        torch.save({key: way(value) for key, value in model.items()}, tmp_path / name)
        same_tensors(torch.load(tmp_path / name), {key: way(value) for key, value in wanted.items()})
    save_file(model, tmp_path / "safe")
    same_tensors(load_file(tmp_path / "safe"), wanted)
    (plain := small("gpt2", seed=1)).load_state_dict(model)
    same_tensors(dict(plain.state_dict()), wanted)
    for name, value in model.items():
        assert torch.equal(value, wanted[name])
        assert value.to("cpu") is value
        for change in (value.zero_, value[:1].zero_, partial(value.__setitem__, 0, 0), partial(value.__imul__, 2)):
            with pytest.raises(RankError, match="all ranks share this value of a state dict"):
                change()
    with pytest.raises(RankError, match=r"pickle would have the rows of rank 0 of 2 of a value of shape .* alone"):
        torch.save(copy.deepcopy(model), tmp_path / "copy.pt")
    small_one = min(model.values(), key=Tensor.numel)
    small_one.to_local().add_(1)  # as a checkpoint is loaded
    with pytest.raises(RankError, match="pickle would have the rows of rank"):
        torch.save(small_one, tmp_path / "copy.pt")


def refuses_rows(model, tmp_path):
    """Nothing that is made of rows alone is saved."""
    value = max(model.values(), key=Tensor.numel)
    assert torch.equal((2 * value).full_tensor(), 2 * value.full_tensor())
    for use in (
        Tensor.numpy,
        lambda each: save_file({"": each}, tmp_path / "safe"),
        Tensor.share_memory_,
        pickle.dumps,
    ):
        for each in (value, value.half(), value.clone()):
            with pytest.raises(RankError, match=r"would have the rows of rank . of 2"):
                use(each)


def rows_of(value):
    return DTensor.from_local(
        value.to_local().clone(), value.device_mesh, value.placements, shape=value.shape, stride=value.stride()
    )


def reads(info, tmp_path):
    """Reads of many kinds, and what they give back is the same."""
    files.SMALL_NBYTES = 1 << 10  # so that not all are small
    one = compiled(info, tmp_path, partial(small, "gpt2"))
    one.train(0)
    wanted, optimizer = one.values(), one.optimizer.state_dict()
    model = one.model.state_dict()
    for value in [*model.values(), *optimizer["state"][0].values()][:-1]:
        if value.dim():
            assert value.placements == (Shard(0),)
            assert value.to_local().shape[0] <= -(-value.shape[0] // info.number)
    with pytest.raises(RankError, match="all_reduce: all ranks share this value of a state dict"):
        dist.all_reduce(max(model.values(), key=Tensor.numel))
    weight = one.model.transformer.h[1].attn.c_attn.weight
    assert weight.norm() == wanted["transformer.h.1.attn.c_attn.weight"].norm()
    assert torch.equal(weight.detach(), wanted["transformer.h.1.attn.c_attn.weight"])
    with torch.no_grad():  # as by hand
        dist.all_reduce(weight.data)
        weight.data /= info.number
    assert torch.equal(weight.detach(), wanted["transformer.h.1.attn.c_attn.weight"])
    plain = small("gpt2", seed=0).eval()
    plain.load_state_dict({name: wanted[name] for name in model})
    fitting._stream_generation(one.model)  # as `attach` and `prepare` do
    words, given = tokens(info.rank, 1)[:, :4], {"max_new_tokens": 3, "do_sample": False}
    for _ in range(2):
        written = plain.generate(words, **given)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Engine, "room_nbytes", 0)  # each forward reads all
            assert torch.equal(one.model.generate(words, **given), written)
        if info.rank:  # its text ends two tokens before that of the first rank
            given["eos_token_id"] = int(written[0, 4])
    assert len(written[0]) == (5 if info.rank else 7)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = (
        get_model_state_dict(one.model, options=full),
        get_optimizer_state_dict(one.model, one.optimizer, options=full),
    )
    if info.rank:
        assert not found[0]
    else:
        same_tensors(found[0], {name: wanted[name] for name in found[0]})
    if not info.rank:
        torch.save(model, tmp_path / "model.pt")
        torch.save(optimizer, tmp_path / "optimizer.pt")
        uses_alone(model, wanted, tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(files, "_in_one_file", lambda *_: (None, None))
        refuses_rows(one.model.state_dict(), tmp_path)
    rows = [tree_map_only(DTensor, rows_of, each) for each in (model, optimizer)]  # which are torch's own
    torch.save(rows, tmp_path / f"rows{info.rank}.pt")
    gs_compile.save_pretrained(one.model, tmp_path / "saved", max_shard_size="50KB")
    one.model.save_pretrained(tmp_path / "plainly", max_shard_size="50KB")
    if info.rank:
        words = (
            "a file has the rows of rank 0 of 2 of a value of shape .*, and this is rank 1 of 2: each rank loads the"
        )
        with pytest.raises(RuntimeError, match=words):
            one.model.load_state_dict(torch.load(tmp_path / "rows0.pt")[0])
        with pytest.raises(RankError, match=words):
            one.optimizer.load_state_dict(torch.load(tmp_path / "rows0.pt")[1])
    again = gs_compile.from_pretrained(transformers.GPT2LMHeadModel, tmp_path / "saved", storage=tmp_path)
    same_tensors(
        {name: whole(value) for name, value in again.state_dict().items()}, {name: wanted[name] for name in model}
    )
    one.train(1)
    trained = one.values()
    for again in (False, True):
        if again:  # rank 0 has it all
            everything = dataclasses.replace(full, broadcast_from_rank0=True)
            set_model_state_dict(one.model, found[0], options=everything)
            set_optimizer_state_dict(one.model, one.optimizer, found[1], options=everything)
        else:  # the first has saved it alone
            one.model.load_state_dict(torch.load(tmp_path / "model.pt"))
            one.optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
        same_tensors(one.values(), wanted)
        one.train(1)
        same_tensors(one.values(), trained)
    with on_first_rank(one.model) as is_first:
        if is_first:
            same_tensors(one.model.state_dict(), {name: trained[name] for name in model})
            assert torch.equal(one.optimizer.state_dict()["state"][0]["exp_avg"], trained["0.exp_avg"])
    block = one.model.transformer.h[0]
    with pytest.raises(RankError, match=r"different things \(rank 0: reading a parameter of unit 0 at .* rank 1: rea"):
        (block.ln_2 if info.rank else block.ln_1).weight.norm()  # as large, in the same unit, and of the same rank
    return {name: wanted[name] for name in model}


def test_reads_and_writes_of_all_kinds(pair, tmp_path):
    wanted, _ = pair.run(reads, tmp_path)
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 2
    same_tensors(dict(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved").state_dict()), wanted)
    same_tensors(torch.load(tmp_path / "model.pt"), wanted)
    saved, plainly = (
        {path.name: path.read_bytes() for path in (tmp_path / each).iterdir()} for each in ("saved", "plainly")
    )
    assert saved == plainly


def reads_alone(info, tmp_path):
    one = compiled(info, tmp_path, gpt2)
    one.call()
    if info.rank == 1:
        raise SystemExit
    one.model.lm_head.weight.norm()


@pytest.mark.slow
def test_a_read_of_one_rank_alone(tmp_path):
    with Fleet(2) as fleet:
        first, _ = fleet.outcomes(reads_alone, tmp_path, 60)
    assert "reading a parameter of unit" in first.failure
    assert "rank 0 waits for rank 1, whose script has ended" in first.failure
