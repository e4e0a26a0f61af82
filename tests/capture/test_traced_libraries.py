"""Libraries whose functions Dynamo cannot trace have others traced in their place, whenever they are imported."""

from __future__ import annotations

import copy
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    DebertaConfig,
    DebertaForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
)
from zoo import GPT, WARNINGS, WIDTH, assert_same_gradients, batch, compile_model, gradients, train

from gs_compile.capture import adapters
from gs_compile.capture.frame_settings import set_from_the_start

pytestmark = WARNINGS
LOCK = threading.Lock()
SIZES = {
    "vocab_size": 70,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 3,
}
KINDS = [
    (DebertaConfig, DebertaForSequenceClassification),
    pytest.param(DebertaV2Config, DebertaV2ForSequenceClassification, marks=pytest.mark.slow),
]


def guarded(ids):
    with LOCK:  # which breaks the graph
        return ids


class CallsLibrary(GPT):
    def forward(self, ids, *rest):
        return super().forward(guarded(ids), *rest)


class OfThree(GPT):
    """What it is given is weighed by all of its tokens, and by these again."""

    def forward(self, ids, *rest):
        table = torch.eye(int(ids.shape[1]), dtype=torch.long)
        return super().forward(torch.einsum("bt,ts,su->bu", ids, table, table), *rest)


def in_order(equation, *factors, optimize):
    """As `contract_path` of opt_einsum, which reads all sizes as numbers."""
    assert equation.count(",") == len([int(size) for factor in factors for size in factor.shape]) // 2 - 1
    return [(0, 1), (0, 1)], ""


def test_an_order_of_products_that_is_chosen_by_sizes_leaves_the_batch_free(monkeypatch):
    """opt_einsum, where it is installed, chose it while the model was traced, which fixed the batch's size."""
    chooses = torch.backends.opt_einsum.m
    monkeypatch.setattr(chooses, "_opt_einsum", SimpleNamespace(contract_path=in_order))
    monkeypatch.setattr(chooses, "is_available", lambda: True)
    monkeypatch.setattr(chooses, "enabled", True)
    model, plain = OfThree(), OfThree()
    train(compile_model(model, 2), *batch())
    train(plain, *batch())
    assert_same_gradients(gradients(model), gradients(plain))
    assert torch.backends.opt_einsum.enabled


def test_what_a_library_does_that_is_imported_after_the_first_compile_is_traced(monkeypatch):
    """A break ahead of all operations leaves nothing that the backend is asked for, so it is too late to trace again."""
    set_from_the_start()
    train(compile_model(GPT(), 2), *batch())
    monkeypatch.setattr(adapters, "FUNCTIONS", (*adapters.FUNCTIONS, (__name__, "guarded", lambda ids: ids)))
    model, plain = CallsLibrary(), CallsLibrary()
    train(compile_model(model, 2), *batch())
    train(plain, *batch())
    assert_same_gradients(gradients(model), gradients(plain))


class Tables(nn.Module):
    """Keeps what it makes first in a buffer, as the tables of rotary_embedding_torch are."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(64), persistent=False)
        self.num_kept = 0

    def forward(self, places, seq_len=None, offset=0):
        if seq_len is not None and offset + seq_len <= self.num_kept:
            return self.kept[offset : offset + seq_len]
        table = places.cos()
        if seq_len is not None:
            self.kept[:seq_len], self.num_kept = table, seq_len
        return table

    get_scale = forward


class Turned(GPT):
    def __init__(self):
        super().__init__()
        self.tables = Tables()

    def forward(self, ids, *rest):
        x, places = self.embedding(ids), torch.arange(ids.shape[1]).float()
        for block in self.blocks:
            x = block(x) * self.tables(places, seq_len=len(places))[:, None]
        return self.head(x).square().mean()


def test_tables_that_the_first_call_writes_to_a_buffer_are_made_in_each(monkeypatch):
    """Refused before, as a buffer that is changed in place."""
    module = SimpleNamespace(RotaryEmbedding=Tables)
    monkeypatch.setitem(sys.modules, "rotary_embedding_torch.rotary_embedding_torch", module)
    monkeypatch.setattr(Tables, "forward", Tables.forward)  # as they are put back afterwards
    monkeypatch.setattr(Tables, "get_scale", Tables.get_scale)
    set_from_the_start()
    model, plain = compile_model(Turned(), 2), Turned()
    for tokens in (12, 12, 9):
        for each in (model, plain):
            each.zero_grad()
            each(batch(4, tokens)[0]).backward()
        assert_same_gradients(gradients(model), gradients(plain))


def deberta(config, kind):
    torch.manual_seed(0)
    return kind(config(**SIZES)).double().train()


def labelled(model, labels, **settings):
    return model(input_ids=batch(len(labels))[0], labels=torch.tensor(labels), **settings)


@pytest.mark.parametrize(("config", "kind"), KINDS)
def test_deberta_classifies_without_a_problem_type(config, kind):
    """A sample without a label is left out."""
    model = deberta(config, kind)
    plain = copy.deepcopy(model)
    compile_model(model, 2)
    found, expected = (labelled(each, [2, -1, 1, -100]) for each in (model, plain))
    assert [*found] == [*expected] == ["loss", "logits"]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    found.loss.backward()
    expected.loss.backward()
    assert_same_gradients(gradients(model), gradients(plain))


@pytest.mark.slow
@pytest.mark.parametrize(("config", "kind"), KINDS)
def test_deberta_without_any_label_has_a_loss_of_0(config, kind):
    model = deberta(config, kind)
    plain = copy.deepcopy(model)
    compile_model(model, 2)
    with torch.no_grad():
        found, expected = (labelled(each, [-1] * 5, return_dict=False) for each in (model, plain))
    assert found[0] == expected[0] == 0
    torch.testing.assert_close(found[1], expected[1])
