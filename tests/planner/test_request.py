"""A request is checked when it is made, in words; the command line asks for it field by field."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest
from planned import gpt

from gs_compile.cli.requests import plans
from gs_compile.errors import OptionError, PlanError
from gs_compile.options import Options, Ratios, words_of
from gs_compile.planner.plan import plan
from gs_compile.planner.request import Request

HERE = Path(__file__).parents[1] / "machine.json"
NUMBERS = {each.name: least for each in fields(Request) if (least := each.metadata.get("least")) is not None}
WORDS = words_of(Request, Profile=object)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"precision": "fp8"}, "precision is 'fp8'; there are bf16 and model"),
        ({"schedule": "diagonal"}, "schedule is 'diagonal'; there are vertical and horizontal"),
        ({"saturation": "never"}, "saturation is 'never'; there are relative and paper"),
        ({"recompute": "typo"}, "recompute is 'typo'; there are auto and "),
        ({"masters": "half"}, "masters is 'half'; there are split and whole"),
        ({"clip": None}, "clip is None; there are True and False"),
        ({"states": "4bit"}, "states is '4bit'; there are fp32 and bf16 and 8bit"),
        ({"clipping": "late", "clip": True}, "clipping is 'late'; there are delayed and speculative"),
        ({"alpha": -0.1}, "alpha is -0.1; it must be a part of each update, from 0 to 1"),
        ({"alpha": 1.5}, "alpha is 1.5; it must be a part of each update, from 0 to 1"),
        ({"alpha": float("nan")}, "alpha is nan; it must be a part of each update, from 0 to 1"),
        ({"alpha": 0.2, "clip": True, "clipping": "delayed"}, 'alpha is 0.2, but with clipping="delayed"'),
        ({"wear_years": 0}, "wear_years is 0; it must be more than 0"),
        ({"wear_years": float("nan")}, "wear_years is nan; it must be more than 0"),
        ({"wear_years": float("inf")}, "wear_years is inf; it must be more than 0, and 1,000,000 at most"),
        ({"wear_years": 1e300}, "wear_years is 1e+300; it must be more than 0, and 1,000,000 at most"),
        (
            {"ratios": {"activation": 0.5}, "recompute": "all"},
            'recompute is "all", but ratios.activation is 0.5: leave',
        ),
        ({"ratios": {"checkpoint": 0.5}, "recompute": "none"}, 'recompute is "none", but ratios.checkpoint is 0.5: '),
        ({"ratios": {"gradient": 1.0}}, "ratios.gradient is 1, but gradient sums leave the device between two"),
        *(
            ({name: least - 1}, f"{name} is {least - 1}; it must be a whole number, {least} or more")
            for name, least in NUMBERS.items()
        ),
        *(
            ({name: "8"}, f"{name} is '8'; it must be a whole number, {least} or more")
            for name, least in NUMBERS.items()
        ),
        ({"batch_size": 2.5}, "batch_size is 2.5; it must be a whole number, 1 or more"),
        ({"alpha": "half"}, "alpha is 'half'; it must be a number"),
        ({"wear_years": "3"}, "wear_years is '3'; it must be a number"),
        ({"clipping": "delayed"}, "clipping is 'delayed', but clip is not asked for: give clip, too"),
    ],
)
def test_what_a_plan_cannot_be_asked_for(settings, complaint):
    with pytest.raises(PlanError) as caught:
        Request(**settings)
    assert str(caught.value).startswith(complaint)


@pytest.mark.parametrize("settings", [{"batch_size": 4 * 10**9}, {"num_micro_batches": 10**9}])
def test_a_step_of_more_micro_batches_than_a_plan_can_hold(settings):
    """As of a batch that somebody counts in tokens: it took all memory of the machine."""
    with pytest.raises(
        PlanError, match=r"a step has \d+ micro-batches of 4, and 1,000,000 at most: batch_size is in samples"
    ):
        Request(**settings).number(4)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"ratios": {"optimizer": 1.5}}, "ratios.optimizer must be a number from 0 to 1"),
        ({"ratios": {"parameters": 1.0}}, "did you mean ratios.parameter?"),
        ({"ratios": 0.5}, "ratios must be a dict or gs_compile.Ratios; got 0.5"),
        (
            {"ratios": {"parameter": 0.5, "device_parameter": 0.75}},
            "ratios.parameter is 0.5 and ratios.device_parameter is 0.75: together they are more than there is",
        ),
        ({"durability": "never"}, 'durability must be "off", "step" or a whole number of steps; got \'never\''),
        ({"durability": -1}, 'durability must be "off", "step" or a whole number of steps; got -1'),
    ],
)
def test_what_options_refuse_too_is_refused_in_their_words(settings, complaint):
    with pytest.raises(OptionError) as caught:
        Request(**settings)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("name", WORDS)
def test_every_word_there_is_may_be_asked_for(name):
    for word in WORDS[name]:
        assert getattr(Request(**{"clip": name == "clipping", name: word}), name) == word


def test_what_is_given_in_short_is_kept_in_full():
    found = Request(ratios={"parameter": 0.5}, durability="step")
    assert (found.ratios, found.durability) == (Ratios(parameter=0.5), 1)
    assert found == Request(ratios=Ratios(parameter=0.5), durability=1)


def test_a_plan_that_saves_nothing_and_something_is_refused():
    """Before anything is planned, in words."""
    with pytest.raises(PlanError, match=r'recompute is "all", but ratios.activation is 0.5: leave one of the two out'):
        plan(gpt(2, 64), machine=HERE, recompute="all", ratios={"activation": 0.5})


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"alpha": 0.3}, r"expert.alpha is 0.3, but a step that accumulates"),
        ({"clip": "speculative"}, r'expert.clip is "speculative", but a step that accumulates'),
        ({"schedule": "horizontal"}, r'expert.schedule is "horizontal": a step that accumulates'),
    ],
)
def test_what_a_loop_that_accumulates_cannot_have_is_refused_where_the_user_says_both(given, complaint):
    """A loop that turns out to accumulate goes on without."""
    with pytest.raises(OptionError, match=complaint):
        Request.of(Options.of({"accumulate": True, "expert": given}), clip=True)
    if "schedule" not in given:
        assert Request.of(Options.of({"expert": given}), clip=True, accumulate=True).alphas == (1.0,)


@pytest.mark.parametrize(
    ("clip", "clipping", "alpha", "alphas", "speculative"),
    [
        (False, None, 0.2, (0.2,), False),
        (True, None, None, (1.0,), False),
        (True, None, 1.0, (1.0,), False),
        (True, None, 0.2, (0.2,), True),  # what is not all late is speculative
        (True, "delayed", None, (1.0,), False),
        (True, "speculative", 0.2, (0.2,), True),
        (True, "speculative", 1.0, (1.0,), True),
    ],
)
def test_clipping_says_which_updates_are_late(clip, clipping, alpha, alphas, speculative):
    found = Request(clip=clip, clipping=clipping, alpha=alpha)
    assert (found.alphas, found.speculative, found.late) == (alphas, speculative, clip and not speculative)


@pytest.mark.parametrize("alpha", [None, 0.2])
def test_a_run_asks_for_what_its_options_say(alpha):
    expert = {"alpha": alpha, "ratios": {"parameter": 0.5}, "recompute": "all", "masters": "whole"}
    given = {"host_memory": 6 << 30, "micro_batch_size": 2, "durability": 3}
    options = Options.of({**given, "expert": expert})
    found = Request.of(options, clip=True)
    assert found == Request(**expert, **given, clip=True, storage=options.storage, precision=options.precision)


# The command line -----------------------------------------------------------------------------------------------------


def test_what_is_not_given_on_the_command_line_is_what_a_request_has():
    asked = []

    @plans
    def command(model: str, request: Request, as_json: bool = False) -> None:
        asked.append((model, request, as_json))

    parameters, names = signature(command).parameters, [each.name for each in fields(Request)]
    defaults = {name: parameters[name].default.default for name in names}
    command("gpt-65b", **defaults)
    assert asked == [("gpt-65b", Request(), False)]
    assert defaults == {each.name: each.default for each in fields(Request)}
    assert list(parameters) == ["model", *names, "as_json"]
