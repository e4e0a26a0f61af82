"""On a CUDA device: streams, events, pinned memory and the allocator of a real one. tests/device has the rest without."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path

import pytest
import test_same_bits as table
import torch
from frozen_models import gpt2_with_frozen
from tiered import (
    Harness,
    adamw,
    gpt2,
    options,
    outcome,
    step,
    tokens,
    two_groups,
    used_between_steps,
)
from zoo import small

import gs_compile
from gs_compile.errors import MemoryBudgetError

sys.path.append(str(Path(__file__).parent.parent / "hf"))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
KEEPS_CAPTURES = True
WHERE = "cuda:0"
BESIDE = 64 << 20  # cuBLAS has a workspace, and the allocator takes 20 MiB at a time
EVERY = 2  # of the table's rows
MIXED = {"alpha": 0.3, "ratios": {"parameter": 0.3, "checkpoint": 0.5, "optimizer": 0.5}}
IN_MEMORY = {"alpha": 0.0, "ratios": {"parameter": 1.0, "checkpoint": 1.0, "optimizer": 1.0}}
ROWS = [row for row in table.ROWS if row["separate_device"]]


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@cache
def harness_on(where, precision, dropout):
    is_mixed = precision == "mixed"
    norms = torch.float32 if is_mixed else None
    return Harness(lambda: gpt2(dropout=dropout, norms=norms).to(where), "model" if is_mixed else precision)


@cache
def expected(task, folder):
    """All in host memory."""
    Harness.forget_captures()  # of one model Dynamo has eight at most
    first = {axis: several[0] for axis, several in table.PLACE.items()}
    return table.train(task, first, folder).outcome


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("expected")


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("row", ROWS[::EVERY], ids=table.named)
def test_a_row_learns_the_same_bits_wherever_data_lives(row, folder, tmp_path, monkeypatch):
    task = table.task_of(row)
    if task.schedule == "single":
        pytest.skip("cuts blocks, so it captures another model")
    monkeypatch.setattr(table, "harness_of", lambda _: harness_on(WHERE, task.precision, table.DROPOUT[task.precision]))
    found = table.train(task, {**row, "separate_device": False}, tmp_path).outcome
    assert found.differences(expected(task, folder)) == []


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # fp32 is what is tested
def test_it_learns_what_plain_pytorch_does(tmp_path):
    """transformers' GPT-2 in fp32, with the attention that torch takes on this device. The same kernels, on smaller batches."""
    ids = [tokens(number, 6).to(WHERE) for number in range(4)]
    losses, values = {}, {}
    for kind in ("plain", "eager", "inductor"):
        torch._dynamo.reset()
        model = small("gpt2").to(WHERE)
        if kind == "plain":
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        else:
            optimizer = gs_compile.AdamW(model.parameters(), lr=1e-3)
            model.compile(backend="greedysnake", options=options(tmp_path / kind, **MIXED, compiler=kind))
        losses[kind] = [step(model, optimizer, each) for each in ids]
        values[kind] = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        if kind != "plain":
            optimizer.engine.tiers.close()
    for kind in ("eager", "inductor"):
        assert losses[kind] == pytest.approx(losses["plain"], rel=1e-5)
        far = max(float((value - values["plain"][name]).abs().max()) for name, value in values[kind].items())
        assert far < 1e-3, "an update of AdamW is at most its learning rate, whatever the gradient's rounding"


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # fp32 is what is tested
@pytest.mark.usefixtures("deterministic")
def test_compiled_layers_learn_the_same_bits_wherever_data_lives(tmp_path):
    found = []
    for name, place in (("memory", IN_MEMORY), ("mixed", MIXED), ("ssd", {"alpha": 1.0})):
        torch._dynamo.reset()
        model = gpt2(dropout=0.1).to(WHERE)
        optimizer = adamw(two_groups(model))
        model.compile(backend="greedysnake", options=options(tmp_path / name, **place, compiler="inductor"))
        torch.manual_seed(1)
        losses = [step(model, optimizer, tokens(number)) for number in range(3)]
        found.append(outcome(model, optimizer, losses, []))
        optimizer.engine.tiers.close()
    first, *others = found
    assert [other.differences(first) for other in others] == [[], []]


@pytest.mark.usefixtures("deterministic")
def test_units_in_pieces(tmp_path):
    given = {"piece_tokens": 5, "layer_tokens": 7}
    harness = Harness(lambda: gpt2(width=16).to(WHERE))
    expected = harness.train(adamw, options(tmp_path / "memory", **IN_MEMORY, **given), 3)
    found = harness.train(adamw, options(tmp_path / "mixed", **MIXED, **given), 3)
    assert found.differences(expected) == []


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("codec", ["nf4", "int8", "fp8", "mxfp4"])
def test_frozen_matrices_are_decoded_there(tmp_path, codec):
    """As the decoded values themselves are learned with."""
    found = Harness(lambda: gpt2_with_frozen(width=64).to(WHERE)).train(
        adamw, options(tmp_path / "encoded", frozen=codec, **MIXED), 3
    )
    wanted = Harness(lambda: gpt2_with_frozen(codec, width=64).to(WHERE)).train(
        adamw, options(tmp_path / "decoded", **IN_MEMORY), 3
    )
    assert found.differences(wanted) == []


@pytest.mark.usefixtures("deterministic")
def test_evaluation_generation_and_state_dicts(tmp_path):
    """Of transformers' own GPT-2, beside the same with everything in memory."""
    losses, values, written = used_between_steps(small("gpt2").to(WHERE), options(tmp_path / "memory", **IN_MEMORY))
    found_losses, found, found_written = used_between_steps(
        small("gpt2").to(WHERE), options(tmp_path / "mixed", **MIXED)
    )
    assert found_losses == losses
    assert [name for name in values if not torch.equal(values[name], found[name])] == []
    assert torch.equal(written, found_written)


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # in PEFT
@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")
def test_a_trainer_with_an_adapter(tmp_path):
    """transformers' Trainer with PEFT's LoRA, beside the same as it comes."""
    from learner import distance, values
    from test_adapters import adapted, trained
    from test_trainer import EAGER, curve

    theirs = trained(adapted(), tmp_path / "theirs", use_cpu=False)
    mine = trained(adapted(), tmp_path / "mine", use_cpu=False, expert=EAGER)
    assert {each.device for each in mine.model.parameters()} == {torch.device(WHERE)}
    for key in ("loss", "grad_norm"):
        assert curve(mine, key) == pytest.approx(curve(theirs, key), rel=1e-5), key
    mine_learned, their = ({name: each.cpu() for name, each in values(of.model).items()} for of in (mine, theirs))
    assert distance(mine_learned, their) < 1e-5


# Memory -------------------------------------------------------------------------------------------------------------


def test_what_is_reserved_is_planned(tmp_path):
    """Values and what code computes with."""
    torch._dynamo.reset()
    model = gpt2(num_layers=8, width=1024).to(WHERE)
    optimizer = adamw(two_groups(model))
    model.compile(backend="greedysnake", options=options(tmp_path, host_memory="4GiB", **MIXED))
    for number in range(2):
        step(model, optimizer, tokens(number))
    torch.accelerator.synchronize()
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(0)
    for number in range(2, 5):
        step(model, optimizer, tokens(number))
    engine, stats = optimizer.engine, torch.accelerator.memory_stats(0)
    planned = dict(engine.snapshots[-1].peaks)["device"] + engine.planning.planner.figures.workload.workspace_nbytes
    optimizer.engine.tiers.close()
    assert stats["num_alloc_retries"] == stats["num_ooms"] == 0
    assert stats["allocated_bytes.all.peak"] <= planned + BESIDE
    assert stats["reserved_bytes.all.peak"] <= planned + 2 * BESIDE


def test_without_memory_it_says_what_to_give(tmp_path):
    torch._dynamo.reset()
    model, batch_size = gpt2(num_layers=2, width=256).to(WHERE), 512
    optimizer = adamw(two_groups(model))
    model.compile(backend="greedysnake", options={**options(tmp_path, **MIXED), "micro_batch_size": batch_size})
    step(model, optimizer, tokens(0, batch_size))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(0) + (4 << 20)) / whole, 0)
        with pytest.raises(MemoryBudgetError, match=r"has no memory left in .*micro_batch_size; or device_memory"):
            step(model, optimizer, tokens(1, batch_size))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


@pytest.mark.usefixtures("deterministic")
def test_a_model_built_on_storage_learns_the_same(tmp_path):
    build, found = partial(gpt2, num_layers=6), []
    for kind in ("built", "on storage"):
        torch._dynamo.reset()
        if kind == "built":
            model = build().to(WHERE)
        else:
            model = gs_compile.init_on_storage(build, storage=tmp_path / "values", device=WHERE)
        optimizer = adamw(two_groups(model))
        model.compile(backend="greedysnake", options=options(tmp_path / kind, **MIXED))
        losses = [step(model, optimizer, tokens(number, 3)) for number in range(3)]
        found.append(outcome(model, optimizer, losses, []))
        optimizer.engine.tiers.close()
    assert found[1].differences(found[0]) == []


# Ends ---------------------------------------------------------------------------------------------------------------

ENDS = {  # 1: Python forgets that Ctrl-C has ended it where a library runs code at exit
    signal.SIGTERM: {143},
    signal.SIGINT: {-signal.SIGINT, 1},
    signal.SIGKILL: {-signal.SIGKILL},
}
ENDED = """
import sys, threading, torch
sys.path += {paths!r}
from tiered import adamw, gpt2, loss_of, options, step, tokens, two_groups, used_between_steps
from gs_compile.runtime.issue import TieredExecutor

model = gpt2(num_layers=4).to("cuda:0")
optimizer = adamw(two_groups(model))
model.compile(backend="greedysnake", options=options({storage!r}, alpha=0.0, durability="step", resume="auto"))
for number in range(2):
    step(model, optimizer, tokens(number))
optimizer.commit()
loss = loss_of(model, tokens(2))
compute = TieredExecutor._compute
def slowly(executor, op):
    torch.cuda._sleep(1 << 32)  # seconds, for each computation
    return compute(executor, op)
TieredExecutor._compute = slowly
threading.Timer(0.5, lambda: print("in the backward", flush=True)).start()
loss.backward()
torch.cuda.synchronize()
print("over", flush=True)
"""


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_inside_a_backward_is_answered_and_the_run_goes_on(tmp_path, number):
    tests = Path(__file__).parent.parent
    code = ENDED.format(paths=[str(tests), str(tests.parent)], storage=str(tmp_path / "run"))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        try:
            assert process.stdout.readline() == "in the backward\n", process.stderr.read()
            begin = time.monotonic()
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
            seconds = time.monotonic() - begin
        finally:
            process.kill()
    assert process.returncode in ENDS[number], errors
    assert number != signal.SIGINT or errors.rstrip().endswith("KeyboardInterrupt")
    assert seconds < 15, "a signal waits for what is launched, a few computations, and not for the backward"
    expected = Harness(lambda: gpt2(num_layers=4).to(WHERE)).train(adamw, options(tmp_path / "whole", alpha=0.0), 4)
    harness = Harness(lambda: gpt2(num_layers=4).to(WHERE))
    given = options(tmp_path / "run", alpha=0.0, durability="step", resume="auto")
    with harness.fresh(adamw, given) as optimizer:
        losses = [step(harness.model, optimizer, tokens(number)) for number in range(2, 4)]
        found = outcome(harness.model, optimizer, expected.losses, expected.norms)
    assert losses == expected.losses[2:]
    assert found.differences(expected) == []
