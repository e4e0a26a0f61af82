"""The parts by which the losses of a step's batches meet in one call, each by itself."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from pictures import qwen
from transformers import AutoConfig, AutoModelForSequenceClassification, BatchEncoding
from transformers.modeling_outputs import CausalLMOutput
from trl.trainer.utils import add_fused_lm_head
from zoo import VOCAB, small

from gs_compile.errors import OptionError
from gs_compile.hf import strands
from gs_compile.hf.fused_head import make_capturable
from gs_compile.hf.gather import IGNORED, Padding, gathered, padding_of
from gs_compile.hf.parts import parted
from gs_compile.hf.together import Mode, ReadsMore, _Question, answered


@pytest.mark.parametrize(("num_items", "share"), [(None, 6.0), (4, 3.0)])
def test_a_batchs_share_of_a_loss(num_items, share):
    """The shares of a sum over tokens add up to it; of a mean, Trainer takes the mean."""
    batch = {"input_ids": torch.zeros(2, 3), "num_items_in_batch": num_items}
    assert [each["loss"].item() for each in parted({"loss": torch.tensor(6.0)}, [batch, batch])] == [share, share]


def test_answers_chosen_among_all_tokens_are_not_padded():
    """A softmax over the tokens of a sequence has those of padding in it."""
    batches = [
        {"input_ids": torch.zeros(2, n), "attention_mask": torch.ones(2, n), "start_positions": torch.ones(2)}
        for n in (3, 4)
    ]
    assert len(gathered([batches[0], batches[0]])["start_positions"]) == 4
    with pytest.raises(OptionError, match=r"'start_positions' is a position among all tokens.*padding='max_length'"):
        gathered(batches)


def test_some_batches_of_a_step_have_no_images():
    """Fault: they were refused, as a step's batches had different entries."""
    text = {"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 3)}
    batches = [text, text | {"pixel_values": torch.ones(4, 5), "image_grid_thw": torch.ones(1, 3)}, text]
    padding = padding_of(qwen())
    found = gathered(batches, padding)
    assert {name: len(each) for name, each in found.items()} == {
        "input_ids": 6, "attention_mask": 6, "pixel_values": 4, "image_grid_thw": 1
    }  # fmt: skip
    for wrong in ([text, text | {"labels": torch.ones(2, 3)}], [text, batches[1] | {"labels": torch.ones(2, 3)}]):
        with pytest.raises(OptionError, match="the batches of a step have different entries"):
            gathered(wrong, padding)
    with pytest.raises(OptionError, match="the batches of a step have different entries"):
        gathered(batches)


def test_batches_of_a_collator_of_transformers():
    """They are no dicts, and images may come first."""
    texts = [{"input_ids": torch.full((2, n), n), "attention_mask": torch.ones(2, n)} for n in (4, 6)]
    batches = [BatchEncoding({"pixel_values": torch.zeros(2, 3, 8, 8), **text}) for text in texts]
    found = gathered(batches, Padding(7))
    assert found.input_ids[0].tolist() == [4] * 4 + [7] * 2
    nested = [{"input": each} for each in batches]  # as a cross-encoder is called
    assert gathered(nested, Padding(7))["input"].input_ids.shape == (4, 6)
    made = {"logits": torch.zeros(4, 6, 5), "scores": torch.zeros(4, 6)}
    for asked, outputs in ((batches, made), (nested, BatchEncoding(made))):
        parts = parted(outputs, asked)
        assert [each["logits"].shape for each in parts] == [(2, 4, 5), (2, 6, 5)]
        assert [each["scores"].shape for each in parts] == [(2, 6)] * 2
        assert all(each["logits"].is_contiguous() for each in parts)  # losses of the user's own call `view`


@pytest.mark.parametrize("is_added", [True, False])
def test_padding_is_left_out_by_a_mask_of_tokens_by_tokens(is_added):
    """A mask of floats is added to scores, so 0 would let all tokens read the padding; another one is true or false."""
    seen = [torch.ones(2, 1, n, n).tril().bool() for n in (2, 3)]
    masks = [torch.where(each, 0.0, torch.finfo(torch.float32).min) if is_added else each for each in seen]
    found = gathered([{"input_ids": each[:, 0, 0] * 0, "attention_mask": each} for each in masks])["attention_mask"]
    assert torch.equal(found[2:], masks[1])
    assert (found[0, 0] == (0.0 if is_added else 1)).tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]


def test_labels_by_any_name_are_ignored_where_padding_is():
    """As of several tasks. Fault: padding was of the first class."""
    batches = [{"input_ids": torch.ones(2, n).long(), "attention_mask": torch.ones(2, n)} for n in (3, 5)]
    for each in batches:
        like = each["input_ids"]
        each |= {"ner_labels": like, "tags": like.clone(), "classes": like, "label_mask": like, "bytes": like.byte()}
    batches[1]["tags"][0, 0] = -100
    found = gathered(batches, Padding(labels=frozenset({"classes"})))
    for name in ("ner_labels", "tags", "classes"):
        assert found[name][0].tolist() == [1, 1, 1, -100, -100]
    for name in ("label_mask", "bytes"):
        assert found[name][0].tolist() == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("ignored", [-100.0, torch.nan])
def test_labels_of_floats_are_ignored_as_their_batches_ignore_some(ignored):
    """As SpeechT5's spectrograms. Fault: padding was a label of 0, which counted."""
    batches = [
        {"input_ids": torch.ones(2, n).long(), "attention_mask": torch.ones(2, n), "labels": torch.ones(2, n, 2)}
        for n in (3, 5)
    ]
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(OptionError, match=r"'labels' has sequences .* -100 or NaN would.*padding='max_length'"):
            gathered([{**each, "labels": each["labels"].to(dtype)} for each in batches])
    batches[1]["labels"][0, 4:] = ignored
    found = gathered(batches)["labels"]
    wanted = torch.tensor([1.0] * 3 + [ignored] * 2)
    assert torch.equal(found[0, :, 0].nan_to_num(7), wanted.nan_to_num(7))


def test_packed_sequences_need_positions():
    """Fault: where they begin was left out, and attention took a row for one sequence."""
    batch = {"input_ids": torch.zeros(1, 4).long(), "cu_seq_lens_q": torch.tensor([0, 1, 4]), "max_length_q": 3}
    with pytest.raises(OptionError, match=r"by 'cu_seq_lens_q' alone.*return_position_ids=True"):
        gathered([batch])
    assert gathered([batch | {"position_ids": torch.tensor([[0, 0, 1, 2]])}]).keys() == {"input_ids", "position_ids"}


def test_a_mask_that_is_none_is_no_mask():
    """Fault: a model that sees both ways attended to padding."""
    with pytest.raises(OptionError, match="'input_ids' has sequences of different lengths"):
        gathered([{"input_ids": torch.zeros(2, n).long(), "attention_mask": None} for n in (3, 4)])


@pytest.mark.parametrize("side", ["left", "right", "packed"])
def test_positions_of_three_numbers_are_joined_along_the_samples(side):
    """As collators for Qwen-VL give them. Fault: the numbers were put behind each other."""
    batches = [
        {"input_ids": torch.ones(2, n).long(), "position_ids": torch.arange(6 * n).reshape(3, 2, n)} for n in (3, 5)
    ]
    for each in batches if side != "packed" else ():
        each["attention_mask"] = each["input_ids"]
    found = gathered(batches, Padding(is_left=side == "left"))["position_ids"]
    assert found.shape == (3, 4, 5)
    assert torch.equal(found[:, 2:], batches[1]["position_ids"])
    own, added = (slice(2, None), slice(2)) if side == "left" else (slice(3), slice(3, None))
    assert torch.equal(found[:, :2, own], batches[0]["position_ids"])
    assert (found[:, :2, added] == (torch.arange(2) if side == "packed" else 0)).all()


def test_labels_of_a_decoder_need_no_mask():
    """As Whisper's, beside spectrograms of one length; each batch gets as many tokens as its own labels have."""
    batches = [{"input_features": torch.zeros(2, 8, 40), "labels": torch.full((2, n), n)} for n in (3, 5)]
    assert gathered(batches)["labels"].tolist() == [[3] * 3 + [-100] * 2] * 2 + [[5] * 5] * 2
    logits, encoded = torch.zeros(4, 5, 7), torch.zeros(4, 20, 6)
    found = parted({"logits": logits, "encoder_last_hidden_state": encoded}, batches)
    assert [each["logits"].shape for each in found] == [(2, 3, 7), (2, 5, 7)]
    assert [each["encoder_last_hidden_state"].shape for each in found] == [(2, 20, 6)] * 2
    with pytest.raises(OptionError, match="'labels' has sequences of different lengths"):
        gathered([{**each, "labels": each["labels"].float()} for each in batches])  # no loss passes over -100 there


@pytest.mark.parametrize(
    ("ones", "side", "is_left"), [([0, 1], "right", True), ([1, 0], "left", False), ([1, 1], "left", True)]
)
def test_padding_is_on_the_side_of_the_collator(ones, side, is_left):
    """Its batches show it, else the tokenizer says it: a model that reads the last token finds it there."""
    masks = [torch.tensor([[ones[0], *[1] * (n - 2), ones[1]]] * 2) for n in (3, 5)]
    batches = [{"input_ids": mask * 0 + mask.shape[1], "attention_mask": mask} for mask in masks]
    batches = [*batches, {name: each[:, :4] for name, each in batches[1].items()}]
    padding = padding_of(None, SimpleNamespace(pad_token_id=7, padding_side=side))
    whole = gathered(batches, padding)
    assert whole["input_ids"][0].tolist() == ([7, 7, 3, 3, 3] if is_left else [3, 3, 3, 7, 7])
    assert whole["attention_mask"][0].sum() == sum(ones) + 1
    for batch, found in zip(batches, parted({"hidden": whole["input_ids"][..., None]}, batches, padding), strict=True):
        assert torch.equal(found["hidden"][..., 0], batch["input_ids"])


def test_padding_is_behind_the_tokens_of_a_model_that_learns_places():
    """Ahead of them it would move them. Other models know distances."""
    batches = [{"input_ids": torch.full((1, n), n), "attention_mask": torch.ones(1, n)} for n in (2, 3)]
    tokenizer = SimpleNamespace(pad_token_id=7, padding_side="left")
    for kind, padded in (("gpt2", [2, 2, 7]), ("llama", [7, 2, 2]), ("xlnet", [7, 2, 2]), ("t5", [7, 2, 2])):
        config = AutoConfig.for_model(kind, pad_token_id=7)
        padding = padding_of(SimpleNamespace(config=config), tokenizer)
        assert gathered(batches, padding)["input_ids"][0].tolist() == padded, kind


def test_what_a_model_reads_of_a_sequence_is_not_padded():
    """Of its last place, padding is ahead of the tokens where these may move, else it is refused; of a mean always."""

    def classifier(kind, **settings):
        config = AutoConfig.for_model(kind, pad_token_id=7, vocab_size=VOCAB, num_labels=2, **settings)
        return AutoModelForSequenceClassification.from_config(config)

    batches = [
        {"input_ids": torch.full((1, n), n), "attention_mask": torch.ones(1, n), "labels": torch.ones(1).long()}
        for n in (2, 3)
    ]
    tokenizer = SimpleNamespace(pad_token_id=7, padding_side="left")
    places = {"emb_dim": 8, "n_layers": 1, "n_heads": 2}
    xlnet = classifier("xlnet", d_model=8, n_layer=1, n_head=2, d_inner=8)
    assert gathered(batches, padding_of(xlnet))["input_ids"][0].tolist() == [7, 2, 2]
    assert gathered(batches, padding_of(classifier("xlm", **places), tokenizer))["input_ids"][0].tolist() == [2, 2, 7]
    own = SimpleNamespace(config=AutoConfig.for_model("gpt2", pad_token_id=7))
    assert gathered(batches, padding_of(own))["input_ids"][0].tolist() == [2, 2, 7]  # the side of its collator
    last, mean = (classifier("xlm", summary_type=each, **places) for each in ("last", "mean"))
    for model, side in ((last, None), (own, tokenizer), (mean, None)):
        assert len(gathered(batches[:1] * 2, padding_of(model, side))["input_ids"]) == 2
        with pytest.raises(OptionError, match=r"the last place .* or the mean of all, where padding would be: pad"):
            gathered(batches, padding_of(model, side))


def test_what_models_mix_in_spite_of_a_mask_is_not_padded():
    """As wav2vec2-base, whose first layer has the mean of all places, and ConvBERT, that of neighbours; labels may be.

    ConvBERT's logits differed by 4e-3, Funnel's by 0.2.
    """
    padding = padding_of(SimpleNamespace(config=AutoConfig.for_model("wav2vec2")))
    sounds = {n: {"input_values": torch.ones(1, n), "attention_mask": torch.ones(1, n)} for n in (8, 9)}
    labelled = [{**sounds[8], "labels": torch.ones(1, n).long()} for n in (2, 3)]
    assert gathered(labelled, padding)["labels"].tolist() == [[1, 1, IGNORED], [1, 1, 1]]
    with pytest.raises(OptionError, match=r"'input_values' has sequences of different lengths .* the mean of all"):
        gathered([*sounds.values()], padding)
    texts = [{"input_ids": torch.ones(1, n), "attention_mask": torch.ones(1, n)} for n in (8, 9)]
    with pytest.raises(OptionError, match="'input_ids' has sequences of different lengths"):
        gathered(texts, padding_of(SimpleNamespace(config=AutoConfig.for_model("convbert"))))
    of_layers = AutoConfig.for_model("wav2vec2", feat_extract_norm="layer")
    assert gathered([*sounds.values()], padding_of(SimpleNamespace(config=of_layers)))["input_values"].shape == (2, 9)


@pytest.mark.parametrize("second", ["a", "b"])
def test_entries_of_lists_are_samples(second):
    """Texts stay beside their samples, also where two batches have the same; a list of another length is one value."""
    batches = [{"pixels": torch.zeros(2, 3), "texts": [text] * 2, "size": [8, 8, 8]} for text in ("a", second)]
    assert gathered(batches)["texts"] == ["a", "a", second, second]
    assert gathered(batches)["size"] == [8, 8, 8]


def test_a_decoder_has_lengths_of_its_own():
    """The padding of sources says nothing of that of targets."""
    batches = [
        {"input_ids": torch.zeros(2, n), "attention_mask": torch.ones(2, n), "labels": torch.zeros(2, m).long()}
        for n, m in ((4, 9), (6, 8))
    ]
    made = {"logits": torch.zeros(4, 9, 7), "encoder_last_hidden_state": torch.zeros(4, 6, 5)}
    found = parted(made, batches)
    assert [each["logits"].shape[1] for each in found] == [9, 8]
    assert [each["encoder_last_hidden_state"].shape[1] for each in found] == [4, 6]


@pytest.mark.parametrize(("numbers", "whole"), [((2, 2), 4), ((3, 1), 5), ((0, 2), 0), ((9, 1), 11)])
def test_logits_that_are_kept_are_each_batchs_own(numbers, whole):
    """The last ones, also of a batch that was padded at its end."""
    lengths = (3, 5)
    batches = [
        {"input_ids": torch.full((2, n), n), "attention_mask": torch.ones(2, n), "logits_to_keep": number}
        for n, number in zip(lengths, numbers, strict=True)
    ]
    assert gathered(batches)["logits_to_keep"] == whole
    places = torch.arange(5).expand(4, 5)[..., None]
    made = {"logits": places[:, -whole:], "hidden": places}
    for length, number, found in zip(lengths, numbers, parted(made, batches), strict=True):
        assert found["logits"][0, :, 0].tolist() == [*range(length)][-number:]
        assert found["hidden"].shape == (2, length, 1)


def test_places_of_logits_that_are_kept_are_no_places_of_a_step():
    batch = {"input_ids": torch.zeros(2, 3), "attention_mask": torch.ones(2, 3), "logits_to_keep": torch.tensor([1])}
    assert gathered([batch])["logits_to_keep"].tolist() == [1]
    with pytest.raises(OptionError, match="'logits_to_keep' has places"):
        gathered([batch, batch])


def test_scores_of_pairs_are_each_batchs_own():
    """As CLIP's, which a contrastive loss compares with the numbers of its samples; images have lengths of their own.

    The second batch had the scores of its samples with those of the first, too.
    """
    batches = [{"input_ids": torch.zeros(number, 5 + number)} for number in (2, 3)]
    scores, images = torch.arange(25.0).view(5, 5), torch.zeros(5, 7, 4)
    made = {"logits_per_text": scores, "image_hidden_states": images, "similar": scores.clone()}
    first, second = parted(made, batches)
    assert torch.equal(first["logits_per_text"], scores[:2, :2])
    assert torch.equal(second["logits_per_text"], scores[2:, 2:])
    assert (first["image_hidden_states"].shape, second["image_hidden_states"].shape) == ((2, 7, 4), (3, 7, 4))
    with pytest.raises(OptionError, match=r"the loss reads similar of shape \[5, 5\]"):
        second["similar"].sum()


def test_attentions_are_cut_along_tokens():
    """Their heads were, where they were as many as the tokens of the shortest batch."""
    batches = [{"input_ids": torch.zeros(2, n), "labels": torch.zeros(2, n + 3)} for n in (3, 5)]
    made = {"encoder_attentions": (torch.zeros(4, 6, 5, 5),), "cross_attentions": (torch.zeros(4, 6, 8, 5),)}
    shapes = [[each[name][0].shape for name in made] for each in parted(made, batches)]
    assert shapes == [[(2, 6, 3, 3), (2, 6, 6, 3)], [(2, 6, 5, 5), (2, 6, 8, 5)]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_of_tokens_are_each_batchs_own(side):
    """As the logits of routers have them, and losses of single tokens. What has other rows is refused if it is read."""
    batches = [
        {"input_ids": torch.arange(start, start + 2 * n).view(2, n), "attention_mask": torch.ones(2, n)}
        for start, n in ((0, 3), (10, 5))
    ]
    padding = padding_of(None, SimpleNamespace(pad_token_id=99, padding_side=side))
    ids = gathered(batches, padding)["input_ids"].flatten()
    made = {"losses": ids, "router_logits": (ids[:, None].expand(-1, 4), 2 * ids[:, None]), "load": torch.ones(7)}
    for batch, found in zip(batches, parted(made, batches, padding), strict=True):
        own = batch["input_ids"].flatten()
        assert torch.equal(found["losses"], own)
        assert torch.equal(found["router_logits"][0], own[:, None].expand(-1, 4))
        assert torch.equal(found["router_logits"][1], 2 * own[:, None])
        for read in (torch.Tensor.mean, lambda load: 2 * load, lambda load: load[0], lambda load: load.shape):
            with pytest.raises(OptionError, match=r"the loss reads load of shape \[7\], which has no row for each"):
                read(found["load"])


def test_a_batch_within_a_batch_is_joined_and_parted():
    """As sentence-transformers' models take one, and return it with what they have made."""
    batches = [{"input": {"input_ids": torch.full((2, n), n), "attention_mask": torch.ones(2, n)}} for n in (3, 4)]
    inner = gathered(batches, Padding(7))["input"]
    assert inner["input_ids"].tolist() == [[3, 3, 3, 7]] * 2 + [[4] * 4] * 2
    assert inner["attention_mask"].sum() == 14
    made = {"sentence_embedding": torch.arange(16).view(4, 4), **inner}
    for number, (batch, found) in enumerate(zip(batches, parted(made, batches), strict=True)):
        assert torch.equal(found["input_ids"], batch["input"]["input_ids"])
        assert torch.equal(found["sentence_embedding"], made["sentence_embedding"][2 * number : 2 * number + 2])


def test_the_head_gives_what_the_fused_one_gives():
    model, ids = small("llama").eval(), torch.randint(VOCAB, (2, 9))
    labels = ids.masked_fill(torch.rand(2, 9) < 0.3, -100)
    add_fused_lm_head(model, 0.7, outputs=("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"))
    found = []
    for prepare in (lambda _: None, make_capturable):
        prepare(model)
        made = model(ids, labels=labels, fused_lm_head=True)
        model.zero_grad()
        (made.log_probs.sum() + 0.1 * made.entropy.square().sum()).backward()
        found.append({**made, "gradient": model.lm_head.weight.grad})
    theirs, mine = found
    assert len(mine) == 7
    for key in mine:
        torch.testing.assert_close(mine[key], theirs[key], msg=key)


@pytest.mark.parametrize(
    ("place", "is_more"),
    [(0, False), (1, True), (-1, True), (slice(1), False), (slice(1, None), True), (slice(-1, None), True)],
)
def test_who_reads_places_beside_the_loss_asks_for_all_outputs(place, is_more):
    model = torch.nn.Identity()
    question = _Question(lambda: CausalLMOutput(loss=torch.ones(())), {}, False, model, Mode.of(model))
    (found,) = answered([question], Padding(), has_loss_alone=True)
    with pytest.raises(ReadsMore) if is_more else nullcontext():
        assert found[place] == (torch.ones(()) if place == 0 else (torch.ones(()),))


def test_a_strand_that_fails_ends_the_others():
    ended = []

    def asks(number):
        try:
            return strands.ask(number) + strands.ask(number)
        finally:
            ended.append(number)
            strands.ask(number)

    assert strands.run([lambda: asks(1), lambda: asks(2)], lambda numbers: [10 * n for n in numbers]) == [20, 40]
    ended.clear()
    with pytest.raises(ZeroDivisionError):
        strands.run([lambda: asks(1), lambda: 1 // 0, lambda: asks(2)], list)
    assert sorted(ended) == [1, 2]


@pytest.mark.parametrize(("lengths", "is_refused"), [((5, 7), False), ((9, 12), False), ((5, 9), True)])
def test_batches_on_both_sides_of_longropes_border_are_no_step(lengths, is_refused):
    """Trainer would rotate the shorter one by the frequencies of short sequences."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [2.0] * 4, "short_factor": [1.0] * 4}
    lengths_of = {"max_position_embeddings": 64, "original_max_position_embeddings": 8}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "pad_token_id": 0}
    config = AutoConfig.for_model("phi3", rope_parameters={**rope, "factor": 8.0}, **lengths_of, **sizes)
    padding = padding_of(SimpleNamespace(config=config))
    batches = [{"input_ids": torch.ones(1, each), "attention_mask": torch.ones(1, each)} for each in lengths]
    with pytest.raises(OptionError, match=r"longer than 8, .*longrope") if is_refused else nullcontext():
        assert gathered(batches, padding)["input_ids"].shape == (2, max(lengths))
    packed = torch.arange(3).repeat(1, 4)  # of short sequences
    gathered([{**each, "position_ids": packed[:, : each["input_ids"].shape[1]]} for each in batches], padding)
