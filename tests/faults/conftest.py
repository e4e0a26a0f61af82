from __future__ import annotations

import pytest
from tiered import Rig, adamw, gpt2, options


@pytest.fixture(scope="module")
def rig():
    return Rig(gpt2)


@pytest.fixture(scope="module")
def reference(rig, tmp_path_factory):
    """What three steps come to."""
    return rig.train(adamw, options(tmp_path_factory.mktemp("reference")), num_steps=3)
