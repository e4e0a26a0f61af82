"""Hooks on the forward of modules, of the compiled one and of those inside."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import zoo
from zoo import GPT, assert_same_gradients, compile_model, gradients, train

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
