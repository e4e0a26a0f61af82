"""Hooks on the forward of modules, of the compiled one and of those inside."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import zoo
from tiered import adamw, options
from zoo import GPT, assert_same_gradients, compile_model, gradients, loss_of, train

from gs_compile.errors import CaptureError, OptimizerError, UncapturedWarning
from gs_compile.model.tiered_call import TieredCall

batch = partial(zoo.batch, marked=False)  # as users give it


@pytest.mark.filterwarnings("ignore:the model.s blocks are of:gs_compile.errors.UniformityWarning")
def test_hooks_that_come_later_are_called():
    model, (ids, _) = compile_model(GPT()), batch()
    with torch.no_grad():
        before = model(ids)[0]
        hook = model.blocks[-1].register_forward_hook(lambda _, __, output: output + 1.0 + output.square())
        assert not torch.equal(model(ids)[0], before)
        hook.remove()
        torch.testing.assert_close(model(ids)[0], before)


def test_hooks_of_the_compiled_model_itself_run_as_they_are_written(capsys):
    seen = []

    def look(_, args):
        print(args[0].float().mean().item())  # noqa: T201  at which Dynamo breaks
        seen.append(args[0].square().sum())

    def change(factor, _, args, output):
        return output[0], factor * output[1]

    def run(model):
        hooks = [model.register_forward_pre_hook(look)]
        losses = [train(model, *batch())[0].item()]
        hooks += [model.register_forward_hook(partial(change, 2.0))]
        losses += [train(model, *batch())[0].item()]
        for hook in hooks:
            hook.remove()
        return losses, gradients(model), capsys.readouterr().out

    torch.manual_seed(0)
    plain, model = GPT(num_layers=2), GPT(num_layers=2)
    model.load_state_dict(plain.state_dict())
    (losses, expected, printed), found = run(plain), run(compile_model(model, 2))
    assert found[0] == pytest.approx(losses)
    assert_same_gradients(found[1], expected)
    assert found[2] == printed
    assert len(seen) == 4


def test_hooks_on_the_backward_of_modules_inside_are_named():
    """Dynamo's own hint, compiled autograd, does not help here."""
    model = compile_model(GPT(), 2)
    model.blocks[0].register_full_backward_hook(print)
    with pytest.raises(CaptureError) as caught:
        train(model, *batch())
    assert "register_full_backward_hook" in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A model on storage, of as many layers as no other here, after a step."""
    torch._dynamo.reset()
    model = GPT(num_layers=3)
    optimizer = adamw([{"params": list(model.parameters())}])
    model.compile(backend="greedysnake", options=options(tmp_path_factory.mktemp("teacher"), outputs="all"))
    loss_of(model, *batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    yield model
    optimizer.engine.tiers.close()


def taught(student, where, teacher, monkeypatch):
    """What a teacher that is called in a hook of a module gives in a step of a student, and the calls on its tiers."""
    (ids, _), given, ran, run = batch(), [], [], TieredCall._run_forward

    @torch.no_grad()
    def teach(*_):
        given.append(teacher(ids)[0])

    monkeypatch.setattr(TieredCall, "_run_forward", lambda self: ran.append(self) or run(self))
    hook = where.register_forward_hook(teach)
    train(student, *batch())
    hook.remove()
    return given[0], len(ran)


@pytest.mark.parametrize("student", [GPT, lambda: compile_model(GPT(), 2)], ids=["as it is", "compiled"])
def test_a_teacher_in_a_hook_runs_on_its_tiers(student, teacher, monkeypatch):
    with torch.no_grad():
        wanted = teacher(batch()[0])[0]
    model = student()
    found, number = taught(model, model, teacher, monkeypatch)
    torch.testing.assert_close(found, wanted)
    assert number == 1


@pytest.mark.filterwarnings("ignore:the model.s blocks are of:gs_compile.errors.UniformityWarning")
def test_a_teacher_in_another_graph_is_named(teacher, monkeypatch):
    """Dynamo has it in the graph of who calls it: of another backend, or of this one."""
    model = GPT()
    model.compile(backend="eager")
    with pytest.warns(UncapturedWarning, match="as a teacher in its hooks, runs on the tiers"):
        found, number = taught(model, model, teacher, monkeypatch)
    assert number == 0
    with torch.no_grad():
        torch.testing.assert_close(found, teacher(batch()[0])[0])
    model = compile_model(GPT(), 2)
    with pytest.raises(OptimizerError, match="call a teacher on the tiers"):
        taught(model, model.blocks[0], teacher, monkeypatch)
