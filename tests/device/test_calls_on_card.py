"""Several calls of a model between forward and backward at a time, on the card: they share its memory."""

from __future__ import annotations

import pytest
import torch
from test_runs_on_card import model_on
from tiered import loss_of, options, tokens

from gs_compile.errors import MemoryBudgetError

IN_MEMORY = {"parameter": 1.0, "optimizer": 1.0, "checkpoint": 1.0}


def three_calls(device_nbytes, folder):
    """The most device memory of two steps of three calls each, without what tests before have left there."""
    given = options(folder, device_memory=device_nbytes, ratios=IN_MEMORY)
    others, batch_nbytes = torch.accelerator.memory_allocated(0), tokens(0, 8).nbytes
    with model_on("card:0", given, num_layers=4, width=128) as (model, optimizer):
        torch.accelerator.reset_peak_memory_stats(0)
        for step in range(2):
            sum(loss_of(model, tokens(3 * step + call, 8)) for call in range(3)).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated(0) - others - 3 * batch_nbytes


def test_calls_that_wait_keep_the_device_within_its_budget(tmp_path):
    """What has waited for its backward, of two calls the top layer's parameters, was not counted."""
    assert 4_000_000 < three_calls(5_000_000, tmp_path) <= 5_000_000
    words = "device_memory 3.8 MiB for 3 calls .* for each, device_memory is 2.4 MiB"
    with pytest.raises(MemoryBudgetError, match=words):
        three_calls(4_000_000, tmp_path)
