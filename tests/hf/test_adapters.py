"""PEFT's adapters on the tiers, with Trainer: against Trainer as it comes."""

from __future__ import annotations

import copy
from pathlib import Path

import peft
import pytest
import tiered
import torch
import zoo
from learner import distance, values
from peft.utils.integrations import dequantize_module_weight
from test_trainer import CHECKPOINTING, EAGER, curve, padded, samples
from tiny import tiny
from transformers import Trainer, TrainingArguments
from zoo import small

import gs_compile
import gs_compile.hf
from gs_compile.capture.adapters import trace_libraries
from gs_compile.errors import GraphBreakError, ReleasedParameterError
from gs_compile.model.residency import is_offloaded
from gs_compile.placement.shards import QUANTUM

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),  # in PEFT
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),  # in PEFT before 0.21
]
TASK = {"task_type": "CAUSAL_LM"}
LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **TASK)
ADAPTERS = {
    "lora": LORA,
    "dora": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True, **TASK),
    "ia3": peft.IA3Config(**TASK),
    "prefix": peft.PrefixTuningConfig(num_virtual_tokens=4, **TASK),
    "prompt": peft.PromptTuningConfig(num_virtual_tokens=4, **TASK),
}
REWRITTEN = {
    "loha": peft.LoHaConfig(r=2, target_modules=["mix"]),
    "lokr": peft.LoKrConfig(r=2, target_modules=["mix"]),
    "shira": peft.ShiraConfig(r=2, target_modules=["mix"], random_seed=0),
    "dora": peft.LoraConfig(r=2, target_modules=["words"], use_dora=True),
    "parameter": peft.LoraConfig(r=2, target_modules=[], target_parameters=["mix.weight", "up.weight"]),
}


def adapted(config=LORA, model=None):
    torch.manual_seed(0)
    return peft.get_peft_model((model or small("llama")).train(), copy.deepcopy(config))  # PEFT keeps and changes it


def trained(model, folder, *, checkpointing=True, save_steps=0, resume=None, use_cpu=True, **options):
    """Trainer with a model, after 4 steps, and what that has `learned`; with options, on the tiers."""
    torch._dynamo.reset()
    args = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_steps=4,
        logging_steps=1,
        **{CHECKPOINTING: checkpointing},  # as TRL's trainers have it by default
        report_to=[],
        save_strategy="steps" if save_steps else "no",
        save_steps=save_steps or 500,
        use_cpu=use_cpu,
    )
    model.enable_input_require_grads()
    trainer = Trainer(model, args, train_dataset=samples(), data_collator=padded)
    if options:
        gs_compile.hf.attach(trainer, storage=folder / "storage", **options)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    trainer.learned = values(model)
    return trainer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """With LoRA, and a checkpoint after two steps."""
    found = trained(adapted(), tmp_path_factory.mktemp("lora"), expert={**EAGER, "trace": True}, save_steps=2)
    assert all(is_offloaded(parameter) for parameter in found.model.parameters())
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each in ("dora", "ia3", "prompt"))) for each in ADAPTERS]
)
def test_the_same_curves_and_weights(name, trainer, tmp_path):
    checkpointing = name != "prefix"  # with which transformers cannot compute it
    theirs = trained(adapted(ADAPTERS[name]), tmp_path / "theirs", checkpointing=checkpointing)
    mine = trainer if name == "lora" else trained(adapted(ADAPTERS[name]), tmp_path / "mine", expert=EAGER)
    for key in ("loss", "grad_norm"):
        assert curve(mine, key) == pytest.approx(curve(theirs, key), rel=1e-5), key
    assert distance(mine.learned, theirs.learned) < 1e-5


@pytest.mark.slow
def test_frozen_weights_are_never_written(trainer):
    """What is written, beside checkpoints, are the trained parameters and their two states, in whole quanta.

    Fast tests have it in test_trl.py, of parameters.
    """
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


def test_adapters_are_saved_and_loaded(trainer, tmp_path):
    """As an ordinary model's, and back into the tiers. A checkpoint has the adapter alone."""
    assert not (Path(trainer.args.output_dir) / "checkpoint-2" / "model.safetensors").exists()
    trainer.save_model(tmp_path)
    wanted = {name: each.clone() for name, each in peft.get_peft_model_state_dict(trainer.model).items()}
    loaded = peft.PeftModel.from_pretrained(small("llama"), tmp_path)
    torch.testing.assert_close(dict(peft.get_peft_model_state_dict(loaded)), wanted, rtol=0, atol=0)
    adapter = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in adapter:
            parameter.zero_()
    trainer.model.load_adapter(tmp_path, "default", is_trainable=True)
    assert all(is_offloaded(parameter) for parameter in adapter)
    torch.testing.assert_close(dict(peft.get_peft_model_state_dict(trainer.model)), wanted, rtol=0, atol=0)


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(trainer, tmp_path):
    """Bit for bit. Fast tests have adapters that are loaded, above, and a run that goes on, in test_trainer.py."""
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-2"
    again = trained(adapted(), tmp_path, expert=EAGER, resume=checkpoint)
    assert curve(again, "loss") == curve(trainer, "loss")
    torch.testing.assert_close(again.learned, trainer.learned, rtol=0, atol=0)


@pytest.mark.slow
@torch.no_grad()
def test_adapters_are_switched_off_and_merged(trainer):
    """Without its adapter it is the model that it was; merged, it computes what it computed: as those of the next test."""
    model, ids = trainer.model.eval(), torch.arange(10)[None]
    with_adapter = model(input_ids=ids).logits
    with model.disable_adapter():
        without = model(input_ids=ids).logits
    torch.testing.assert_close(without, small("llama").eval()(input_ids=ids).logits)
    assert not torch.allclose(with_adapter, without, atol=1e-4)
    model._compiled_call_impl = None  # what is merged is another model
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids).logits, with_adapter)


@zoo.WARNINGS[0]  # of LoHa, too
@zoo.WARNINGS[1]  # of SHiRA, too
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of SHiRA in plain PyTorch
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each == "loha")) for each in REWRITTEN]
)  # LoKr's forward is LoHa's
def test_a_forward_that_dynamo_is_given_in_other_words(name, tmp_path):
    """It learns what it learns in plain PyTorch, and is switched off, and merged."""
    config = REWRITTEN[name]
    ids = torch.arange(20).view(5, 4)
    with torch.no_grad():
        without = tiny()(input_ids=ids).logits
    learned, mine, theirs = {}, adapted(config, tiny()), adapted(config, tiny())
    mine.enable_input_require_grads()  # as checkpointing has it
    mine.compile(backend="greedysnake", options=tiered.options(tmp_path))
    for model, kind in ((mine, gs_compile.SGD), (theirs, torch.optim.SGD)):
        optimizer = kind([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.5)
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        learned[model] = values(model)
        with torch.no_grad(), model.disable_adapter():
            torch.testing.assert_close(model(input_ids=ids).logits, without)
    assert distance(learned[mine], learned[theirs]) < 1e-6 < distance(learned[mine], values(adapted(config, tiny())))
    torch.testing.assert_close(*(each.merge_and_unload()(input_ids=ids).logits for each in (mine, theirs)))


def test_ranks_by_gradients_are_refused(tmp_path):
    config = peft.AdaLoraConfig(
        init_r=4, target_r=2, tinit=1, tfinal=1, total_step=8, target_modules=["q_proj"], **TASK
    )
    model = adapted(config)
    args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    gs_compile.hf.attach(Trainer(model, args, train_dataset=samples()), storage=tmp_path / "storage", expert=EAGER)
    for caller in (model, model.base_model):
        with pytest.raises(ReleasedParameterError, match="Leave this call out, and the AdamssAsaCallback"):
            caller.update_and_allocate(1)


def test_a_break_inside_a_call_is_named(tmp_path):
    """Dynamo skips the outer forward, and what it captures are parts of it."""
    model = adapted(peft.LoraConfig(target_modules=["mix"]), tiny())
    model.get_input_embeddings().register_forward_hook(lambda *_: torch._dynamo.graph_break())
    model.compile(backend="greedysnake")
    ids = torch.arange(8).view(2, 4)
    with pytest.raises(GraphBreakError, match=r"Dynamo's reason: .*graph_break\(\)"):
        model(input_ids=ids, labels=ids)


class Quantized(torch.nn.Parameter):
    """As a library of quantized weights has them."""


def test_a_quantized_weight_is_read_by_peft():
    """What Dynamo traces in the place of PEFT's function is for weights that are not."""
    trace_libraries()

    def read(layer):
        return 2 * dequantize_module_weight(layer)

    layer = torch.nn.Linear(2, 2)
    torch.testing.assert_close(torch.compile(read, backend="eager", fullgraph=True)(layer), 2 * layer.weight)
    layer.weight = Quantized(layer.weight.detach())
    with pytest.raises(Exception, match="graph_break"):
        torch.compile(read, backend="eager", fullgraph=True)(layer)
    torch.testing.assert_close(torch.compile(read, backend="eager")(layer), 2 * layer.weight, check_dtype=False)
