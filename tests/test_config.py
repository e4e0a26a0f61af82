from __future__ import annotations

import dataclasses

import pytest

from gs_compile.config import Expert, Options
from gs_compile.errors import OptionError


def test_defaults_work():
    options = Options.of(None)
    assert options == Options()
    assert (options.micro_batch_size, options.outputs, options.mode) == (1, "all", None)
    assert options.expert == Expert(schedule="vertical", compiler="auto", snake=True)


@pytest.mark.parametrize("value", [Options(), Expert()])
def test_frozen(value):
    for entry in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, entry.name, getattr(value, entry.name))


@pytest.mark.parametrize("cls", [Options, Expert])
def test_keyword_only(cls):
    with pytest.raises(TypeError, match="positional"):
        cls(2)


def test_from_a_mapping():
    options = Options.of({"micro_batch_size": 4, "expert": {"snake": False}}, mode="max-autotune")
    assert options == Options(micro_batch_size=4, expert=Expert(snake=False), mode="max-autotune")
    assert Options.of(options) == options
    assert Options.of(options, "default").mode == "default"


def test_the_users_mapping_is_not_changed():
    given = {"micro_batch_size": 4}
    Options.of(given, "default")
    assert given == {"micro_batch_size": 4}


@pytest.mark.parametrize("size", [0, -1, 1.0, 2.5, "2", None, True])
def test_micro_batch_size_is_a_whole_number(size):
    with pytest.raises(OptionError) as caught:
        Options(micro_batch_size=size)
    assert str(caught.value) == f"micro_batch_size must be a whole number of samples, 1 or more; got {size!r}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"outputs": "logits"}, "outputs must be one of 'all', 'loss'; got 'logits'"),
        ({"expert": {"schedule": "diagonal"}}, "expert.schedule must be one of 'vertical'; got 'diagonal'"),
        ({"expert": {"compiler": "gcc"}}, "expert.compiler must be one of 'auto', 'inductor', 'eager'; got 'gcc'"),
        ({"expert": {"snake": 1}}, "expert.snake must be one of True, False; got 1"),
        ({"micro_batchsize": 2}, "unknown option micro_batchsize; did you mean micro_batch_size?"),
        ({"expert": {"compilr": "eager"}}, "unknown option expert.compilr; did you mean expert.compiler?"),
        ({"snake": False}, "unknown option snake; known: micro_batch_size, outputs, expert, mode"),
        (
            {"expert": {"zzz": 1}},
            "unknown option expert.zzz; known: expert.schedule, expert.compiler, expert.snake",
        ),
        ({7: 1}, "unknown option 7; known: micro_batch_size, outputs, expert, mode"),
    ],
)
def test_refused_at_birth(given, message):
    with pytest.raises(OptionError) as caught:
        Options.of(given)
    assert str(caught.value) == message


def test_an_option_error_is_a_value_error():
    assert issubclass(OptionError, ValueError)
