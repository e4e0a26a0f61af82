"""PEFT's adapters on the tiers, with Trainer: against Trainer as it comes."""

from __future__ import annotations

import peft
import pytest
import torch
from learner import distance, values
from test_trainer import EAGER, curve, padded, samples
from transformers import Trainer, TrainingArguments
from zoo import huggingface

import gs_compile
import gs_compile.hf
from gs_compile.errors import UniformityError
from gs_compile.model.residency import is_offloaded
from gs_compile.placement.placement import QUANTUM

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # in PEFT
TASK = {"task_type": "CAUSAL_LM"}
LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **TASK)
ADAPTERS = {
    "lora": LORA,
    "ia3": peft.IA3Config(**TASK),
    "prefix": peft.PrefixTuningConfig(num_virtual_tokens=4, **TASK),
}


def adapted(config=LORA):
    torch.manual_seed(0)
    return peft.get_peft_model(huggingface("llama").train(), config)


def trained(model, folder, *, checkpointing=True, **options):
    """Trainer with a model, after 4 steps; with options, on the tiers."""
    torch._dynamo.reset()
    args = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_steps=4,
        logging_steps=1,
        activation_checkpointing=checkpointing,  # as TRL's trainers have it by default
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    model.enable_input_require_grads()
    trainer = Trainer(model, args, train_dataset=samples(), data_collator=padded)
    if options:
        gs_compile.hf.attach(trainer, storage=folder / "storage", **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_same_curves_and_weights(name, tmp_path):
    checkpointing = name != "prefix"  # with which transformers cannot compute it
    theirs = trained(adapted(ADAPTERS[name]), tmp_path / "theirs", checkpointing=checkpointing)
    mine = trained(adapted(ADAPTERS[name]), tmp_path / "mine", expert=EAGER)
    for key in ("loss", "grad_norm"):
        assert curve(mine, key) == pytest.approx(curve(theirs, key), rel=1e-5), key
    assert distance(values(mine.model), values(theirs.model)) < 1e-5


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    found = trained(adapted(), tmp_path_factory.mktemp("lora"), expert={**EAGER, "trace": True})
    assert all(is_offloaded(parameter) for parameter in found.model.parameters())
    return found


def test_frozen_weights_are_never_written(trainer):
    """What is written, beside checkpoints, are the trained parameters and their two states, in whole quanta."""
    optimizer = trainer.optimizer.optimizer
    num_trained = sum(unit.num_trained for unit in optimizer.engine.placement.units)
    trained = [parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad]
    assert num_trained <= sum(-(-numel // QUANTUM) * QUANTUM for numel in trained)
    trace = optimizer.engine.tiers.trace
    optimizer.synchronize()  # writes may end after their step
    trace.totals(reset=True)
    trainer.model.train()(**padded(samples(4))).loss.backward()
    optimizer.step()
    optimizer.synchronize()
    written = optimizer.last_step.lanes["ssd_write"].nbytes_by_kind + trace.totals()["ssd_write"].nbytes_by_kind
    assert (written["w"], written["s"]) == (4 * num_trained, 8 * num_trained)


@torch.no_grad()
def test_adapters_are_switched_off_and_merged(trainer):
    """Without its adapter it is the model that it was; merged, it computes what it computed."""
    model, ids = trainer.model.eval(), torch.arange(10)[None]
    with_adapter = model(input_ids=ids).logits
    with model.disable_adapter():
        without = model(input_ids=ids).logits
    torch.testing.assert_close(without, huggingface("llama").eval()(input_ids=ids).logits)
    assert not torch.allclose(with_adapter, without, atol=1e-4)
    model._compiled_call_impl = None  # what is merged is another model
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids).logits, with_adapter)


def test_a_break_inside_a_call_is_named(tmp_path):
    """Dynamo skips the outer forward, and what it captures are parts of it."""
    model = adapted()
    model.enable_input_require_grads()
    model.compile(backend="greedysnake")
    ids = torch.arange(8).view(2, 4)
    with pytest.raises(UniformityError) as found:
        model(input_ids=ids, labels=ids)
    assert "requires_grad_() intermediate leaked as output" in found.value.__notes__[0]
