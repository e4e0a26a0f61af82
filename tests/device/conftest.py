from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import build
import card
import pytest
from carded import Card
from torch.nn.attention import SDPBackend, sdpa_kernel

from gs_compile.codegen import codes
from gs_compile.runtime import stream


def pytest_collection_finish(session):
    """Autograd makes a thread for each device that there is at a process's first backward, whichever test that is of."""
    is_wanted = any(Path(__file__).parent in item.path.parents for item in session.items)
    if is_wanted and not session.config.option.collectonly and not build.missing():
        with suppress(Exception):  # `built` raises it
            card.native()


@pytest.fixture(scope="session")
def built():
    """The card is built; without what that takes, its tests are skipped and say why."""
    if words := build.missing():
        pytest.skip(words)
    return card.native()


@pytest.fixture(autouse=True, scope="module")
def the_card(built):
    """The card is the accelerator of this module's tests, and attention is the same operators on it and on the CPU: also
    of layers that modules before have traced with others.
    """
    with pytest.MonkeyPatch.context() as patched, card.installed(), sdpa_kernel(SDPBackend.MATH):
        patched.setattr(codes, "_codes", codes.Codes())
        patched.setattr(stream, "DEVICES", {**stream.DEVICES, "card": Card})
        yield


@pytest.fixture(autouse=True)
def as_it_is_at_first():
    yield
    card.delays()
    card.set_device(0)
    for index in range(card.device_count()):
        card.set_limit(None, index)
