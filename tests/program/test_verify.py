"""One broken program for each law: good text, one change, the complaint; and changes drawn at random."""

from __future__ import annotations

from dataclasses import replace

import expecttest
import pytest
from tiers import Options, in_order, lowered, place

from gs_compile.errors import ProgramError
from gs_compile.passes.baselines.horizontal import horizontal
from gs_compile.passes.lower import flush
from gs_compile.passes.snake import snake
from gs_compile.passes.vertical import vertical
from gs_compile.placement.placement import StepContext
from gs_compile.placement.verify import verify
from gs_compile.program.ir import Op, Stage, StepShape, Value
from gs_compile.program.text import parse

SMALL = Options(parameter_ratio=0.3, optimizer_ratio=0.3, checkpoint_ratio=0.5, alpha=0.25)
PLACEMENTS = {
    "resident": None,
    "horizontal": in_order(place(2, 2, options=Options()), 0.0),
    "tiers": place(3, 2, options=SMALL),
    "clipped": place(3, 2, options=replace(SMALL, alpha=1.0, clip=True)),
    "one memory": place(3, 2, options=replace(SMALL, separate=False)),
    "on the device": place(3, 2, options=replace(SMALL, device_parameter=0.7, device_checkpoint=0.25)),
}
LATE = {"tiers", "clipped", "one memory", "on the device"}
STEPS = {
    "resident": (2, 2, StepShape(has_total=True, sides=frozenset("e"), side_gradients=frozenset("e"))),
    "horizontal": (2, 2),
}
GOOD = {
    name: lowered(STEPS.get(name, (3, 2)), placement, late=name in LATE)[-1].text(fold=False)
    for name, placement in PLACEMENTS.items()
}

FORWARD = "x1_1.device = forward(x0_1.device, side_1.device, w0.device)\n"
READS = "forward(x0_0.device, side_0.device, w0.device)"
UPDATE = "update(dwhb.host, into=(whc.host, shc.host))\n"
STORED = "offload(w2c.host, into=w2c.ssd)\n"
LOADED = "web.host, wec.host = prefetch(web.ssd, wec.ssd)"
TRANSFER = "prefetch takes values of one kind and unit from ssd to host, or from host to device"
GATHER = "gather takes all parts or pieces of one unit's parameters, and defines the whole on the device"
BROKEN = [
    # Values
    ("resident", "dx1_0.device = b", "free(x1_0.device)\ndx1_0.device = b", "x1_0.device was freed"),
    ("resident", "total.device = count(batch_0, batch_1)\n", "", "total.device is not defined"),
    ("resident", "dw1.device = zeros()\n", "", "dw1.device is not defined"),
    ("resident", "dwh.device = zeros()\n", "dwh.device = zeros()\n" * 2, "dwh.device is defined twice"),
    ("resident", "dx1_0.device = b", "free(dw1.device)\ndx1_0.device = b", "dw1.device is read after 1 of 2 micro-b"),
    ("horizontal", "dw1.device = prefetch(dw1.host)\n", "", "dw1.host is read after 1 of 2 micro-batches"),
    ("horizontal", "dw1.ssd = offload(dw1.host)\n", "", "dw1.host is read after 1 of 2 micro-batches"),
    ("horizontal", "dw1.host = o", "dw1a.host = o", "dw1.device is read after 1 of 2 micro-batches"),
    ("resident", "free(x1_0.device)", "free(x3_0.device)", "no boundary 3 between 2 layers"),
    ("resident", "free(x1_0.device)", "free(x1_2.device)", "micro-batch 2 is not one of 0 .. 1"),
    # Stages
    (
        "resident",
        "# backward h ",
        "# forward 1\nfree(x0_0.device)\n# forward 0\nfree(x1_1.device)\n# backward h ",
        "stage forward 0 was left and comes again",
    ),
    ("resident", "# forward 0 ", "# forward 1\nfree(x0_0.device)\n# forward 0 ", "forward 0 comes after forward 1"),
    (
        "resident",
        FORWARD,
        FORWARD.replace("_1.d", "_0.d").replace("x1_1", "x1_0"),
        "micro-batch 0 a second time in this",
    ),
    ("resident", FORWARD, "", "stage forward 0 has ended without micro-batch 1"),
    ("resident", "# backward h ", "# forward 2\nfree(total.device)\n# backward h ", "layer 2 is not one of 0 .. 1"),
    (
        "resident",
        f"x1_0.device = {READS}",
        "x1_0.device = embed(batch_0, we.device)",
        "embed does not belong in stage f",
    ),
    ("horizontal", "x1_1.device = forward(x0_1", "x1_0.device = forward(x0_0", "micro-batch 0 in a stage of another"),
    (
        "horizontal",
        "# forward 1 of 1\n",
        "# forward 1\n",
        "stage forward 1 is of all micro-batches, and others are of one each",
    ),
    (
        "horizontal",
        "# forward 0 of 1\n",
        "# forward e of 2\nfree(x0_1.host)\n# forward 0 of 1\n",
        "micro-batch 2 is not",
    ),
    (
        "horizontal",
        "# forward 0 of 1\n",
        "# drain\n# forward h of 0\nfree(x0_1.host)\n# forward 0 of 1\n",
        "stage forward h of 0 comes after backward e of 0",
    ),
    # Signatures
    ("resident", READS, "forward(w0.device)", "and none is named"),
    ("resident", READS, READS.replace("w0", "w1"), "forward reads w0.device here, not w1.device"),
    ("resident", READS, READS.replace(", w0.device", ""), "forward reads w0.device here, not nothing"),
    ("resident", READS, READS.replace("x0_0.device", "x0_0.host"), "forward reads x0_0.device here, not x0_0.host"),
    ("resident", READS, READS.replace("w0.device", "w0.device, batch_0"), "forward reads no batch_0 here"),
    ("resident", "dx1_0.device = b", "dx0_0.device = b", "backward defines no dx0_0.device here"),
    ("resident", "w1.device, into=(dw1", "w1.device, into=(dw0", "backward changes no dw0.device here"),
    ("resident", "count(batch_0, batch_1)", "count(batch_0)", "count reads every batch in order"),
    ("resident", "dwh.device = zeros()", "x0_0.device = zeros()", "one accumulator, dw or dside"),
    ("resident", "free(x1_0.device)", "free(x1_0.device, x0_0.device)", "free takes one value"),
    ("tiers", LOADED, LOADED.replace("host", "device"), TRANSFER),
    ("tiers", "s2c.host = prefetch(s2c.ssd)", "s2c.host = prefetch(w2c.ssd)", TRANSFER),
    ("tiers", LOADED, LOADED.replace("wec.ssd", "wec.host"), TRANSFER),
    ("tiers", "x1_0.ssd = offload(x1_0.host)", "x1_0.ssd = prefetch(x1_0.host)", TRANSFER),
    (
        "tiers",
        "x1_0.host = prefetch(x1_0.ssd)",
        "x1_0.host = offload(x1_0.ssd)",
        "from device to host, or from host to",
    ),
    ("tiers", "s2c.host = prefetch(s2c.ssd)", "s2c.host = prefetch()", TRANSFER),
    ("tiers", "gather(w1.device[0], w1.device[1])", "gather(w1.device[0], w0.device[1])", GATHER),
    ("tiers", "w1.device = gather(", "w1a.device = gather(", GATHER),
    ("tiers", "w1.device = gather(", "gather(", GATHER),
    ("tiers", "normh.device = norm", "dw2a.host = alias(dwh.device)\nnormh.device = norm", "alias takes one"),
    ("tiers", "web.host = empty()", "seb.host = empty()", "empty takes nothing, and defines a part"),
    ("tiers", "norm2.device = norm(", "norm1.device = norm(", "norm takes one gradient"),
    ("tiers", "into=(wea.host, ", "into=(w1a.host, ", "update takes a gradient and, where gradients are clipped"),
    ("tiers", "into=(w2a.host, w2b.host, ", "into=(", "update takes a gradient"),
    ("clipped", "clip(norme.device, ", "clip(dwe.device, ", "clip takes the norms, and defines the scale"),
    # Updates
    ("tiers", UPDATE, UPDATE * 2, "whc.host is updated twice"),
    ("tiers", UPDATE, f"wh.device[0] = prefetch(wha.host, whc.host)\n{UPDATE}", "whc.host is used before its late upd"),
    ("tiers", UPDATE, "", "whc.host is empty until its update"),
    ("tiers", STORED, "", "w2c.ssd is not what the update has made"),
    ("tiers", "offload(s2c.host, into=s2c.ssd)\n", "", "at the end, s2c.ssd is not what the update has made"),
    ("tiers", STORED, f"w2c.host = prefetch(w2c.ssd)\n{STORED}", "w2c.ssd is not what the update has made"),
    ("tiers", STORED, f"w2c.host = empty()\n{STORED}", "w2c.host would lose what the update has made"),
    (
        "one memory",
        "dx1_0.device = b",
        "w1a.host = empty()\ndx1_0.device = b",
        "w1a.host changes while w1.device is in",
    ),
    ("one memory", "free(x1_1.device)\n", "", "x1_1.device changes its memory while it is alive"),
    ("clipped", "norm1.device = norm(dw1.device)\n", "", "norm1.device is not defined"),
    # The end
    ("tiers", "dw0a.host, dw0b.host = o", "dw0a.host = o", "at the end, dw0b.host is not at home"),
    ("clipped", "scale.host = clip", "scale.device = clip", "at the end, scale.host is not at home"),
    ("tiers", "free(s2c.host)\n", "", "at the end, s2c.host is left behind"),
    ("tiers", "free(x1_0.ssd)\n", "", "at the end, x1_0.ssd is left behind"),
    ("tiers", "free(dw1.device)\n", "", "at the end, dw1.device is left behind"),
    ("tiers", "peak device ", "peak device 1", "at the end, the peaks are not (('device', 1"),
]


@pytest.mark.parametrize(("good", "old", "new", "complaint"), BROKEN)
def test_a_broken_law_is_named(good, old, new, complaint):
    assert old in GOOD[good]
    assert complaint in _complaint(good, GOOD[good].replace(old, new, 1))


def test_the_good_ones_pass():
    for name, text in GOOD.items():
        verify(parse(text), PLACEMENTS[name], StepContext(late=name in LATE))
    with pytest.raises(ProgramError, match="is not defined"):  # without a placement, homes are not known
        verify(parse(GOOD["tiers"]))


class TestText(expecttest.TestCase):
    def test_error(self):
        text = str(snake(vertical(3, 2))).replace("# backward 2", "free(x1_0.device)\n# backward 2")
        self.assertExpectedInline(
            _complaint("resident", text),
            """after snake, line 26: dx1_0.device = backward(x1_0.device, dx2_0.device, w1.device, into=dw1.device): x1_0.device was freed""",
        )


LATE_HOME = "prefetch(w2c.host, into=w2c.device)\nfree(w2c.host)\n"
LATE_UPDATE = "w2c.host = empty()\nw2d.host = empty()\nupdate(dw2b.host, into=(w2c.host, w2d.host, s2c.host))\n"
WITHOUT_C = "w2d.host = empty()\nupdate(dw2b.host, into=(w2d.host, s2c.host))\n"
USED = "x3_0.device = forward("


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ([("prefetch(w2a.host, into=w2a.device)\n", "")], "at the end, w2a.device is not what the update has made"),
        ([(LATE_HOME, "")], "w2c.device is not what the update has made"),
        ([(LATE_HOME, ""), (LATE_UPDATE, WITHOUT_C)], "w2c.device is used before its late update"),
        (
            [(LATE_HOME, LATE_HOME.splitlines()[0] + "\n"), (USED, LATE_HOME + USED)],
            "w2c.device changes while w2.device is in use",
        ),
        (
            [(LATE_HOME, ""), (LATE_UPDATE, LATE_UPDATE.replace("\nupdate", "\n" + LATE_HOME + "update"))],
            "w2c.host is used before its late update",
        ),
    ],
)
def test_broken_on_the_device(changes, complaint):
    text = GOOD["on the device"]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    assert complaint in _complaint("on the device", text)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_an_update_left_out(alpha):
    """Nothing is undefined or empty then, but parts are not what they should be."""
    resident = replace(SMALL, parameter_ratio=1.0, optimizer_ratio=1.0, alpha=alpha, has_master=False)
    placement = place(1, 1, options=resident)
    program = (flush(placement) if alpha else lowered((1, 1), placement))[-1]
    ops = [op for op in program.ops if op.verb != "update" or op.into[0].unit != 0]
    with pytest.raises(ProgramError, match=f"at the end, w0a has not had its {'late ' if alpha else ''}update"):
        verify(replace(program, ops=tuple(ops)), placement, StepContext(late=bool(alpha)))


@pytest.mark.parametrize("stage", [Stage("forward", "e"), Stage("forward", 1), Stage("forward", "h")], ids=str)
def test_stage_missing(stage):
    program = vertical(2, 1, shape=StepShape(training=False))
    missing, ops = set(), []
    for op in program.ops:  # without what needs its results, too
        if op.stage == stage or missing & set(op.reads):
            missing.update(op.results)
        else:
            ops.append(op)
    with pytest.raises(ProgramError, match=f"after drop: stage {stage} is missing"):
        verify(program.with_ops(ops, made_by="drop"))


@pytest.mark.parametrize(("number", "stage"), [(0, "forward e of 1"), (1, "forward 0 of 1"), (2, "forward h of 1")])
def test_a_micro_batch_stops_early(number, stage):
    program = horizontal(1, 2)
    ops = [op for op in program.ops if op.stage.micro_batch == 0]
    rest = [op for op in program.ops if op.stage.micro_batch == 1]
    with pytest.raises(ProgramError, match=f"after drop: stage {stage} is missing"):
        verify(program.with_ops(ops + rest[:number], "drop"))


def test_forwards_follow_each_other():
    program = horizontal(1, 2, shape=StepShape(outside=frozenset({"h"})))
    turned = sorted(program.ops, key=lambda op: (op.stage.phase == "backward", -(op.stage.micro_batch or 0)))
    with pytest.raises(ProgramError, match="stage forward e of 0 comes after forward h of 1"):
        verify(program.with_ops(turned, "turn"))


def test_what_no_text_can_say():
    program = vertical(2, 2)
    first = replace(program.ops[0], verb="jump")
    odd = Op("free", (Value("q", 1, 0),), Stage("forward", "e"))
    for ops, complaint in (
        (program.ops[:-1], "backward e has ended without micro-batch 1"),
        ((first, *program.ops[1:]), "no verb is called jump"),
        ((odd, *program.ops), "no kind is called q"),
    ):
        with pytest.raises(ProgramError, match=complaint):
            verify(program.with_ops(ops, "odd"))


def _complaint(good, text) -> str:
    with pytest.raises(ProgramError) as caught:
        verify(parse(text), PLACEMENTS[good], StepContext(late=good in LATE))
    return caught.value.message
