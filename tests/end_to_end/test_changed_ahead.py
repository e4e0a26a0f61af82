"""What a forward has read, and a script changes ahead of its backward where torch counts no change, is refused."""

from __future__ import annotations

import pytest
from zoo import Scaled, batch, compile_model, gradients

from gs_compile.errors import StepOrderError

KEEPS_CAPTURES = True
WORDS = "batch, a parameter or a buffer was changed between the forward and its backward"


def halve(tensor):
    tensor.data = tensor.data / 2


CHANGES = {
    "a batch, as an array": lambda model, ids: ids.numpy().fill(3),
    "a batch": lambda model, ids: ids.data.fill_(3),
    "a parameter": lambda model, ids: model.blocks[0].up.weight.data.mul_(2),
    "a parameter's memory": lambda model, ids: halve(model.blocks[0].up.weight),
    "a buffer": lambda model, ids: model.scale.data.fill_(3),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_changed_ahead_of_its_backward_is_refused(what):
    """As by a loader with one memory for all batches, or one who takes noise away from weights. Fault: layers that ran
    again read other values, without a word. (Parameters on the tiers were refused.)
    """
    model, (ids, _) = compile_model(Scaled(), 2), batch()
    loss, _ = model(ids)
    CHANGES[what](model, ids)
    with pytest.raises(StepOrderError, match=WORDS):
        loss.backward()
    assert gradients(model) == {}
    model(ids)[0].backward()
