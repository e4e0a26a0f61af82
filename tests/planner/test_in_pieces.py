"""Layers run on some tokens at a time where the device has no room for whole ones, or better use for that memory."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import zoo
from planned import A100, gpt, problem

from gs_compile.errors import GreedySnakeError, NoFitError
from gs_compile.placement.placement import Decision
from gs_compile.planner import at_hand
from gs_compile.planner.builder import SCARCE_UPDATES
from gs_compile.planner.decide import decide
from gs_compile.planner.fit import does_fit
from gs_compile.planner.in_pieces import SIZES, WORTH, smaller, smallest
from gs_compile.planner.plan import planner_of
from gs_compile.planner.request import Request
from gs_compile.planner.resumed import _check
from gs_compile.planner.summary import settings

WORKLOAD = gpt(4, 512, sequence=4096)  # whose layers compute in 68 MiB
SLOW_LINK = replace(A100, **{name: rate / 8 for name, rate in vars(A100).items() if name.startswith(("h2d", "d2h"))})
PARTS = {2048: 0.5, 512: 0.25}  # of that, by the tokens of a piece
CONFIG = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "max_position_embeddings": 4096}
NAMED = {
    "machine": "rtx4090",
    "sequence": 2048,
    "micro_batch_size": 1,
    "num_micro_batches": 1,
    "recompute": "all",
    "alpha": 0.0,
}


def asked(device_memory, *, machine=A100, slower=1.01, **settings):
    """The problem of two micro-batches, and the pieces that were tried."""
    request, tried = Request(device_memory=device_memory, **settings), []

    def cut(size):
        tried.append(size)
        scaled = WORKLOAD.scaled(code=slower, workspace=PARTS[size])
        return problem(scaled, machine, request=request, layer_tokens=size)

    found = problem(WORKLOAD, machine, 2, request=request)
    return replace(found, in_pieces={size: lambda size=size: cut(size) for size in PARTS}), tried


@pytest.mark.parametrize(
    ("device_memory", "size", "tried"),
    [
        ("2GiB", None, []),
        pytest.param("230MiB", 2048, [2048], marks=pytest.mark.slow),
        ("210MiB", 512, [2048, 512]),
    ],
)
def test_the_largest_pieces_that_fit(device_memory, size, tried):
    """Values take 190 MiB at least."""
    given, seen = asked(device_memory)
    found = decide(given)
    assert (found.layer_tokens, found.placement.decision.layer_tokens, seen) == (size, size, tried)
    assert [note for note in found.notes if "tokens at a time" in note] == (
        [f"layers run on {size} tokens at a time, and compute in {68 * PARTS[size]} MiB so"] if size else []
    )
    assert found.peaks["device"] + found.workload.workspace_nbytes <= found.budgets.device_nbytes


def test_updates_in_pieces_where_those_of_layers_are_slower():
    """Whole layers fit if three pieces of an update, not three layers', are on the way."""
    for slower, size, updates in ((1.01, 2048, 1), (3.0, None, 4)):
        given, seen = asked("260MiB", host_memory="280MiB", slower=slower)
        found = decide(given)
        assert (found.layer_tokens, found.placement.decision.layer_updates, seen) == (size, updates, [2048])


@pytest.mark.parametrize(("device_memory", "sizes"), [("230MiB", [None, 2048, 512]), ("160MiB", [None])])
def test_what_takes_less_and_less(device_memory, sizes):
    """Layers in pieces are none of it where values alone are too large; the last is the only one made of its own."""
    given, seen = asked(device_memory)
    found = [(each.layer_tokens, each.layer_updates, each.number) for each in smaller(given)]
    assert found == [(size, updates, 2) for size in sizes for updates in (1, SCARCE_UPDATES)]
    seen.clear()
    last = smallest(given)
    assert (last.layer_tokens, last.layer_updates, last.number) == found[-1]
    assert seen == sizes[1:][-1:]


def test_updates_in_pieces_where_states_have_better_use_for_the_memory():
    """With a little more than fits in pieces alone a step is no slower, as it was by half with whole updates; with
    enough for all states updates are whole. So they are of a schedule as others publish it.
    """
    words = gpt(5, 512, sequence=64, vocabulary=1000, bf16=False, tied=False)  # a layer's states: 24 MiB of 136 MiB
    slow = replace(A100, device="cpu", device_nbytes=0, matmul_flops_per_second={"fp32": 2e12})
    budgets = {"116MiB": 4, "124MiB": 4, "156MiB": 4, "300MiB": 1}
    plans = [decide(problem(words, slow, 1, request=Request(host_memory=each, alpha=0.0))) for each in budgets]
    assert [each.placement.decision.layer_updates for each in plans] == list(budgets.values())
    assert all(more.seconds < less.seconds for less, more in pairwise(plans))
    published = decide(problem(words, slow, 1, request=Request(host_memory="156MiB", schedule="horizontal")))
    assert published.placement.decision.layer_updates == 1


def test_pieces_where_values_have_better_use_for_the_memory():
    """Behind a slow link parameters that stay on the device are worth more than pieces cost, unless those are slow."""
    for slower, size in ((1.01, 2048), (100.0, None)):
        given, seen = asked("290MiB", machine=SLOW_LINK, slower=slower)
        whole = decide(replace(given, in_pieces={}))
        found = decide(given)
        assert (found.layer_tokens, seen) == (size, [*PARTS])
        assert (found.seconds < WORTH * whole.seconds) == (size is not None)


def test_nothing_is_tried_where_pieces_are_no_help():
    """Host memory is short; values alone are too large; or activations are to be saved, which they cannot."""
    for given_settings in (
        {"device_memory": "2GiB", "host_memory": "1MiB"},
        {"device_memory": "160MiB"},
        {"device_memory": "230MiB", "recompute": "none"},
    ):
        given, seen = asked(**given_settings)
        with pytest.raises(GreedySnakeError):
            decide(given)
        assert seen == []


def test_the_least_is_no_plan_where_code_has_no_room_to_compute_beside_it():
    given, _ = asked("230MiB")
    with pytest.raises(NoFitError, match="of device memory"):
        decide(replace(given, in_pieces={}))


def test_a_named_model_has_longer_samples_in_pieces():
    config = zoo.configuration("llama", **CONFIG)
    planner = planner_of(config, Request(**NAMED, device_memory="18MiB"))
    assert does_fit(planner, 1)
    problem = planner.searched()[0]
    assert problem.layer_tokens == 512
    whole, cut = (planner.problem(1, layer_tokens=size).workload.costs[0] for size in (None, 512))
    assert cut.workspace_nbytes < 0.7 * whole.workspace_nbytes
    assert whole.backward_flops < cut.backward_flops < 1.1 * whole.backward_flops
    found = decide(problem)
    assert "layers on 512 tokens at a time" in settings(found)
    assert "layers run on 512 tokens at a time, but for _scaled_dot_product_flash" in " ".join(found.notes)
    for size, fits in ((0, False), (512, True)):
        asked_for = planner_of(config, Request(**NAMED, device_memory="18MiB", layer_tokens=size), [planner])
        assert does_fit(asked_for, 1) == fits
        assert not asked_for.problem(1).in_pieces


def test_a_device_without_room_to_time_whole_layers(monkeypatch):
    """What did not fit is no reason to fail: layers in pieces are tried, which are timed for themselves."""

    def timed(*_):
        raise torch.OutOfMemoryError("no memory left")

    layout = SimpleNamespace(in_pieces=lambda size: size, split=SimpleNamespace(num_layers=1))
    monkeypatch.setattr(at_hand, "timed", timed)
    monkeypatch.setattr(at_hand, "workload_of", lambda layout, sizes: WORKLOAD)
    one = SimpleNamespace(model=SimpleNamespace(layouts=[layout]), times=None, request=Request())
    one.builder = SimpleNamespace(sizes=(), shape=None, layout=SimpleNamespace(world=1))
    with pytest.raises(NoFitError, match=r"no room for what a unit computes with, 68\.0 MiB"):
        at_hand.Figures._timed(one, 512)


def test_the_plan_of_a_commit_has_pieces_that_a_plan_can_have():
    decision = Decision(layer_tokens=SIZES[0])
    assert Decision.of(json.loads(json.dumps(decision.as_dict()))) == decision
    builder = problem(WORKLOAD, A100, 2).builder
    _check(decision, builder)
    with pytest.raises(ValueError, match="pieces"):
        _check(replace(decision, layer_tokens=3), builder)
