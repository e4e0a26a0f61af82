"""Frozen matrices in a codec: the same bits as of a model that has their decoded values, wherever they are stored."""

from __future__ import annotations

from functools import cache
from itertools import product

import expecttest
import pytest
import torch
from closed_forms import frozen_of, spared, units_of
from frozen_models import gpt2_with_frozen
from tiered import BATCH, Harness, adamw, moved, options, outcome, step, tokens

from gs_compile.errors import OptionError
from gs_compile.model.residency import residency_of
from gs_compile.options import Options
from gs_compile.runtime.codecs import CODECS

KEEPS_CAPTURES = True
WIDTH = 64
PLACES = {
    "ssd": {},
    "memory": {"ratios": {"parameter": 1.0, "checkpoint": 1.0, "optimizer": 1.0}},
    "half": {"ratios": {"parameter": 0.4, "checkpoint": 0.4, "optimizer": 0.4}, "alpha": 0.3},
    "copied": {"separate_device": True},
    "device": {"separate_device": True, "ratios": {"device_parameter": 0.7}},
    "horizontal": {"schedule": "horizontal", "separate_device": True, "ratios": {"gradient": 0.5}},
}
FAST = {
    *product(["nf4"], PLACES, ["bf16"]),
    ("mxfp4", "half", "bf16"),
}  # all places in one type; in the other what layers save


def frozen(codec=""):
    return gpt2_with_frozen(codec, width=WIDTH)


@cache
def harness(name="", precision="model"):
    if harness.cache_info().misses % 4 == 0:
        Harness.forget_captures()  # Dynamo would give up a forward that so many models have in common
    return Harness(lambda: frozen(name), precision)


@cache
def reference(name, precision, schedule):
    return harness(name, precision).train(adamw, options("/nowhere", **PLACES["memory"], schedule=schedule), 3)


@pytest.mark.parametrize(
    ("name", "place", "precision"),
    [
        pytest.param(*each, marks=[pytest.mark.slow] * (each not in FAST))
        for each in product(CODECS, PLACES, ("model", "bf16"))
        if each[1:] != ("device", "model")  # what trains in fp32 does not live on the device
    ],
)
def test_the_same_bits_as_decoded_values(name, place, precision, tmp_path):
    changes = PLACES[place]
    found = harness(precision=precision).train(adamw, options(tmp_path, frozen=name, **changes), 3)
    assert found.differences(reference(name, precision, changes.get("schedule", "vertical"))) == []


def test_saved_activations(tmp_path):
    """A backward that runs nothing again takes decoded values too."""
    given = options(tmp_path, frozen="nf4", recompute="none", alpha=0.0, ratios={"checkpoint": None})
    assert harness().train(adamw, given, 3).differences(reference("nf4", "model", "vertical")) == []


@pytest.mark.parametrize(
    ("place", "name", "skipped"),
    [
        ("ssd", "nf4", ()),
        pytest.param("copied", "nf4", (), marks=pytest.mark.slow),  # the next has some of both
        ("copied", "nf4", ("up",)),
        ("copied", "mxfp4", ()),
        ("horizontal", "nf4", ()),
    ],
    ids=str,
)
def test_the_bytes_of_every_lane(place, name, skipped, tmp_path):
    """What is read of layers in a step: twice what they are stored in, micro-batch by micro-batch as often."""
    own = harness()
    given = options(tmp_path, frozen=name, frozen_skip=skipped, alpha=0.0, **PLACES[place])
    with own.fresh(adamw, given) as optimizer:
        step(own.model, optimizer, tokens(0))
        optimizer.synchronize()
        step(own.model, optimizer, tokens(1))
        found = moved(own.model, optimizer, tokens(2))
        placement = optimizer.engine.placement
        kept = spared(placement).get(("ssd_read", "w"), 0)
    assert found.traced == found.planned
    trained = {unit: 4 * numel for unit, numel in units_of(own.model).items()}
    others = {unit: trained.pop(unit) for unit in ("e", "h", "t")}
    n = -(-BATCH // 2) if place == "horizontal" else 1
    layers = 2 * n * (sum(trained.values()) + 4 * sum(frozen_of(own.model, name, skipped=skipped).values()))
    loads = n * (2 * others["e"] + others["h"] + 3 * others["t"])
    if PLACES[place]:
        assert found.planned["h2d", "w"] == layers + loads
    assert found.asked["ssd_read", "w"] + kept == layers + loads


def test_values_are_read_and_written(tmp_path):
    """A state dict has the decoded values, and is loaded without a change; others are encoded, and that is said."""
    own = harness()
    twin = dict(frozen("nf4").state_dict())
    with own.fresh(adamw, options(tmp_path, frozen="nf4")) as optimizer:
        step(own.model, optimizer, tokens(0))
        frozen_names = [name for name, each in own.model.named_parameters() if not each.requires_grad]
        found = {name: own.model.state_dict()[name].clone() for name in frozen_names}
        assert all(torch.equal(found[name], twin[name]) for name in frozen_names)
        own.model.load_state_dict(found, strict=False)
        again = own.model.state_dict()
        assert all(torch.equal(again[name], twin[name]) for name in frozen_names)
        name, given = frozen_names[0], torch.randn(WIDTH, WIDTH)
        with pytest.warns(RuntimeWarning, match="quantized to nf4 as the first ones were"):
            own.model.load_state_dict({name: given}, strict=False)
        codec = CODECS["nf4"]
        assert torch.equal(own.model.state_dict()[name], codec.decode(codec.encode(given), given.shape, given.dtype))


@pytest.mark.parametrize("parameter", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_a_killed_run_goes_on_with_the_same_bits(parameter, tmp_path):
    """The bytes are moved as they are: a matrix that is encoded twice is another."""
    given = options(tmp_path / "run", frozen="nf4", durability="step")
    undisturbed = harness().train(adamw, options(tmp_path / "other", frozen="nf4"), 4)
    own, losses, norms = harness(), [], []
    for numbers, more in ((range(2), {}), (range(2, 4), {"resume": "auto", "ratios": {"parameter": parameter}})):
        with own.fresh(adamw, given | more_options(given, more)) as optimizer:
            for number in numbers:
                losses.append(step(own.model, optimizer, tokens(number)))
                norms.append(optimizer.last_step.grad_norm)
            found = outcome(own.model, optimizer, losses, norms)
            optimizer.commit()
    assert found.differences(undisturbed) == []


@pytest.mark.filterwarnings("ignore::gs_compile.errors.UniformityWarning")  # layers, one of them trained
def test_what_is_unfrozen_later_goes_on_from_decoded_values(tmp_path):
    """It is trained as it is, and stays as it is where it is frozen again; others keep their bytes."""

    def learn(model, optimizer):
        for number, trained in enumerate((False, True, False)):
            model.transformer.h[0].mix.weight.requires_grad_(trained)
            step(model, optimizer, tokens(number))
        return {name: each.clone() for name, each in model.state_dict().items()}

    ours, theirs = frozen(), frozen("nf4")
    optimizer, twins = (adamw([{"params": list(each.parameters())}]) for each in (ours, theirs))
    ours.compile(backend="greedysnake", options=options(tmp_path / "ours", frozen="nf4"))
    found = learn(ours, optimizer)
    torch._dynamo.reset()
    theirs.compile(backend="greedysnake", options=options(tmp_path / "theirs"))
    wanted = learn(theirs, twins)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    codecs = {name: residency_of(each).home.span.codec for name, each in ours.named_parameters()}
    assert codecs["transformer.h.0.mix.weight"] == ""
    assert codecs["transformer.h.1.mix.weight"] == "nf4"


def more_options(given, more):
    expert = {**given["expert"], "ratios": {**given["expert"]["ratios"], **more.get("ratios", {})}}
    return {"expert": expert, **{key: value for key, value in more.items() if key == "resume"}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"frozen": "nf3"}, "frozen must be one of"),
        ({"frozen": "nf4", "frozen_skip": "up"}, "frozen_skip must be a list"),
    ],
)
def test_what_is_no_codec(given, words):
    with pytest.raises(OptionError, match=words):
        Options.of(given)


class TestText(expecttest.TestCase):
    def test_decode_follows_what_has_come(self):
        own = harness()
        with own.fresh(adamw, options("/nowhere", frozen="nf4", **PLACES["memory"], separate_device=True)) as optimizer:
            step(own.model, optimizer, tokens(0))
            text = str(optimizer.engine.snapshots[-1])
        stage = text.split("# forward 1")[1].split("#")[0].splitlines()
        self.assertExpectedInline(
            "\n".join(line for line in stage if "w1" in line),
            """\
w1.device = gather(w1.device[0], w1.device[1], w1.device[2])
free(w1.device[0])
free(w1.device[1])
free(w1.device[2])
decode(into=w1.device)
x2_2.device = forward(x1_2.device, w1.device)
x2_1.device = forward(x1_1.device, w1.device)
x2_0.device = forward(x1_0.device, w1.device)
free(w1.device)""",
        )
