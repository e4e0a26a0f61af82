"""The bytes that a rank's step moves: measured, counted on its program, and written out from first principles."""

from __future__ import annotations

from closed_forms import of_a_rank, spared, units_of
from tiered import LENGTH, adamw, moved, options, shared, step, tokens

KEEPS_CAPTURES = True  # each process captures its own
WIDTH, MICRO_BATCH = 32, 2


def measures(info, tmp_path):
    """Ranks have one micro-batch, two ... each."""
    harness, n = shared(num_layers=3, width=WIDTH, vocab_size=301), info.rank + 1
    with harness.fresh(adamw, options(tmp_path, micro_batch_size=MICRO_BATCH, alpha=0.0)) as optimizer:
        for number in range(2):
            step(harness.model, optimizer, tokens(number, MICRO_BATCH * n))
        optimizer.synchronize()
        found = moved(harness.model, optimizer, tokens(2, MICRO_BATCH * n))
        units, less = units_of(harness.model, info.number), spared(optimizer.engine.placement)
    return (
        found.traced,
        found.planned,
        found.asked,
        of_a_rank(units, MICRO_BATCH * LENGTH * WIDTH * 4, n, info.number, less),
    )


def test_a_rank_moves_its_share(pair, tmp_path):
    for traced, planned, asked, expected in pair.run(measures, tmp_path):
        assert traced == planned == expected
        assert asked == {key: nbytes for key, nbytes in expected.items() if key[0].startswith("ssd")}
