"""Libraries whose functions Dynamo cannot trace have others traced in their place, whenever they are imported."""

from __future__ import annotations

import threading

from zoo import GPT, assert_same_gradients, batch, compile_model, gradients, train

from gs_compile.capture import adapters
from gs_compile.capture.frame_settings import set_from_the_start

LOCK = threading.Lock()


def guarded(ids):
    with LOCK:  # which breaks the graph
        return ids


class CallsLibrary(GPT):
    def forward(self, ids, *rest):
        return super().forward(guarded(ids), *rest)


def test_what_a_library_does_that_is_imported_after_the_first_compile_is_traced(monkeypatch):
    """A break ahead of all operations leaves nothing that the backend is asked for, so it is too late to trace again."""
    set_from_the_start()
    train(compile_model(GPT(), 2), *batch())
    monkeypatch.setattr(adapters, "FUNCTIONS", (*adapters.FUNCTIONS, (__name__, "guarded", lambda ids: ids)))
    model, plain = CallsLibrary(), CallsLibrary()
    train(compile_model(model, 2), *batch())
    train(plain, *batch())
    assert_same_gradients(gradients(model), gradients(plain))
