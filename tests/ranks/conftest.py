from __future__ import annotations

import pytest
from launch import Fleet


@pytest.fixture(scope="session")
def pair():
    """Two ranks: what one module has compiled is there in the next."""
    with Fleet(2) as fleet:
        yield fleet
