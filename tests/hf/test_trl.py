"""TRL's trainers on the tiers, as they come, against themselves without the backend."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import peft
import pytest
import torch
from datasets import Dataset
from test_trainer import EAGER, curve, padded, samples
from tiny import Tiny, TinyConfig, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.modeling_outputs import SequenceClassifierOutput
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from zoo import VOCAB, configuration, small

import gs_compile
import gs_compile.hf
from gs_compile.errors import OptionError
from gs_compile.model.residency import is_offloaded

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # in PEFT
WORDS = [chr(code) for code in range(33, 33 + VOCAB - 3)]
METRICS = ("loss", "entropy", "mean_token_accuracy", "num_tokens")
REWARDS = ("rewards/margins", "logps/chosen", "logits/rejected")


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("CI", "1")  # TRL tells nobody that it was used


def tokenizer():
    """A letter is a token."""
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def texts(*lengths, number=8):
    """Rows of texts of these lengths, shifted from row to row; alike lengths in all rows, so few captures."""
    line = "".join(WORDS)
    return [[line[row + 3 * n : row + 3 * n + length] for n, length in enumerate(lengths)] for row in range(number)]


def rows(*columns, lengths):
    return Dataset.from_list([dict(zip(columns, row, strict=True)) for row in texts(*lengths)])


def settings(config, folder, **changes):
    return config(
        output_dir=str(folder / "out"),
        **{
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": 3,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "use_cpu": True,
            **changes,
        },
    )


def stored(folder):
    """A model that is on storage before it is trained, where it is mine."""
    model = small("llama")
    if folder.name != "mine":
        return model
    model.save_pretrained(folder / "checkpoint")
    return gs_compile.from_pretrained(LlamaForCausalLM, folder / "checkpoint", storage=folder / "model")


def sft(folder, data=("text", (9,)), model=None, adapter=True, callbacks=(), **changes):
    samples = rows(*data[:-1], lengths=data[-1])
    return SFTTrainer(
        small("llama") if model is None else model(folder),
        settings(SFTConfig, folder, **changes),
        train_dataset=samples,
        eval_dataset=samples.select(range(3)),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig() if adapter else None,
        callbacks=list(callbacks),
    )


def dpo(folder, adapter=True, **changes):
    return DPOTrainer(
        small("llama"),
        ref_model=None if adapter else small("llama"),
        args=settings(DPOConfig, folder, **changes),
        train_dataset=rows("prompt", "chosen", "rejected", lengths=(4, 5, 3)),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig() if adapter else None,
    )


def reward(folder, **changes):
    torch.manual_seed(0)
    return RewardTrainer(
        LlamaForSequenceClassification(configuration("llama", num_hidden_layers=2, num_labels=1)),
        args=settings(RewardConfig, folder, bf16=False, **changes),
        train_dataset=rows("prompt", "chosen", "rejected", lengths=(4, 5, 3)),
        processing_class=tokenizer(),
    )


def grpo(folder, **changes):
    """Texts are sampled from the model that is trained, four for two steps."""
    return GRPOTrainer(
        small("llama"),
        reward_funcs=lambda completions, **_: [float(sum(map(ord, text)) % 7) for text in completions],
        args=settings(GRPOConfig, folder, num_generations=2, max_completion_length=5, bf16=False, **changes),
        train_dataset=rows("prompt", lengths=(4,)),
        eval_dataset=rows("prompt", lengths=(4,)).select(range(2)),
        processing_class=tokenizer(),
    )


def both(make, tmp_path, options=None, **changes):
    """The trainer with the backend attached, and without, after their steps."""
    found = []
    for name in ("mine", "theirs"):
        torch._dynamo.reset()
        trainer = make(tmp_path / name, **changes)
        if name == "mine":
            gs_compile.hf.attach(trainer, storage=tmp_path / "storage", expert=EAGER, **(options or {}))
        trainer.train()
        found.append(trainer)
    return found


def assert_alike(mine, theirs, keys, tolerance=1e-4):
    assert all(is_offloaded(parameter) for parameter in mine.model.parameters())
    for key in keys:
        assert len(curve(mine, key)) == mine.args.max_steps, key
        assert curve(mine, key) == pytest.approx(curve(theirs, key), rel=tolerance, abs=tolerance), key


class Written(TrainerCallback):
    """The bytes of parameters that each step has written."""

    nbytes: ClassVar[list[int]] = []

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        step = getattr(optimizer.optimizer, "last_step", None)
        if step is not None:
            self.nbytes.append(step.lanes["ssd_write"].nbytes_by_kind["w"])


def test_adapters_with_all_defaults(tmp_path):
    """bf16, checkpointing and LoRA are. What is written of parameters is the adapters'."""
    mine, theirs = both(sft, tmp_path, callbacks=[Written()])
    assert_alike(mine, theirs, METRICS)
    optimizer = mine.optimizer.optimizer
    optimizer.synchronize()  # writes may end after their step
    written = sum(Written.nbytes) + optimizer.engine.tiers.trace.totals()["ssd_write"].nbytes_by_kind["w"]
    assert written == 3 * 4 * sum(unit.num_trained for unit in optimizer.engine.placement.units)


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
CASES = {
    "packed": {"packing": True, "max_length": 24},  # in rows of many lengths
    "completions only": {"data": ("prompt", "completion", (4, 5)), "gradient_accumulation_steps": 3},
    "all weights, evaluated": {"model": stored, "adapter": False, "gradient_accumulation_steps": 1, **EVALUATED},
}


@pytest.mark.parametrize("case", [pytest.param(each, marks=[pytest.mark.slow] * (each != "packed")) for each in CASES])
def test_supervised(case, tmp_path):
    mine, theirs = both(sft, tmp_path, bf16=False, learning_rate=1e-2, **CASES[case])
    assert_alike(mine, theirs, (*METRICS, "grad_norm"), 1e-5)
    for key in ("eval_loss", "eval_mean_token_accuracy"):
        assert curve(mine, key) == pytest.approx(curve(theirs, key), rel=1e-5)
    assert len(curve(mine, "eval_loss")) == 2 * ("evaluated" in case)  # and at the end
    if case == "packed":
        assert len(mine.train_dataset["seq_lengths"][0]) > 1


@pytest.mark.slow
def test_preferences_against_the_model_without_adapters(tmp_path):
    """Two forwards before the backward, each for all batches of the step."""
    assert_alike(*both(dpo, tmp_path), (*METRICS, *REWARDS))


LONG = {
    "defaults": (sft, {"adapter": False}, 3e-4),  # bf16 makes 1.04e-4 of it on some CPUs, a wrong update 1e-2
    "all in fp32": (sft, {"adapter": False, "bf16": False}, 1e-6),
    "adapters": (sft, {}, 1e-4),
    "packed": (sft, {"adapter": False, "packing": True, "max_length": 24}, 1e-4),
    # as by default, where all losses are within 5e-5 of log 2; at 1e-3 bf16 makes 1.1e-4 of it
    "preferences": (dpo, {"learning_rate": 1e-6}, 1e-6),
    "preferences, learning": (dpo, {"bf16": False}, 1e-4),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG)
def test_twenty_steps(case, tmp_path):
    """In bf16, as all is by default, where nothing else is said, and learning faster than by default."""
    make, changes, tolerance = LONG[case]
    mine, theirs = both(make, tmp_path, max_steps=20, **changes)
    assert len(curve(mine, "loss")) == 20
    assert curve(mine, "loss") == pytest.approx(curve(theirs, "loss"), rel=tolerance)


def test_preferences_against_a_stored_reference(tmp_path):
    """A durable run needs the folder that models of one directory have by turns: the reference has another."""
    durable = {"reference": {"host_memory": "40MiB"}, "durability": "step"}
    mine, theirs = both(dpo, tmp_path, options=durable, adapter=False, bf16=False, learning_rate=1e-2)
    assert_alike(mine, theirs, (*METRICS, *REWARDS, "grad_norm"), 1e-5)
    assert all(is_offloaded(parameter) for parameter in mine.ref_model.parameters())
    assert {each.name for each in (tmp_path / "storage" / "reference").iterdir()} == {"greedysnake-run"}


def test_a_fused_head_gives_all_outputs_from_the_first_step_on(tmp_path):
    """So that a loss that asks for one of them that is None has it compiled no second time."""
    trainer = dpo(tmp_path)
    gs_compile.hf.attach(trainer, storage=tmp_path / "storage", expert=EAGER)
    assert trainer._compiled[0].options["outputs"] == "all"
    assert not trainer._compiled[0].has_loss_alone


def test_a_reference_that_is_not_there(tmp_path):
    with pytest.raises(OptionError, match="this Trainer has no ref_model"):
        gs_compile.hf.attach(dpo(tmp_path), storage=tmp_path, reference={})


def test_what_cannot_be_followed_is_refused(tmp_path, caplog):
    trainer = sft(tmp_path)
    trainer._on_policy_loss_total, trainer.args.lmbda = 0.0, 0.5  # as GOLDTrainer has
    trainer.args.activation_offloading, trainer.args.gradient_accumulation_steps = True, 2
    with pytest.raises(OptionError, match="the inputs of layers are stored anyway"):
        gs_compile.hf.attach(trainer, storage=tmp_path)
    assert "on_policy_loss and off_policy_loss in the log" in caplog.text, "fault: without a word"
    trainer.args.activation_offloading, trainer._forward_redirection = False, None  # as DistillationTrainer has
    with pytest.raises(OptionError, match="SFTTrainer calls parts of its model"):
        gs_compile.hf.attach(trainer, storage=tmp_path)


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, {"durability": "step"}, "durability with GRPOTrainer, which makes its batches"),
        ({"use_adaptive_entropy": True}, {}, "use_adaptive_entropy=True with gradient_accumulation_steps above 1"),
    ],
)
def test_what_sampled_batches_would_lose_is_refused(changes, options, words, tmp_path):
    with pytest.raises(OptionError, match=words):
        gs_compile.hf.attach(grpo(tmp_path, **changes), storage=tmp_path, **options)


def test_pairs_stay_pairs(tmp_path):
    """A batch is its chosen samples and then its rejected ones: the batches of a step cannot be one batch."""
    assert_alike(*both(reward, tmp_path), ("loss", "grad_norm"), 1e-5)


def test_texts_that_are_sampled_while_it_trains(tmp_path):
    """For two steps at a time, with an evaluation between; the texts have different lengths."""
    changes = {"steps_per_generation": 4, "learning_rate": 1e-2, "eval_strategy": "steps", "eval_steps": 2}
    mine, theirs = both(grpo, tmp_path, per_device_eval_batch_size=2, **changes)
    assert_alike(mine, theirs, ("loss", "grad_norm", "entropy"), 1e-5)
    for key in ("reward", "eval_reward", "completions/mean_length"):
        assert curve(mine, key) == curve(theirs, key)
    assert len(curve(mine, "reward")) == 2


def test_arguments_that_adapters_hand_on_have_names(tmp_path):
    """As CPOTrainer gives ids, to adapters that know of no task."""

    def adapted(folder):
        model = peft.get_peft_model(tiny(), peft.LoraConfig(target_modules=["words", "head"]))
        return Doubled(model, settings(TrainingArguments, folder), train_dataset=samples(), data_collator=padded)

    assert_alike(*both(adapted, tmp_path), ("loss", "grad_norm"), 1e-5)


class Doubled(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        ids = inputs.pop("input_ids")
        return 2 * model(ids, **inputs, **kwargs).loss


def mean_loss(outputs, labels, num_items_in_batch=None):
    return functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def of_a_function(folder):
    return Trainer(
        tiny(),
        settings(TrainingArguments, folder),
        train_dataset=samples(),
        data_collator=padded,
        compute_loss_func=mean_loss,
    )


def test_a_loss_of_the_users_own(tmp_path):
    """As a function; that of a subclass has the next test."""
    assert_alike(*both(of_a_function, tmp_path), ("loss", "grad_norm"), 1e-5)


class Kept:
    """A forward that is called once, as MatryoshkaLoss has it."""

    def __init__(self, forward):
        self.forward, self.outputs = forward, None

    def __call__(self, **batch):
        self.outputs = self.forward(**batch) if self.outputs is None else self.outputs
        return self.outputs


class Nested(Trainer):
    """A loss of the first logits, of more of them, and of all, which puts a function around the model's forward."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels, forward = inputs.pop("labels"), model.forward
        model.forward = Kept(forward)
        try:
            logits = [model(**inputs).logits[..., :size] for size in (VOCAB // 4, VOCAB // 2, VOCAB)]
        finally:
            model.forward = forward
        losses = [
            functional.cross_entropy(each[:, :-1].flatten(0, 1), labels[:, 1:].flatten() % each.shape[-1])
            for each in logits
        ]
        return (sum(losses), {}) if return_outputs else sum(losses)


def test_a_loss_that_wraps_the_models_forward(tmp_path):
    """While it trains, for the batches of a step by turns, and in an evaluation."""

    def nested(folder):
        evaluated = settings(TrainingArguments, folder, eval_strategy="steps", eval_steps=1)
        data = samples()
        return Nested(tiny(), evaluated, train_dataset=data, eval_dataset=data[:4], data_collator=padded)

    mine, theirs = both(nested, tmp_path)
    assert_alike(mine, theirs, ("loss", "grad_norm", "eval_loss"), 1e-5)
    assert type(mine.model).forward == mine.model.forward.__func__


class Flipped(Doubled):
    """Makes new batches while it trains, as distillation on what the student writes does."""

    is_there = staticmethod(lambda outputs: True)

    def training_step(self, model, inputs, *args, **kwargs):
        assert len(inputs["input_ids"]) == 2  # a batch, as it comes
        with torch.no_grad():
            inputs["labels"] = model(**inputs).logits.argmax(-1).flip(1)
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model, inputs, *args, **kwargs):
        """Reads more than the loss, as distillation does, which is found in the first step."""
        labels = inputs.pop("labels")
        outputs = model(**inputs, labels=labels, **kwargs)
        return outputs.loss + (0.1 * outputs.logits.square().mean() if self.is_there(outputs) else 0)


@pytest.mark.parametrize(
    "is_there",
    [
        pytest.param(lambda outputs: True, marks=pytest.mark.slow),
        lambda outputs: outputs.logits is not None,
        pytest.param(lambda outputs: "logits" in outputs, marks=pytest.mark.slow),
        pytest.param(lambda outputs: outputs.get("logits") is not None, marks=pytest.mark.slow),
        pytest.param(lambda outputs: outputs["logits"] is not None, marks=pytest.mark.slow),
        pytest.param(lambda outputs: outputs[1] is not None, marks=pytest.mark.slow),
        pytest.param(lambda outputs: bool(outputs[1:]), marks=pytest.mark.slow),
    ],
)
def test_what_a_trainer_does_to_a_batch_it_does_to_each(tmp_path, monkeypatch, is_there):
    monkeypatch.setattr(Flipped, "is_there", staticmethod(is_there))

    def flipped(folder):
        return Flipped(tiny(), settings(TrainingArguments, folder), train_dataset=samples(), data_collator=padded)

    assert_alike(*both(flipped, tmp_path), ("loss", "grad_norm"), 1e-5)


class Weighted(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        labels = inputs.pop("labels")
        return functional.cross_entropy(model(**inputs).logits, labels, torch.linspace(1, 2, NUM_CLASSES))


NUM_CLASSES = 12  # as many as the longest sequence has tokens


class Classifier(Tiny):
    """Its logits are of the last token of a sample, which is told by its own padding."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits, is_token = super().forward(input_ids).logits, input_ids != self.config.pad_token_id
        last = (torch.arange(input_ids.shape[1]) * is_token).argmax(-1)
        return SequenceClassifierOutput(logits=logits[torch.arange(len(input_ids)), last, :NUM_CLASSES])


def of_few_operations():
    return Classifier(TinyConfig(pad_token_id=5))


def of_llama():
    config = configuration("llama", num_hidden_layers=2, num_labels=NUM_CLASSES)
    config.pad_token_id = 5
    return LlamaForSequenceClassification(config)


def weighted(folder, classifier):
    torch.manual_seed(0)

    def collate(batch):
        ids, mask = (
            torch.nn.utils.rnn.pad_sequence([each[name] for each in batch], batch_first=True, padding_value=value)
            for name, value in (("input_ids", 5), ("attention_mask", 0))
        )
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.sum(1) % NUM_CLASSES}

    return Weighted(
        classifier(),
        settings(TrainingArguments, folder),
        train_dataset=samples(lengths=(12, 8, 8, 8)),
        data_collator=collate,
    )


@pytest.mark.parametrize("classifier", [of_few_operations, pytest.param(of_llama, marks=pytest.mark.slow)])
def test_a_classifier_with_classes_as_many_as_tokens(tmp_path, classifier):
    """Logits of samples have no tokens, and padding is the model's own, by which it finds the last token.

    Fast tests have a classifier of transformers' in `test_pairs_stay_pairs`.
    """
    assert_alike(*both(partial(weighted, classifier=classifier), tmp_path), ("loss", "grad_norm"), 1e-5)


def experts(folder):
    return small("mixtral", router_aux_loss_coef=0.5)


@pytest.mark.slow
def test_experts_are_balanced_over_all_batches_of_a_step(tmp_path):
    """As TRL does where these are one batch. Over micro-batches end_to_end/test_balanced_experts.py has it."""
    changes = {"model": experts, "adapter": False, "bf16": False, "adam_epsilon": 1e-4}
    mine = sft(tmp_path / "mine", **changes)
    gs_compile.hf.attach(mine, storage=tmp_path / "storage", expert=EAGER)
    mine.train()
    torch._dynamo.reset()
    theirs = sft(tmp_path / "theirs", per_device_train_batch_size=4, gradient_accumulation_steps=1, **changes)
    theirs.train()
    assert_alike(mine, theirs, (*METRICS, "aux_loss", "grad_norm"), tolerance=1e-5)
