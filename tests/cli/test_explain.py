"""A plan in words: what is printed of a plan that is made up."""

from __future__ import annotations

import json
import math

import expecttest
import pytest
from standin import stand_in

from gs_compile.cli.report.explain import as_dict, report
from gs_compile.planner.summary import paragraph, table

GiB = 2**30


@pytest.fixture
def plan():
    return stand_in()


def test_the_report(plan):
    expecttest.assert_expected_inline(
        report(plan),
        """\
gpt-65b on a100
vertical: 32 micro-batches of 2 samples of 2048 tokens, alpha 0.13, split masters, 12% of activations saved
a step takes 312 s in simulation, 300 s by the linear program
419 tokens/s, 164 TFLOP/s (3 x the FLOPs of a forward, nothing for what is recomputed, over the seconds of a step)

Where data is stored:
                               device       host        ssd  in host memory
  parameters                        -   60.0 GiB   61.0 GiB  50%, 25% on the device
  optimizer states                  -          -  730.0 GiB  0%
  checkpoints                       -   80.0 GiB          -  100%
  gradients                         -    3.0 GiB          -
  peak, working buffers too  30.0 GiB  398.0 GiB  791.0 GiB
  may be used                80.0 GiB  400.0 GiB    4.0 TiB

What each lane does in a step:
  lane        works  busy      moves  of that
  compute     300 s   96%          -
  h2d        31.2 s   10%  250.0 GiB  parameters 240.0 GiB, checkpoints 10.0 GiB
  ssd_write   250 s   80%  730.0 GiB  optimizer states 730.0 GiB

What would make it faster:
  48.0 GiB more host memory: 9% faster
  more device memory: nothing

Notes:
  the horizontal order is half as fast

Other settings, by the linear program:
                     step  tokens/s  throughput
  16 micro-batches  170 s       386      -11.8%

SSD wear: 35.0 TiB written to SSD in a day""",
    )


def test_without_a_device_of_its_own_the_host_is_both(plan):
    plan.profile.separate, plan.profile.tiers = False, ("host", "ssd")
    headings = next(line for line in report(plan).splitlines() if line.endswith("in host memory"))
    assert headings.split() == ["host", "ssd", "in", "host", "memory"]
    assert "on the device" not in paragraph(plan)


def test_what_there_is_not_is_not_said(plan):
    plan.binding = plan.notes = plan.alternatives = ()
    plan.num_micro_batches = plan.workload.micro_batch_size = 1
    text = report(plan)
    assert "1 micro-batch of 1 sample of 2048 tokens" in text
    assert not [heading for heading in ("What would make it faster", "Notes", "Other settings") if heading in text]
    assert "faster" not in paragraph(plan)


def test_the_paragraph(plan):
    expecttest.assert_expected_inline(
        paragraph(plan),
        """Plan of gpt-65b on a100, vertical: 32 micro-batches of 2 samples of 2048 tokens, alpha 0.13, split masters, 12% of activations saved. In host memory: 50% of parameters, 0% of optimizer states, 100% of checkpoints. In device memory: 25% of parameters. A step takes 312 s: 419 tokens/s, 164 TFLOP/s. Busy lanes: compute 96%, ssd_write 80%, h2d 10%. At its peak it holds 30.0 GiB on the device, 398.0 GiB in host memory, 791.0 GiB on SSD. What would make it faster: 48.0 GiB more host memory: 9% faster; more device memory: nothing. The horizontal order is half as fast.""",
    )


def test_the_dict_is_json_with_few_digits(plan):
    plan.bound_seconds = math.inf
    found = json.loads(json.dumps(as_dict(plan), allow_nan=False))
    assert found["seconds"] == 312.457
    assert found["bound_seconds"] is None
    assert found["batch_size"] == 64
    assert found["homes"]["w"] == {"host": 60 * GiB, "ssd": 61 * GiB}
    assert found["traffic"] == {"h2d": {"w": 240 * GiB, "x": 10 * GiB}, "ssd_write": {"s": 730 * GiB}}
    assert found["lanes"]["h2d"] == {"seconds": 31.25, "share": 0.1}
    assert found["budgets"]["host"] == 400 * GiB
    assert found["history"][1] == {"num_micro_batches": 32, "seconds": 300.0, "tokens_per_second": 437.0}
    assert found["alternatives"] == [{"label": "16 micro-batches", "seconds": 170.0, "tokens_per_second": 385.5}]


def test_a_table_ends_numbers_together_and_folds_nothing():
    lines = table(("lane", "works"), [("compute", "300 s"), ("h2d", "1 s")], right=("works",)).splitlines()
    assert lines == ["lane     works", "compute  300 s", "h2d        1 s"]
    long = "[bold]" + "x" * 500 + "[/]"
    assert table(("a",), [(long,)]).splitlines() == ["a", long]
