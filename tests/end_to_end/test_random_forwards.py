"""Random forwards: each learns what plain PyTorch does in float64, or is refused by name.

A failing one is named by its seed, and its note is its source: `-k "forward and 7"` repeats it.
"""

from __future__ import annotations

import copy

import forwards
import pytest
from torch.testing import assert_close

from gs_compile.errors import GreedySnakeError

TRAINED = (0, 1)  # of these seeds the forward is not refused
MANY = 80
OPTIONS = {"micro_batch_size": 2, "outputs": "all", "expert": {"compiler": "eager"}}


@pytest.mark.filterwarnings("ignore::gs_compile.errors.GreedySnakeWarning")
@pytest.mark.parametrize("seed", [*TRAINED, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, MANY))])
def test_a_random_forward_is_that_of_plain_pytorch_or_refused(seed):
    source = forwards.source(seed)
    plain = forwards.model(source)
    ours = copy.deepcopy(plain)
    ours.compile(backend="greedysnake", options=OPTIONS)
    try:
        for inputs in forwards.BATCHES:
            compare(forwards.step(ours, inputs), forwards.step(plain, inputs))
    except GreedySnakeError:
        if seed in TRAINED:
            raise
    except Exception as error:
        error.add_note(source)
        raise


def compare(found, wanted):
    (outputs, gradients), (plain_outputs, plain_gradients) = found, wanted
    assert_close(outputs, plain_outputs, rtol=1e-8, atol=1e-10, equal_nan=True)
    largest = max(float(each.abs().max()) for each in plain_gradients.values())
    assert_close(gradients, plain_gradients, rtol=1e-7, atol=1e-9 * max(largest, 1e-3))
