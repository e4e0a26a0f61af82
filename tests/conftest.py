from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # every model is built from its configuration


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Each test captures its own models."""
    torch._dynamo.reset()
