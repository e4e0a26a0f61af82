"""On a CUDA device: streams, events and pinned memory in the place of threads and copies."""

from __future__ import annotations

import os

import pytest
import torch
from tiered import adamw, gpt2, options, step, tokens, two_groups

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def trained(storage, ratio, alpha, num_steps=4):
    """The parameters after a few steps with one share of everything in host memory."""
    torch._dynamo.reset()
    model = gpt2(num_layers=4, width=128).cuda()
    optimizer = adamw(two_groups(model))
    ratios = dict.fromkeys(("parameter", "checkpoint", "optimizer"), ratio)
    model.compile(backend="greedysnake", options=options(storage, ratios=ratios, alpha=alpha))
    for number in range(num_steps):
        step(model, optimizer, tokens(number, 6).cuda())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.engine.tiers.close()
    return values


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_same_bits_wherever_data_lives(tmp_path, ratio, alpha):
    torch.use_deterministic_algorithms(True)
    try:
        expected = trained(tmp_path / "a", 1.0, 0.0)
        found = trained(tmp_path / "b", ratio, alpha)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
