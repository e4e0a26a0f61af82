from __future__ import annotations

import pytest
from children import NUM_STEPS, Server


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("server"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def uninterrupted(server, tmp_path_factory):
    """Runs that are not durable, to their end, by their number of steps."""
    found = {}
    for number in (NUM_STEPS, NUM_STEPS + 1):
        found[number] = server.run(tmp_path_factory.mktemp("uninterrupted"), durability=0, num_steps=number)
        assert found[number].code == 0, server.said()
    return found
