"""The bytes that a rank's step moves: measured, counted on its program, and written out from first principles."""

from __future__ import annotations

import re

import pytest
from launch import Fleet
from tiered import LENGTH, Harness, adamw, gpt2, moved, options, step, tokens

from gs_compile.placement.shards import QUANTUM

KEEPS_CAPTURES = True  # each process captures its own
NUM_LAYERS, WIDTH, VOCABULARY, MICRO_BATCH, MOMENTS = 3, 32, 301, 2, 2
# How often a step needs the parameters of a unit: see end_to_end/test_tiers_traffic.py.
LOADS = {"e": 2, **dict.fromkeys(range(NUM_LAYERS), 2), "h": 1, "t": 3}


@pytest.fixture(scope="module")
def pair():
    with Fleet(2) as fleet:
        yield fleet


def closed_form(model, num_ranks, num_micro_batches, kept):
    """Everything is on SSD, each rank's share of it; a share has whole quanta. What is kept is read once less."""
    whole = dict.fromkeys(LOADS, 0)
    for name, values in model.named_parameters():
        layer = re.search(r"\.h\.(\d)\.", name)
        unit = int(layer[1]) if layer else {"wte": "t", "wpe": "e", "ln_f": "h"}[name.split(".")[1]]
        whole[unit] += -(-values.numel() // QUANTUM) * QUANTUM
    own = {unit: -(-numel // (num_ranks * QUANTUM)) * QUANTUM for unit, numel in whole.items()}
    loads, numel = sum(own[unit] * LOADS[unit] for unit in own) * 4, sum(own.values())
    x = NUM_LAYERS * num_micro_batches * MICRO_BATCH * LENGTH * WIDTH * 4
    return {
        ("net", "w"): loads * (num_ranks - 1),
        ("net", "dw"): numel * 4 * (num_ranks - 1),
        ("ssd_read", "w"): loads - sum(own[unit] * (2 if unit == "t" else 1) for unit in kept) * 4,
        ("ssd_write", "w"): numel * 4,
        **{(lane, "s"): numel * 4 * MOMENTS for lane in ("ssd_read", "ssd_write")},
        **{(lane, "x"): x for lane in ("ssd_read", "ssd_write", "d2h")},
    }


def measures(info, tmp_path):
    """Ranks have one micro-batch, two ... each."""
    harness = Harness(lambda: gpt2(num_layers=NUM_LAYERS, width=WIDTH, vocab_size=VOCABULARY))
    with harness.fresh(adamw, options(tmp_path, micro_batch_size=MICRO_BATCH, alpha=0.0)) as optimizer:
        for number in range(2):
            step(harness.model, optimizer, tokens(number, MICRO_BATCH * (info.rank + 1)))
        optimizer.synchronize()
        found = moved(harness.model, optimizer, tokens(2, MICRO_BATCH * (info.rank + 1)))
        expected = closed_form(harness.model, info.number, info.rank + 1, optimizer.engine.placement.carried)
    return found.traced, found.planned, found.asked, expected


def test_a_rank_moves_its_share(pair, tmp_path):
    for traced, planned, asked, expected in pair.run(measures, tmp_path):
        assert traced == planned == expected
        assert asked == {key: nbytes for key, nbytes in expected.items() if key[0].startswith("ssd")}
