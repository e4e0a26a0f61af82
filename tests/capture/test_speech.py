"""Losses of CTC, and what SpecAugment masks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC, WhisperConfig
from transformers.models.wav2vec2 import modeling_wav2vec2
from transformers.models.whisper.modeling_whisper import WhisperModel
from zoo import WARNINGS, WIDTH, assert_same_gradients, gradients

from gs_compile.capture.speech import masked_inputs, spans
from gs_compile.errors import GraphBreakError

pytestmark = WARNINGS
CLASSES, FRAMES, SAMPLES = 9, 12, 4
OPTIONS = {"micro_batch_size": 3, "expert": {"compiler": "eager"}}
LABELS = torch.tensor([[3, 4, 4, 5], [6, -100, -100, -100], [-100, 7, -100, 8], [-100, -100, -100, -100]])


class Recognizer(nn.Module):
    """Two blocks, and a loss of CTC; one sample has no label, and one more labels than it has frames."""

    def __init__(self, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head, self.settings = nn.Linear(WIDTH, CLASSES), settings

    def forward(self, sound, targets, num_frames, num_targets):
        x = self.embed(sound)
        for layer in self.layers:
            x = x + layer(x).tanh()
        log_p = self.head(x).log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(log_p, targets, num_frames, num_targets, **self.settings)


def speech():
    torch.manual_seed(1)
    num_frames, num_targets = torch.tensor([12, 9, 4, 12]), torch.tensor([6, 2, 6, 0])
    return torch.randn(SAMPLES, FRAMES, 5), torch.randint(1, CLASSES, (SAMPLES, 6)), num_frames, num_targets


@pytest.mark.parametrize("settings", [{"zero_infinity": True}, {"reduction": "sum", "blank": 8, "zero_infinity": True}])
def test_a_loss_of_ctc_is_that_of_the_whole_batch(settings):
    model, plain, batch = Recognizer(**settings), Recognizer(**settings), speech()
    model.compile(backend="greedysnake", options=OPTIONS)
    loss, expected = model(*batch), plain(*batch)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert_same_gradients(gradients(model), gradients(plain))


def test_targets_in_one_row_are_refused():
    model = Recognizer()
    model.compile(backend="greedysnake", options=OPTIONS)
    sound, targets, *lengths = speech()
    with pytest.raises(GraphBreakError, match=r"targets of all samples in one row.*padded"):
        model(sound, targets.flatten(), *lengths)


def wav2vec2(**settings) -> Wav2Vec2ForCTC:
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        vocab_size=CLASSES,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=WIDTH,
        conv_dim=[8, 8],
        conv_stride=[5, 2],
        conv_kernel=[10, 3],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        pad_token_id=0,
        ctc_loss_reduction="mean",
        **dict.fromkeys(("layerdrop", "hidden_dropout", "attention_dropout", "activation_dropout"), 0.0),
        **dict.fromkeys(("feat_proj_dropout", "final_dropout"), 0.0),
        **settings,
    )
    model = Wav2Vec2ForCTC(config).train()
    model.freeze_feature_encoder()
    return model


def test_wav2vec2_for_ctc_trains_with_what_spec_augment_masks():
    all_masked = {"mask_time_prob": 1.0, "mask_time_length": 1, "mask_time_min_masks": 0}
    model, plain = wav2vec2(**all_masked), wav2vec2(**all_masked)
    model.compile(backend="greedysnake", options={**OPTIONS, "micro_batch_size": 2})
    mask = (torch.arange(200) < torch.tensor([200, 180, 150, 120])[:, None]).long()
    batch = {"input_values": torch.randn(SAMPLES, 200), "attention_mask": mask, "labels": LABELS}
    loss, expected = model(**batch).loss, plain(**batch).loss
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert_same_gradients(gradients(model), gradients(plain))


@pytest.mark.parametrize(("probability", "length", "least"), [(0.5, 2, 0), (0.05, 3, 2), (1.0, 1, 0), (0.9, 5, 0)])
def test_as_many_spans_are_masked_as_transformers_masks(probability, length, least):
    own = torch.tensor([40, 20, 8, 3])
    mask = (torch.arange(40) < own[:, None]).long()
    settings = {"mask_prob": probability, "mask_length": length, "min_masks": least}
    torch.manual_seed(0)
    drawn = torch.stack([spans(mask, 40, probability, length, least, mask) for _ in range(300)])
    theirs = [modeling_wav2vec2._compute_mask_indices((4, 40), attention_mask=mask, **settings) for _ in range(300)]
    expected = torch.stack(list(map(torch.from_numpy, theirs)))
    expected &= mask.bool()  # of a sample without a span they mask the last place, which is padding
    assert not drawn[:, ~mask.bool()].any()
    rate, wanted = drawn.double().mean((0, 2)), expected.double().mean((0, 2))
    torch.testing.assert_close(rate, wanted, rtol=0.12, atol=0.004)


def test_whispers_inputs_are_masked_out_of_place():
    config = WhisperConfig(apply_spec_augment=True, mask_time_prob=1.0, mask_time_length=1, mask_feature_prob=0.0)
    model = WhisperModel.__new__(WhisperModel)
    nn.Module.__init__(model)
    model.config = config
    given = torch.ones(2, 3, 6)
    assert masked_inputs(None, model.train(), given).eq(0).all()
    assert masked_inputs(None, model.eval(), given).eq(1).all()
    assert given.eq(1).all()


def test_a_break_at_layers_that_are_left_out_at_random_says_what_to_set():
    model = wav2vec2()
    model.wav2vec2.encoder.config.layerdrop = 0.1
    model.compile(backend="greedysnake", options=OPTIONS)
    with pytest.raises(GraphBreakError, match="set layerdrop, encoder_layerdrop and decoder_layerdrop to 0"):
        model(torch.randn(SAMPLES, 200), labels=LABELS)
