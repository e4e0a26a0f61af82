"""Hooks of users, and hidden states, in a model that Trainer trains layer-major."""

from __future__ import annotations

import pytest
import torch
from test_trainer import attached, trainer
from zoo import WIDTH, batch, small

import gs_compile.hf
from gs_compile.errors import OptimizerError, OptionError


@pytest.mark.parametrize("moments", [(True,), pytest.param((False, True), marks=pytest.mark.slow)], ids=str)
def test_hidden_states_and_forward_hooks_are_the_whole_batchs(tmp_path, moments):
    """In evaluation; before and after a step."""
    mine, seen = attached(tmp_path, "gpt2", max_steps=1), []
    mine.model.transformer.h[0].register_forward_hook(lambda *given: seen.append((given[-1], given[-1].shape)) and None)
    ids, _ = batch()
    for trained in moments:
        if trained:
            mine.train()
        reference = small("gpt2").eval()
        reference.load_state_dict(mine.model.state_dict())
        seen.clear()
        with torch.no_grad():
            found = mine.model.eval()(input_ids=ids, output_hidden_states=True)
            wanted = reference(input_ids=ids, output_hidden_states=True)
        assert len(found.hidden_states) == len(wanted.hidden_states)
        for one, other in zip(found.hidden_states, wanted.hidden_states, strict=True):
            torch.testing.assert_close(one, other)
        ((output, shape),) = seen
        assert shape == (len(ids), ids.shape[1], WIDTH)
        torch.testing.assert_close(output, wanted.hidden_states[1])


def test_hooks_that_gradients_would_not_reach_are_refused(tmp_path):
    mine = attached(tmp_path, "gpt2", max_steps=1)
    mine.model.transformer.h[1].mlp.c_fc.weight.register_hook(print)
    with pytest.raises(OptimizerError, match=r"transformer\.h\.1\.mlp\.c_fc\.weight has a hook .*print"):
        mine.train()
    other = trainer(tmp_path, "gpt2")
    other.model.transformer.h[1].register_full_backward_hook(print)
    with pytest.raises(OptionError, match=r"transformer\.h\.1 has a backward hook, .*print"):
        gs_compile.hf.attach(other)
