from __future__ import annotations

import copy

import expecttest
import pytest
import torch
from hypothesis import given, settings
from tiers import Options, TieredToy, options, place, tiered_steps
from toy import Toy, steps

from gs_compile.errors import ProgramError
from gs_compile.passes.lower import StepSpec, lower
from gs_compile.passes.vertical import vertical
from gs_compile.program import fx
from gs_compile.program.fx import graph_module, run
from gs_compile.program.ir import VERBS, Stage, StepShape, Value
from gs_compile.program.reference import reference


class TestText(expecttest.TestCase):
    def test_code(self):
        self.assertExpectedInline(
            graph_module(lower(StepSpec(1, 1))[-1]).code.strip(),
            """\
def forward(self, batch_0, we_device, w0_device, wh_device):
    x0_0_device = gs_compile_program_fx_embed(batch_0, we_device, unit = 'e', micro_batch = 0)
    x1_0_device = gs_compile_program_fx_forward(x0_0_device, w0_device, unit = 0, micro_batch = 0)
    dwh_device = gs_compile_program_fx_zeros(unit = 'h', micro_batch = None)
    head_h_0 = gs_compile_program_fx_head(x1_0_device, batch_0, wh_device, unit = 'h', micro_batch = 0, into = (dwh_device,));  wh_device = None
    loss_0_device = head_h_0[0]
    dx1_0_device = head_h_0[1];  head_h_0 = None
    free_x1_0_device = gs_compile_program_fx_free(x1_0_device, unit = 1, micro_batch = 0);  x1_0_device = free_x1_0_device = None
    dw0_device = gs_compile_program_fx_zeros(unit = 0, micro_batch = None)
    dx0_0_device = gs_compile_program_fx_backward(x0_0_device, dx1_0_device, w0_device, unit = 0, micro_batch = 0, into = (dw0_device,));  w0_device = None
    free_x0_0_device = gs_compile_program_fx_free(x0_0_device, unit = 0, micro_batch = 0);  x0_0_device = free_x0_0_device = None
    free_dx1_0_device = gs_compile_program_fx_free(dx1_0_device, unit = 1, micro_batch = 0);  dx1_0_device = free_dx1_0_device = None
    dwe_device = gs_compile_program_fx_zeros(unit = 'e', micro_batch = None)
    embed_backward_e_0 = gs_compile_program_fx_embed_backward(batch_0, dx0_0_device, we_device, unit = 'e', micro_batch = 0, into = (dwe_device,));  batch_0 = we_device = embed_backward_e_0 = None
    free_dx0_0_device = gs_compile_program_fx_free(dx0_0_device, unit = 0, micro_batch = 0);  dx0_0_device = free_dx0_0_device = None
    return {'dwh.device': dwh_device, 'loss_0.device': loss_0_device, 'dw0.device': dw0_device, 'dwe.device': dwe_device}""",
        )

    def test_readable(self):
        text = graph_module(vertical(1, 1)).print_readable(print_output=False)
        assert "class Step(torch.nn.Module)" in text

    def test_run_alone(self):
        toy = Toy(1, 1, StepShape())
        with pytest.raises(ProgramError) as caught:
            graph_module(vertical(1, 1))(*toy.inputs().values())
        self.assertExpectedInline(
            str(caught.value),
            """embed is a word of a step program, not code: run the graph with program.fx.run""",
        )


@settings(deadline=None, max_examples=40)
@given(steps())
def test_run_equals_the_reference(step):
    num_layers, num_micro_batches, shape = step
    toy = Toy(num_layers, num_micro_batches, shape, torch.float32)
    for program in lower(StepSpec(num_layers, num_micro_batches, shape=shape)):
        module = graph_module(program)
        module.graph.lint()
        expected = reference(program, toy, toy.inputs())
        torch.testing.assert_close(run(module, toy, toy.inputs()), expected, rtol=0, atol=0)


@settings(deadline=None, max_examples=30)
@given(tiered_steps(), options())
def test_run_on_tiers_equals_the_reference(step, options):
    """Updates and transfers change their inputs in place there too."""
    num_layers, num_micro_batches, shape = step
    placement = place(*step, options)
    for program in lower(StepSpec(num_layers, num_micro_batches, shape=shape, placement=placement))[3:]:
        toy = TieredToy(*step, placement=placement)
        homes = [toy.home(), toy.home()]
        expected = reference(program, toy, homes[0] | toy.given())
        module = graph_module(program)
        module.graph.lint()
        inputs = toy.given() | homes[1]
        torch.testing.assert_close(run(module, toy, inputs), expected, rtol=0, atol=0)
        torch.testing.assert_close(homes[1], homes[0], rtol=0, atol=0)


def test_parts_and_pieces_have_names_too():
    placement = place(1, 2, options=Options(parameter_ratio=0.5, alpha=0.25))
    graph = graph_module(lower(StepSpec(1, 2, placement=placement, late=True))[-1]).graph
    nodes = {node.name: node for node in graph.nodes}
    assert nodes["w0_device_piece1"].meta["verb"] == "prefetch"
    assert nodes["w0c_host"].meta["part"] == "c"
    assert nodes["dw0b_host"].op == "placeholder"


def test_a_copy_without_dead_code_is_the_same_step():
    toy = Toy(2, 2, StepShape())
    program = lower(StepSpec(2, 2))[-1]
    module = copy.deepcopy(graph_module(program))
    module.graph.eliminate_dead_code()
    module.recompile()
    expected = reference(program, toy, toy.inputs())
    torch.testing.assert_close(run(module, toy, toy.inputs()), expected, rtol=0, atol=0)


def test_nodes_say_what_and_where():
    nodes = {node.name: node for node in graph_module(lower(StepSpec(2, 1))[-1]).graph.nodes}
    meta = nodes["dx1_0_device"].meta
    assert {key: meta[key] for key in ("verb", "kind", "unit", "micro_batch", "tier", "stage", "value")} == {
        "verb": "backward",
        "kind": "dx",
        "unit": 1,
        "micro_batch": 0,
        "tier": "device",
        "stage": Stage("backward", 1),
        "value": Value("dx", 1, 0),
    }
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
