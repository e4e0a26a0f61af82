"""On a CUDA device: streams, events and pinned memory in the place of threads and copies."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gs_compile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def trained(storage, ratio, alpha, steps=4):
    """The parameters after a few steps with one share of everything in host memory."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": 32, "n_embd": 128, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)).cuda()
    optimizer = gs_compile.AdamW(model.parameters(), lr=3e-4)
    ratios = {"parameter": ratio, "checkpoint": ratio, "optimizer": ratio}
    expert = {"compiler": "eager", "ratios": ratios, "alpha": alpha}
    model.compile(backend="greedysnake", options={"micro_batch_size": 2, "storage": storage, "expert": expert})
    for seed in range(steps):
        ids = torch.randint(256, (6, 32), generator=torch.Generator().manual_seed(seed)).cuda()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.engine.tiers.close()
    return values


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_same_bits_wherever_data_lives(tmp_path, ratio, alpha):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        expected = trained(tmp_path / "a", 1.0, 0.0)
        found = trained(tmp_path / "b", ratio, alpha)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
