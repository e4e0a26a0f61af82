"""The laws of a horizontal step: good text, one change, the complaint."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiers import Options, place

from gs_compile.errors import ProgramError
from gs_compile.passes.baselines.horizontal import horizontal
from gs_compile.passes.lower import StepSpec, lower
from gs_compile.placement.verify import verify
from gs_compile.program.ir import StepShape
from gs_compile.program.text import parse

SSD_SUMS = replace(place(2, 2, options=Options()), schedule="horizontal", gradient_ratio=0.0)
GOOD = lower(StepSpec(2, 2, placement=SSD_SUMS))[-1].text(fold=False)
BROKEN = {
    "sum not fetched": ("dw1.device = prefetch(dw1.host)\n", "", "dw1.host is read after 1 of 2 micro-batches"),
    "sum ends": ("dw1.ssd = offload(dw1.host)\n", "", "dw1.host is read after 1 of 2 micro-batches"),
    "sum updates too early": (
        "dw1.host = offload(dw1.device)\n",
        "dw1a.host = offload(dw1.device)\n",
        "dw1.device is read after 1 of 2 micro-batches",
    ),
    "other micro-batch": (
        "x1_1.device = forward(x0_1.device, w0.device)",
        "x1_0.device = forward(x0_0.device, w0.device)",
        "micro-batch 0 in a stage of another",
    ),
    "stage of all": ("# forward 1 of 1\n", "# forward 1\n", "stage forward 1 is of another order than horizontal"),
    "micro-batch out of range": (
        "# forward 0 of 1\n",
        "# forward e of 2\nfree(x0_1.host)\n# forward 0 of 1\n",
        "micro-batch 2 is not one of 0 .. 1",
    ),
    "back to another micro-batch": (
        "# forward 0 of 1\n",
        "# drain\n# forward h of 0\nfree(x0_1.host)\n# forward 0 of 1\n",
        "stage forward h of 0 comes after backward e of 0",
    ),
    "backward before another's": (
        "# backward h of 1\n",
        "# backward h of 1\nfree(w0a.ssd)\n# backward e of 0\n",
        "stage backward e of 0 was left and comes again",
    ),
}


@pytest.mark.parametrize("law", BROKEN)
def test_broken(law):
    old, new, complaint = BROKEN[law]
    assert old in GOOD
    with pytest.raises(ProgramError) as caught:
        verify(parse(GOOD.replace(old, new, 1)), SSD_SUMS)
    assert complaint in str(caught.value)


def test_forwards_follow_each_other():
    program = horizontal(1, 2, shape=StepShape(outside=frozenset({"h"})))
    turned = sorted(program.ops, key=lambda op: (op.stage.phase == "backward", -(op.stage.micro_batch or 0)))
    with pytest.raises(ProgramError, match="stage forward e of 0 comes after forward h of 1"):
        verify(program.with_ops(turned, "turn"))


@pytest.mark.parametrize(("number", "stage"), [(0, "forward e of 1"), (1, "forward 0 of 1"), (2, "forward h of 1")])
def test_a_micro_batch_stops_early(number, stage):
    program = horizontal(1, 2)
    ops = [op for op in program.ops if op.stage.micro_batch == 0]
    rest = [op for op in program.ops if op.stage.micro_batch == 1]
    with pytest.raises(ProgramError, match=f"after drop: stage {stage} is missing"):
        verify(program.with_ops(ops + rest[:number], "drop"))
