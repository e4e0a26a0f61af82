"""Checkpoints that are read to storage in a codec: plain ones, and those that bitsandbytes and others have quantized."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
import trl
from datasets import Dataset
from learner import distance
from quantized_checkpoints import LORA, is_encoded, learned, of_fp8, read, wide
from safetensors.torch import load_file
from test_trainer import EAGER
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from zoo import small

import gs_compile
from gs_compile.errors import OptionError
from gs_compile.model import storage_init
from gs_compile.model.residency import residency_of
from gs_compile.runtime.codecs import CODECS

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),  # in PEFT
    pytest.mark.filterwarnings("ignore:MatMul8bitLt"),
]
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
IN_WORDS = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.bfloat16)
BY_BITSANDBYTES = {
    "nf4": NF4,
    "nf4_single": IN_WORDS,
    "fp4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True),
    "fp4_single": BitsAndBytesConfig(load_in_4bit=True),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
}


@pytest.mark.parametrize(
    ("codec", "given"),
    [
        ("nf4", {"frozen": "nf4"}),
        ("nf4", {"quantization_config": NF4}),
        ("fp4_single", {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}),
        ("int8", {"quantization_config": BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["down_proj"])}),
        ("fp8", {"frozen": "fp8", "frozen_skip": ["down_proj", "q_proj"]}),
    ],
    ids=str,
)
def test_matrices_of_layers_are_encoded_as_they_are_read(codec, given, tmp_path):
    config = given.get("quantization_config")
    skipped = (config.llm_int8_skip_modules or ()) if config else given.get("frozen_skip", ())
    source = small("llama").bfloat16()
    source.save_pretrained(tmp_path / "saved")
    model = read(tmp_path / "saved", tmp_path / "storage", **given)
    wanted = dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        values = wanted[name].detach()
        if encoded := is_encoded(name, values, skipped):
            values = CODECS[codec].decode(CODECS[codec].encode(values), values.shape, values.dtype)
        assert residency_of(parameter).codec == (codec if encoded else ""), name
        assert parameter.requires_grad != encoded, name
        assert torch.equal(parameter.detach().clone(), values), name
    assert not hasattr(model.config, "quantization_config")
    assert not getattr(model, "is_quantized", False)


def test_what_is_read_never_comes_to_storage_in_full(tmp_path, monkeypatch):
    """Files are of encoded matrices, and of all else as it is."""
    monkeypatch.setattr(storage_init, "SMALL_NBYTES", 1)
    made, map_file = [], storage_init.map_file

    def counted(folder, nbytes):
        made.append(nbytes * (nbytes > 8))  # but for what placeholders are made of
        return map_file(folder, nbytes)

    monkeypatch.setattr(storage_init, "map_file", counted)
    wide().bfloat16().save_pretrained(tmp_path / "saved")
    read(tmp_path / "saved", tmp_path / "plain")
    plain = sum(made)
    made.clear()
    model = read(tmp_path / "saved", tmp_path / "frozen", frozen="nf4")
    matrices = [each for name, each in model.named_parameters() if is_encoded(name, each)]
    less = sum(each.numel() * 2 - CODECS["nf4"].nbytes(each.shape) for each in matrices)
    assert sum(made) <= plain - less


def by_bitsandbytes(source, folder, config):
    source.save_pretrained(folder / "plain")
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", quantization_config=config, device_map="cpu")
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "codec",
    [pytest.param(each, marks=[pytest.mark.slow] * (each == "fp4")) for each in (*BY_BITSANDBYTES, "fp8")],
)  # fp4's two parts are fp4_single's values and nf4's nested scales
def test_quantized_checkpoints_are_read_as_they_are(codec, tmp_path):
    """Their own libraries decode them to the same bits."""
    source, folder = wide().bfloat16(), tmp_path / "saved"
    if codec == "fp8":
        of_fp8(source, folder)
        theirs = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    else:
        by_bitsandbytes(source, folder, BY_BITSANDBYTES[codec])
        functional = pytest.importorskip("bitsandbytes.functional")
        tensors = load_file(folder / "model.safetensors")
        theirs = {}
        for name, values in tensors.items():
            if name.endswith(".SCB"):
                weight = name.replace("SCB", "weight")
                theirs[weight] = functional.int8_vectorwise_dequant(tensors[weight], values).bfloat16()
            elif "bitsandbytes__" in name:
                weight, begin = name.split(".quant_state")[0], name.split("quant_state")[0]
                state = {each.removeprefix(begin): found for each, found in tensors.items() if each.startswith(begin)}
                state = functional.QuantState.from_dict(state, torch.device("cpu"))
                theirs[weight] = functional.dequantize_4bit(tensors[weight], state)
    model = read(folder, tmp_path / "storage")
    found = dict(model.named_parameters())
    encoded = [name for name, each in found.items() if is_encoded(name, each)]
    assert len(encoded) == 14
    for name in encoded:
        assert residency_of(found[name]).codec == codec
        assert torch.equal(found[name].detach().clone(), theirs[name]), name
    model = read(folder, tmp_path / "storage", dtype=torch.float32)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    if codec not in ("int8", "fp8"):  # with which their libraries round activations, too
        ids = torch.arange(24).view(2, 12)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
        with torch.no_grad(), gs_compile.streaming(model):
            losses = [float(each(input_ids=ids, labels=ids).loss) for each in (model, theirs)]
        assert losses[0] == pytest.approx(losses[1], rel=5e-4)  # on a CPU bitsandbytes rounds scales to bf16


@pytest.mark.parametrize("codec", ["nf4", "int8"])
def test_a_model_that_transformers_has_quantized_is_that_of_its_checkpoint(codec, tmp_path):
    theirs = by_bitsandbytes(wide(), tmp_path / "saved", BY_BITSANDBYTES[codec])
    model = peft.get_peft_model(theirs, peft.LoraConfig(target_modules=["q_proj"]))
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    gs_compile.hf.attach(transformers.Trainer(model, args), storage=tmp_path / "mine", expert=EAGER)
    wanted = read(tmp_path / "saved", tmp_path / "storage")
    found = {name.replace(".base_layer", ""): each for name, each in theirs.named_parameters()}
    for name, each in wanted.named_parameters():
        assert residency_of(found[name]).codec == residency_of(each).codec, name
        assert torch.equal(found[name].detach().clone(), each.detach().clone()), name
    ids, losses = torch.arange(24).view(2, 12), []
    for each in (model, wanted):
        with torch.no_grad(), gs_compile.streaming(each):
            losses.append(float(each.forward(input_ids=ids, labels=ids).loss))
    assert losses[0] == losses[1]
    name = "model.layers.1.self_attn.q_proj.weight"
    with gs_compile.materialize(model):  # adapters begin with zeros
        assert torch.equal(model.merge_and_unload().get_parameter(name), wanted.get_parameter(name).detach().clone())


def test_a_checkpoint_is_decoded_by_transformers_where_that_is_asked_for(tmp_path):
    """And what is frozen is encoded then, in the first call."""
    folder, config = tmp_path / "saved", transformers.FineGrainedFP8Config(dequantize=True)
    of_fp8(wide().bfloat16(), folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    model = read(folder, tmp_path / "storage", quantization_config=config, frozen="nf4")
    found = dict(model.named_parameters())
    assert all(torch.equal(found[name].detach().clone(), each) for name, each in theirs.named_parameters())
    assert not any(residency_of(each).codec for each in found.values())
    model, _, _ = learned(model, storage=model.greedysnake_options)
    places = {name: residency_of(each).home.span.codec for name, each in model.named_parameters()}
    assert {name for name, codec in places.items() if codec} == {
        name for name, each in model.named_parameters() if is_encoded(name, each) and "lora" not in name
    }


def test_other_forms_are_refused_by_name(tmp_path):
    with pytest.raises(OptionError, match="asks for eetq, of a form not stored here"):
        read(tmp_path, tmp_path, quantization_config=transformers.EetqConfig())


def test_other_checkpoints_are_refused_by_name(tmp_path):
    by_bitsandbytes(wide(), tmp_path / "saved", NF4)
    with pytest.raises(OptionError, match='has nf4, and frozen="int8": leave frozen out'):
        read(tmp_path / "saved", tmp_path, frozen="int8")
    path = Path(tmp_path / "saved" / "config.json")
    config = json.loads(path.read_text())
    config["quantization_config"]["bnb_4bit_quant_type"] = "af4"
    path.write_text(json.dumps(config))
    with pytest.raises(OptionError, match=r"quantized \(bitsandbytes\) in a form that is not read"):
        read(tmp_path / "saved", tmp_path)


# Training -------------------------------------------------------------------------------------------------------------


def decoded(model):
    """In memory, with the decoded values of nf4."""
    for name, parameter in model.named_parameters():
        if is_encoded(name, parameter):
            codec = CODECS["nf4"]
            parameter.data = codec.decode(codec.encode(parameter.data), parameter.shape, parameter.dtype)
    return model


@pytest.mark.parametrize(
    ("dora", "kbit"),
    [
        pytest.param(dora, kbit, id=f"{'dora' if dora else 'lora'}-{'prepared' if kbit else 'plain'}", marks=marks)
        for dora, kbit, marks in (
            (False, False, pytest.mark.slow),
            (True, False, pytest.mark.slow),
            (False, True, pytest.mark.slow),
            (True, True, ()),
        )
    ],
)
def test_adapters_learn_what_they_learn_over_decoded_values(kbit, dora, tmp_path):
    """In fp32: `prepare_model_for_kbit_training` makes what is not encoded of that, and decoded values with it."""
    wide().to(torch.bfloat16 if kbit else torch.float32).save_pretrained(tmp_path / "saved")
    model = read(tmp_path / "saved", tmp_path / "storage", frozen="nf4")
    own = model.greedysnake_options
    other = decoded(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32))
    if kbit:
        model = peft.prepare_model_for_kbit_training(model)
    _, losses, found = learned(model, use_dora=dora, storage=own)
    _, wanted_losses, wanted = learned(other, use_dora=dora)
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    assert distance(found, wanted) < 1e-5


def test_adapters_are_merged_into_decoded_values(tmp_path):
    wide().save_pretrained(tmp_path / "saved")
    model = read(tmp_path / "saved", tmp_path / "storage", frozen="nf4")
    model, _, _ = learned(model, storage=model.greedysnake_options)
    with gs_compile.materialize(model):
        names = [name for name, each in model.named_parameters() if is_encoded(name, each) and "base_layer" in name]
        base = {name: model.get_parameter(name).detach().clone() for name in names}
        deltas = {name: model.get_submodule(name.split(".base")[0]).get_delta_weight("default") for name in names}
        model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(merged.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert len(names) == 4
    for name in names:
        found = merged.get_parameter(name.removeprefix("base_model.model.").replace(".base_layer", ""))
        assert torch.equal(found, base[name] + deltas[name]), name


def test_a_sft_trainer_trains_adapters_over_them(tmp_path):
    """With two lines, as over a plain checkpoint; the file of its checkpoint has the adapters alone."""
    wide().save_pretrained(tmp_path / "saved")
    data = Dataset.from_list([{"input_ids": list(range(3 + number, 15 + number))} for number in range(8)])
    curves = []
    for name in ("theirs", "ours"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        if name == "ours":
            model = read(tmp_path / "saved", tmp_path / "storage", quantization_config=NF4)
        else:
            model = decoded(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))
        args = trl.SFTConfig(
            output_dir=str(tmp_path / name),
            max_steps=3,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            logging_steps=1,
            adam_epsilon=1e-4,
            report_to=[],
            save_strategy="steps",
            save_steps=3,
            use_cpu=True,
            bf16=False,
        )
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words(), eos_token="1", pad_token="0")
        config = peft.LoraConfig(**LORA | {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": True})
        trainer = trl.SFTTrainer(model, args, train_dataset=data, peft_config=config, processing_class=tokenizer)
        if name == "ours":
            gs_compile.hf.attach(trainer, expert=EAGER)
        trainer.train()
        curves.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert float(curves[0][0]) > float(curves[0][-1])
    assert list(map(float, curves[1])) == pytest.approx(list(map(float, curves[0])), rel=1e-4)
    theirs, ours = (tmp_path / name / "checkpoint-3" for name in ("theirs", "ours"))
    wanted, found = (load_file(folder / "adapter_model.safetensors") for folder in (theirs, ours))
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-3, atol=1e-5) for name in wanted)
    assert [*ours.glob("*.safetensors")] == [ours / "adapter_model.safetensors"]


def words():
    import tokenizers

    return tokenizers.Tokenizer(tokenizers.models.WordLevel({str(number): number for number in range(96)}, "0"))


def test_what_is_trained_is_not_encoded(tmp_path):
    wide().save_pretrained(tmp_path / "saved")
    model = read(tmp_path / "saved", tmp_path / "storage", frozen="int8")
    model.requires_grad_(True)
    optimizer = gs_compile.AdamW(model.parameters())
    model.compile(backend="greedysnake", options={**model.greedysnake_options, "expert": EAGER})
    ids = torch.arange(24).view(2, 12)
    with pytest.raises(OptionError, match="is trained, but it was loaded in int8"):
        model(input_ids=ids, labels=ids).loss.backward()
    optimizer.zero_grad()
