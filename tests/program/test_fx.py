from __future__ import annotations

import copy

import expecttest
import pytest
from hypothesis import given
from tiers import lowered, options, place, tiered_steps

from gs_compile.errors import ProgramError
from gs_compile.program import fx
from gs_compile.program.fx import graph_module
from gs_compile.program.ir import VERBS, Stage, Value


class TestText(expecttest.TestCase):
    def test_code(self):
        code = graph_module(lowered((1, 1))[-1]).code.strip().splitlines()
        self.assertExpectedInline(
            "\n".join([*code[:3], *code[4:6], code[-1]]),
            """\
def forward(self, batch_0, we_device, w0_device, wh_device):
    x0_0_device = gs_compile_program_fx_embed(batch_0, we_device, unit = 'e', micro_batch = 0)
    x1_0_device = gs_compile_program_fx_forward(x0_0_device, w0_device, unit = 0, micro_batch = 0)
    head_h_0 = gs_compile_program_fx_head(x1_0_device, batch_0, wh_device, unit = 'h', micro_batch = 0, into = (dwh_device,));  wh_device = None
    loss_0_device = head_h_0[0]
    return {'dwh.device': dwh_device, 'loss_0.device': loss_0_device, 'dw0.device': dw0_device, 'dwe.device': dwe_device}""",
        )


def test_it_is_no_code():
    module = graph_module(lowered((1, 1))[-1])
    assert "class Step(torch.nn.Module)" in module.print_readable(print_output=False)
    with pytest.raises(ProgramError, match="embed is a word of a step program, not code"):
        module(None, None, None, None)


@given(tiered_steps(), options())
def test_every_operation_is_a_node_that_names_its_values(step, options):
    for program in lowered(step, place(*step, options)):
        module = copy.deepcopy(graph_module(program))
        module.graph.eliminate_dead_code()  # operations that change accumulators are not dead
        module.graph.lint()
        nodes = [node for node in module.graph.nodes if "op" in node.meta]
        assert [node.meta["op"] for node in nodes] == list(program.ops)
        for node, op in zip(nodes, program.ops, strict=True):
            assert tuple(each.meta["value"] for each in node.args) == op.reads
            assert tuple(each.meta["value"] for each in node.kwargs.get("into", ())) == op.into


def test_nodes_say_what_and_where():
    nodes = {node.name: node for node in graph_module(lowered((2, 1))[-1]).graph.nodes}
    meta = nodes["dx1_0_device"].meta
    expected = {"verb": "backward", "kind": "dx", "unit": 1, "micro_batch": 0, "tier": "device"}
    expected |= {"stage": Stage("backward", 1), "value": Value("dx", 1, 0)}
    assert {key: meta[key] for key in expected} == expected
    assert nodes["dx1_0_device"].kwargs == {"unit": 1, "micro_batch": 0, "into": (nodes["dw1_device"],)}
    assert nodes["batch_0"].op == "placeholder"
    assert nodes["batch_0"].meta["tier"] is None
    assert nodes["loss_0_device"].args == (nodes["head_h_0"], 0)
    assert nodes["loss_0_device"].meta["kind"] == "loss"


def test_every_verb_has_its_function():
    assert fx.TARGETS.keys() == VERBS.keys()
    for verb, target in fx.TARGETS.items():
        assert getattr(fx, verb) is target
        assert target.__doc__ == VERBS[verb]
