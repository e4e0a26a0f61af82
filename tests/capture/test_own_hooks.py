"""Hooks on the forward of modules, of the compiled one and of those inside, and what takes the place of a method."""

from __future__ import annotations

from functools import partial
from types import MethodType

import pytest
import torch
import zoo
from tiered import adamw, options
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.flop_counter import FlopCounterMode
from zoo import GPT, assert_same_gradients, compile_model, gradients, loss_of, train

from gs_compile.capture.given_up import watch
from gs_compile.codegen.compiled import compilations_of
from gs_compile.errors import GraphBreakError, OptimizerError, ReleasedParameterError, UncapturedWarning
from gs_compile.model.tiered_call import TieredCall

batch = partial(zoo.batch, marked=False)  # as users give it


@pytest.mark.filterwarnings("ignore:the model.s blocks are of:gs_compile.errors.UniformityWarning")
@pytest.mark.parametrize("on_all", [False, True])
def test_hooks_that_come_later_are_called(on_all):
    def change(module, _, output):
        return output + 1.0 + output.square() if module is model.blocks[-1] else None

    model, (ids, _) = compile_model(GPT()), batch()
    with torch.no_grad():
        before = model(ids)[0]
        hook = (register_module_forward_hook if on_all else model.blocks[-1].register_forward_hook)(change)
        assert not torch.equal(model(ids)[0], before)
        hook.remove()
        torch.testing.assert_close(model(ids)[0], before)


@pytest.mark.filterwarnings("ignore:the model.s blocks are of:gs_compile.errors.UniformityWarning")
def test_a_hook_may_keep_a_copy_of_what_the_last_block_makes():
    """Fault: the copy was taken for a hidden state that leaves the stack, and the loss for a part of the last block."""
    kept = {}
    for each in (model := compile_model(GPT(), 2), plain := GPT()):
        each.blocks[-1].register_forward_hook(lambda module, _, output: kept.update({module: output.detach().clone()}))
    found, expected = train(model, *batch()), train(plain, *batch())
    assert_same_gradients(found[1], expected[1])
    torch.testing.assert_close(kept[model.blocks[-1]], kept[plain.blocks[-1]])


class Watched(GPT):
    def __init__(self):
        super().__init__(num_layers=3)
        self.means = {}

    def note(self, number, module, args, output):
        self.means[number] = output.detach().mean()


@pytest.mark.parametrize("refers", ["by its closure", "as a bound method"])
def test_a_hook_may_keep_a_mean_of_what_each_block_makes(refers):
    """Fault: shares of the means, and what the hook's model has beside its blocks, were taken for blocks."""

    def hooked(model):
        for number, block in enumerate(model.blocks):
            by_closure = partial(lambda number, *given: model.note(number, *given), number)
            block.register_forward_hook(by_closure if "closure" in refers else partial(model.note, number))
        return model

    model, plain = compile_model(hooked(Watched()), 2), hooked(Watched())
    for each in (model, plain):
        train(each, *batch())
    assert {number: each.item() for number, each in model.means.items()} == pytest.approx(
        {number: each.item() for number, each in plain.means.items()}, abs=1e-6
    )
    assert_same_gradients(gradients(model), gradients(plain))
    (compilation,) = compilations_of[model.head.weight]
    assert {each.split.num_layers for each in compilation.models.values()} == {3}


class Replaced(zoo.Feed):
    def forward(self, x):
        return zoo.Feed.forward(self, x)


def doubled(self, x):
    return 2 * zoo.Feed.forward(self, x)


@pytest.mark.parametrize("name", ["forward", "__code__"])
def test_a_method_that_is_replaced_after_the_first_call_runs(name, monkeypatch):
    """As where a notebook loads a module anew: in its class, or the code of the function."""
    model, (ids, _) = compile_model(GPT(Replaced), 2), batch()
    with torch.no_grad():
        before = model(ids)[0]
        owner, value = (Replaced, doubled) if name == "forward" else (Replaced.forward, doubled.__code__)
        monkeypatch.setattr(owner, name, value)
        assert not torch.equal(model(ids)[0], before)
        monkeypatch.undo()
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


def test_a_hook_on_the_backward_of_a_module_is_refused_by_name():
    model = compile_model(GPT())
    hook = model.blocks[1].register_full_backward_hook(print)
    with pytest.raises(GraphBreakError, match="has a hook on its backward: remove the hook") as caught:
        loss_of(model, *batch())
    assert "compiled autograd" not in str(caught.value)  # which Dynamo would have it be
    hook.remove()
    loss_of(model, *batch()).backward()


def test_a_hook_that_breaks_the_graph_ahead_of_all_blocks_is_named():
    """Fault: the module that has it was captured alone, and the model said to have no blocks."""
    model = compile_model(GPT())
    hook = next(model.children()).register_forward_hook(lambda module, _, output: output + output.sum().item())
    with pytest.raises(GraphBreakError, match=r"Dynamo breaks it at .*zoo\.py:\d+: .*\n.*Tensor.item"):
        loss_of(model, *batch())
    hook.remove()
    loss_of(model, *batch()).backward()


@pytest.mark.filterwarnings("ignore:the model.s blocks are of:gs_compile.errors.UniformityWarning")
@pytest.mark.filterwarnings("ignore:this evaluation runs as plain:gs_compile.errors.UncapturedWarning")
def test_hooks_by_which_layers_are_others_say_how_they_may_run(tmp_path):
    """As of experiments that patch what one layer gives into another. Fault: that was said of layers left out alone."""
    torch._dynamo.reset()
    model, seen = GPT(num_layers=4), {}
    optimizer = adamw([{"params": list(model.parameters())}])
    model.compile(backend="greedysnake", options=options(tmp_path, outputs="all"))
    loss_of(model, *batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    hooks = [model.blocks[0].register_forward_hook(lambda *given: seen.update(found=given[-1]))]
    hooks.append(model.blocks[3].register_forward_hook(lambda *given: given[-1] + seen["found"]))
    with pytest.raises(OptimizerError, match=r"A hook that makes a layer another one .* under torch.no_grad\(\)"):
        loss_of(model, *batch())
    with torch.no_grad():
        patched = loss_of(model, *batch())
        for hook in hooks:
            hook.remove()
        assert not torch.equal(loss_of(model, *batch()), patched)
    optimizer.engine.tiers.close()


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


def test_a_step_inside_of_a_dispatch_mode_is_told_why_nothing_is_captured(teacher):
    """In a run, and in its first step."""
    words = "Inside of FlopCounterMode Dynamo captures nothing"
    model = GPT()
    optimizer = adamw([{"params": list(model.parameters())}])
    model.compile(backend="greedysnake")
    with FlopCounterMode(display=False):
        loss_of(model, *batch()).backward()
        with pytest.raises(OptimizerError, match=words):
            optimizer.step()
        with pytest.raises(ReleasedParameterError, match=words):
            loss_of(teacher, *batch()).backward()


@pytest.mark.parametrize(
    "replaced", [lambda forward: lambda self, *given: forward(self, *given), torch.autocast("cpu", enabled=False)]
)
def test_parameters_have_their_names_where_the_forward_was_replaced(replaced):
    """As TRL replaces it for its head, and Accelerate for autocast: a commit is compared with the model by names."""
    model = GPT(num_layers=2)
    model.forward = MethodType(replaced(GPT.forward), model)
    train(compile_model(model), *batch())
    (compilation,) = compilations_of[next(model.parameters())]
    names = {entry.path for entry in compilation.captured.inputs if entry.role == "parameter"}
    assert names == dict(model.named_parameters()).keys()


def test_one_watch_stays_among_torchs_hooks():
    """Fault: each reset of Dynamo left one more there, with what Dynamo had kept by then, and each step called all."""
    found, number = watch(), len(_global_optimizer_pre_hooks)
    torch._dynamo.reset()
    assert watch() is found
    assert len(_global_optimizer_pre_hooks) == number
