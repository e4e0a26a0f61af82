from __future__ import annotations

import logging

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import compile_fx as inductor
from torch._inductor import config, cpp_builder
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _triton

from gs_compile.capture.graph import TensorSpec
from gs_compile.capture.inductor import Generator, best_compiler


@pytest.fixture(autouse=True)
def unknown_machine():
    """What is known of this machine is forgotten before and after."""
    best_compiler.cache_clear()
    yield
    best_compiler.cache_clear()


def graph():
    return make_fx(lambda x: (x.sin() + 1,))(torch.zeros(3))


def test_eager_runs_the_graph_itself():
    module = graph()
    assert Generator("eager").generate(module) is module
    assert Generator("eager").decompositions == {}


@pytest.mark.parametrize("changed", ["nothing", "another", "the view"])
def test_eager_copies_where_memory_allows_no_view(changed):
    """But what is changed in place is viewed, since a copy would lose the change."""

    def function(x, y):
        viewed = x.view(6)
        if changed != "nothing":
            (viewed if changed == "the view" else y).add_(1)
        return viewed, x, y

    specs = [TensorSpec((2, 3), (3, 1), torch.float32, torch.device("cpu"), False, ())] * 2
    module = Generator("eager").trace(function, specs)
    run, x, transposed = Generator("eager").generate(module), torch.zeros(2, 3), torch.arange(6.0).reshape(3, 2).T
    assert run(x, x.clone())[0].data_ptr() == x.data_ptr()
    if changed == "the view":
        assert run is module
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            run(transposed, x)
    else:
        assert torch.equal(run(transposed, x)[0], transposed.reshape(6))


@pytest.mark.slow
def test_inductor_computes_the_same():
    x = torch.linspace(0, 1, 3)
    (found,) = Generator("inductor").generate(graph())(x)
    torch.testing.assert_close(found, x.sin() + 1)


def test_what_inductor_has_compiled_is_kept_on_disk():
    """The graph is a product alone, for which no C++ has to be compiled."""
    spec = TensorSpec((4, 4), (4, 1), torch.float32, torch.device("cpu"), False, ())
    generator, x = Generator("inductor"), torch.eye(4)
    with fresh_cache():
        for found in ("fxgraph_cache_miss", "fxgraph_cache_hit"):
            counters.clear()
            (result,) = generator.generate(generator.trace(lambda x: (torch.mm(x, x),), [spec]))(x)
            assert torch.equal(result, x)
            assert counters["inductor"][found] == 1, dict(counters["inductor"])


@pytest.mark.parametrize(
    ("mode", "patches"),
    [
        (None, {}),
        ("max-autotune-no-cudagraphs", {"max_autotune": True, "coordinate_descent_tuning": True}),
        ("reduce-overhead", {}),
    ],
)
@pytest.mark.parametrize("asked", [False, True], ids=["", "cudagraphs"])
def test_mode_reaches_inductor(monkeypatch, mode, patches, asked):
    """And CUDA graphs are off, whatever the user's config says: their outputs do not live as long as checkpoints do."""
    seen = []
    monkeypatch.setattr(
        inductor, "compile_fx", lambda module, inputs, config_patches: seen.append((inputs, config_patches)) or module
    )
    module = graph()
    with config.patch({"triton.cudagraphs": asked}):  # as TORCHINDUCTOR_CUDAGRAPHS=1 does
        assert Generator("inductor", mode).generate(module) is module
    (((like,), found),) = seen
    assert like.shape == (3,)
    assert found.items() >= patches.items()
    with config.patch({"triton.cudagraphs": asked}), config.patch(found):
        assert not config.triton.cudagraphs


def test_a_cpu_with_a_compiler(monkeypatch, caplog):
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "python3")  # anything that is there
    with caplog.at_level(logging.WARNING, "gs_compile"):
        assert best_compiler("cpu") == "inductor"
    assert caplog.messages == []


def raises():
    raise InvalidCxxCompiler


@pytest.mark.parametrize("found", [raises, lambda: "no-such-compiler"], ids=["none", "not there"])
def test_a_cpu_without_a_compiler_says_so_once(monkeypatch, caplog, found):
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", found)
    with caplog.at_level(logging.WARNING, "gs_compile"):
        assert [best_compiler("cpu") for _ in range(3)] == ["eager"] * 3
    assert caplog.messages == [
        "no C++ compiler was found (install g++): layers run uncompiled; set expert={'compiler': 'eager'} to choose this"
    ]


@pytest.mark.parametrize(("works", "compiler"), [(True, "inductor"), (False, "eager")])
def test_a_gpu_needs_triton(monkeypatch, caplog, works, compiler):
    monkeypatch.setattr(_triton, "has_triton", lambda: works)
    with caplog.at_level(logging.WARNING, "gs_compile"):
        assert best_compiler("cuda") == compiler
    assert [m.split(":")[0] for m in caplog.messages] == ([] if works else ["Triton does not work for cuda here"])


def test_meta_tensors_are_not_compiled():
    assert best_compiler("meta") == "eager"
