from __future__ import annotations

import pytest
from launch import Fleet


@pytest.fixture(scope="module")
def pair():
    """Two ranks."""
    with Fleet(2) as fleet:
        yield fleet
