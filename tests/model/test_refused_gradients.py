"""Gradients of parameters beside the model that no update in memory takes are refused before a step is closed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gs_compile.errors import OptimizerError
from gs_compile.model.in_memory import refuse_other_gradients


@pytest.mark.parametrize(
    ("embedding", "words"),
    [
        (nn.Embedding(5, 3, sparse=True), "layout torch.sparse_coo: leave sparse=True out"),
        (nn.Embedding(5, 3, dtype=torch.bfloat16), "no fp32 master: convert it to float32"),
    ],
)
def test_a_gradient_that_no_update_takes(embedding, words):
    embedding(torch.tensor([1, 1])).sum().backward()
    with pytest.raises(OptimizerError, match=words):
        refuse_other_gradients([{"params": [embedding.weight]}])
