"""The bytes that a rank's step moves: measured, counted on its program, and written out from first principles."""

from __future__ import annotations

from functools import partial

import pytest
from closed_forms import frozen_of, of_a_rank, spared, units_of
from frozen_models import gpt2_with_frozen
from tiered import LENGTH, Harness, adamw, moved, options, shared, step, tokens

KEEPS_CAPTURES = True  # each process captures its own
WIDTH, MICRO_BATCH = 64, 2


def measures(info, tmp_path, codec):
    """Ranks have one micro-batch, two ... each."""
    sizes, n = {"num_layers": 3, "width": WIDTH, "vocab_size": 301}, info.rank + 1
    harness = Harness(partial(gpt2_with_frozen, **sizes)) if codec else shared(**sizes)
    given = options(tmp_path, micro_batch_size=MICRO_BATCH, alpha=0.0, frozen=codec)
    with harness.fresh(adamw, given) as optimizer:
        for number in range(2):
            step(harness.model, optimizer, tokens(number, MICRO_BATCH * n))
        optimizer.synchronize()
        found = moved(harness.model, optimizer, tokens(2, MICRO_BATCH * n))
        units, less = units_of(harness.model, info.number), spared(optimizer.engine.placement)
        frozen = frozen_of(harness.model, codec, info.number)
    return (
        found.traced,
        found.planned,
        found.asked,
        of_a_rank(units, MICRO_BATCH * LENGTH * WIDTH * 4, n, info.number, less, frozen),
    )


@pytest.mark.parametrize("codec", [None, "nf4"])
def test_a_rank_moves_its_share(pair, codec, tmp_path):
    """Of frozen matrices in a codec their bytes there, also between ranks."""
    for traced, planned, asked, expected in pair.run(measures, tmp_path, codec=codec):
        assert traced == planned == expected
        assert asked == {key: nbytes for key, nbytes in expected.items() if key[0].startswith("ssd")}
