from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # every model is built from its configuration
os.environ["GREEDYSNAKE_MACHINE"] = str(Path(__file__).with_name("machine.json"))  # no test measures this machine


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Each test captures its own models."""
    torch._dynamo.reset()
