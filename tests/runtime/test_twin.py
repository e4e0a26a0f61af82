"""Training on the CPU twin of a device: the same values as without one, and every access ordered."""

from __future__ import annotations

from functools import partial

import pytest
from happens_before import on_twin
from tiered import Rig, adamw, gpt2, options

KEEPS_CAPTURES = True
PLACEMENTS = {
    "on every tier": {"alpha": 0.3, "ratios": {"parameter": 0.3, "checkpoint": 0.5, "optimizer": 0.5}},
    "on SSD": {"alpha": 0.0},
    "delayed": {"alpha": 1.0},
    "speculative": {"alpha": 0.3, "clip": "speculative"},
    "horizontal": {"schedule": "horizontal", "alpha": 0.5},
}


@pytest.fixture(scope="module")
def rig():
    return Rig(gpt2)


def maker(chosen):
    return partial(adamw, max_grad_norm=0.5) if "clip" in chosen else adamw


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_it_trains_the_same_and_every_access_is_ordered(rig, tmp_path, placement):
    chosen = PLACEMENTS[placement]
    expected = rig.train(maker(chosen), options(tmp_path, separate_device=True, **chosen), 3)
    with on_twin():
        found = rig.train(maker(chosen), options(tmp_path, **chosen), 3)
    if "clip" in chosen:
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)  # the norm is summed in another order
    else:
        assert set(found.differences(expected)) <= {"norms"}
    assert found.norms == pytest.approx(expected.norms, rel=1e-6)
