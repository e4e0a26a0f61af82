from __future__ import annotations

import pytest
from tiered import adamw, options


@pytest.fixture(scope="module")
def reference(harness, tmp_path_factory):
    """What three steps come to."""
    return harness.train(adamw, options(tmp_path_factory.mktemp("reference")), num_steps=3)
