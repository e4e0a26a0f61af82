"""Two ranks, each with a device of its own: they learn what they do on CPUs, and the end of one ends the other."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "ranks"))
from launch import Fleet
from rank_learner import compiled
from tiered import gpt2

from gs_compile.errors import NonFiniteWarning

KEEPS_CAPTURES = True  # each process captures its own


@contextmanager
def on_card(info):
    """This process's device is the card of its rank, which no other rank comes near."""
    import card
    import network
    from carded import Card

    from gs_compile.runtime import stream

    card.native()
    with card.installed():
        stream.DEVICES = {**stream.DEVICES, "card": Card}
        network.register()
        card.delays(copy=2e-4)
        card.take_touches(1 - info.rank)
        yield f"card:{info.rank}"


@pytest.fixture(scope="module")
def pair(built):
    """Two ranks of processes that have made no backward before there is a card."""
    with Fleet(2, initialize=False, fresh=True) as fleet:
        yield fleet


def learns(info, tmp_path, device):
    def run(where):
        from carded import to

        build = gpt2 if where == "cpu" else lambda seed: to(gpt2(seed=seed), where)
        learner = compiled(info, tmp_path / f"{device}{info.rank}", build)
        losses = learner.train(*range(4))
        norm = learner.optimizer.last_step.grad_norm
        found = losses, norm, learner.values()
        learner.optimizer.engine.tiers.close()
        return found

    if device == "cpu":
        return run("cpu")
    import card

    with on_card(info) as where:
        found = run(where)
        assert card.current_device() == info.rank
        assert torch.accelerator.max_memory_allocated(1 - info.rank) == 0
        return *found, card.take_touches(1 - info.rank)


def test_two_ranks_with_a_device_each(pair, tmp_path):
    found, expected = (pair.run(learns, tmp_path, device=device) for device in ("card", "cpu"))
    for (losses, norm, values), (found_losses, found_norm, found_values, touches) in zip(expected, found, strict=True):
        assert found_losses == pytest.approx(losses, rel=1e-6)
        assert found_norm == pytest.approx(norm, rel=1e-6)
        assert all(torch.allclose(values[name], found_values[name], rtol=0, atol=1e-7) for name in values)
        assert touches == 0, "the other rank's device"


def goes_on_at_once(info, tmp_path):
    with on_card(info) as where, pytest.MonkeyPatch.context() as patched:
        import network
        from carded import to

        patched.setattr(network._Launched, "wait", lambda *_: True)
        learner = compiled(info, tmp_path / str(info.rank), lambda seed: to(gpt2(seed=seed), where))
        with pytest.raises(NonFiniteWarning, match=r"(the loss|a gradient) is not finite: step 1 was skipped"):
            learner.train(0)
        learner.optimizer.engine.tiers.close()


def test_a_stream_that_does_not_wait_for_the_network_computes_with_poison(pair, tmp_path):
    pair.run(goes_on_at_once, tmp_path)


def is_killed(info, tmp_path):
    with on_card(info) as where:
        from carded import to

        learner = compiled(info, tmp_path / str(info.rank), lambda seed: to(gpt2(seed=seed), where))
        learner.train(0)
        (tmp_path / f"{info.rank}.begun").touch()
        while len(list(tmp_path.glob("*.begun"))) < info.number:  # else the other may still be within its first step
            time.sleep(0.01)
        if info.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        learner.train(1)


def test_a_rank_that_is_killed_ends_the_other(pair, tmp_path):
    """Its kernels never end, and whoever waits for them hears why."""
    first, _ = pair.outcomes(is_killed, tmp_path, 60)
    assert "rank 1 has failed: it was killed, or its machine is gone" in first.failure
    assert "RankError" in first.failure
