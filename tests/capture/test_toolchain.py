"""What inductor asks of the compiler and the processor is asked in a thread while a model is traced."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest
import torch
from torch._inductor import compile_fx as inductor
from torch.fx.experimental.proxy_tensor import make_fx

from gs_compile.capture import toolchain
from gs_compile.capture.frame_settings import set_from_the_start
from gs_compile.capture.inductor import Generator
from gs_compile.model.backend import check, greedysnake
from gs_compile.options import Options

ALL_IS_ASKED = """
import subprocess, torch
from gs_compile.capture import toolchain
from gs_compile.options import Options

toolchain.ask_for(torch.device("cpu"), Options())
toolchain.wait()
subprocess.Popen = None  # nobody is asked any more
torch.compile(lambda x: x.sin() + 1)(torch.ones(5))
"""


@pytest.fixture
def events(monkeypatch):
    """What happens, in its order."""
    found = []

    class Asking:
        def join(self):
            found.append("is known")

    monkeypatch.setattr(toolchain, "_asking", cache(lambda: found.append("is asked") or Asking()))
    return found


class Backend:
    """In the place of this package's."""

    __module__ = greedysnake.__module__
    check = staticmethod(check)

    def __init__(self, events):
        self._events = events

    def __call__(self, module, example_inputs, **options):
        self._events.append("is traced")
        return module.forward


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"micro_batch_size": 2}, ["is asked", "is traced"]),
        ({"expert": {"compiler": "eager"}}, ["is traced"]),
    ],
    ids=["inductor", "eager"],
)
def test_it_is_asked_before_the_trace(events, options, seen):
    set_from_the_start()
    run = torch.compile(lambda x: x.sin(), backend=Backend(events), options=options)
    run(torch.ones(2, 3))
    assert events == seen


@pytest.mark.parametrize("asked", [True, False])
def test_it_is_known_before_code_is_compiled(events, monkeypatch, asked):
    monkeypatch.setattr(inductor, "compile_fx", lambda *_, **__: events.append("is compiled"))
    if asked:
        toolchain.ask_for(torch.device("cpu"), Options())
    Generator("inductor").generate(make_fx(lambda x: (x.sin(),))(torch.zeros(3)))
    assert events == (["is asked", "is known", "is compiled"] if asked else ["is compiled"])


@pytest.mark.slow
def test_nothing_is_left_to_ask():
    """Where code is known from before, no process is started for it."""
    for source in (ALL_IS_ASKED.replace("= None", "= subprocess.Popen"), ALL_IS_ASKED):
        subprocess.run([sys.executable, "-c", source], check=True)
