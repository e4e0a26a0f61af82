"""adapters: traceable substitutes for functions of PEFT, transformers, Liger and torch that Dynamo cannot trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.comptime import ComptimeContext, comptime
from torch.nn import functional

from gs_compile.capture.internals import copy_of
from gs_compile.capture.liger import cross_entropy, of_causal_model
from gs_compile.capture.speech import masked_inputs, masked_states, of_ctc_model

_PLAIN = ("Parameter", "OffloadedParameter")  # types of weights that are not quantized


def trace_libraries() -> bool:
    """Register the substitutes for libraries that are imported by now; returns whether any is new."""
    changed = False
    for module, name, traced in FUNCTIONS:
        original = getattr(sys.modules.get(module), name, None)
        changed |= original is not None and _substitute(original, traced)
    for module, name, method, of_method in METHODS:
        kind = getattr(sys.modules.get(module), name, None)
        changed |= kind is not None and _substitute_method(kind, method, of_method)
    return changed


def _substitute(original: Any, traced: Callable[..., Any]) -> bool:
    """Have Dynamo trace `traced` in place of `original`; returns whether this is new."""
    try:
        torch.compiler.substitute_in_graph(original, skip_signature_check=True)(traced)
    except ValueError:  # there is a substitute
        return False
    return True


def _substitute_method(kind: type, name: str, traced: Callable[..., Any]) -> bool:
    """As `_substitute`, for a method of a class; `traced` gets the original method as its first argument."""
    original = getattr(kind, name)
    if original.__module__ == __name__:
        return False

    @functools.wraps(original, assigned=("__name__", "__qualname__", "__doc__"))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return traced(original, self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(kind, name, method)
    return True


def _with_delta(original: Any, layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """LoHa and LoKr: whether a module is dropped stays a tensor, and is drawn only if the module has a dropout rate."""
    if layer.disable_adapters or layer.merged:
        return original(layer, x, *args, **kwargs)
    result = layer.base_layer(x, *args, **kwargs)
    for name in layer.active_adapters:
        if name in layer._available_adapters:
            delta, rate = layer._get_delta_activations(name, x, *args, **kwargs), layer.module_dropout[name]
            result = result + (delta * (torch.rand(1, device=x.device) > rate) if layer.training and rate else delta)
    return result.to(x.dtype)


def _with_changed_parameter(original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """LoRA of a parameter, as of stacked experts: its module is called with the sum, without a parametrization."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or not names or kwargs.get("adapter_names") is not None:
        return original(layer, *args, **kwargs)
    changed = layer.get_param()
    for name in names:
        changed = changed + layer.get_delta_weight(name)
    path, inner = layer.parameter_name, layer.base_layer
    while inner is not layer.get_base_layer():  # each adapted parameter of a module has a layer around it
        path, inner = f"base_layer.{path}", inner.base_layer
    return torch.func.functional_call(layer.base_layer, {path: changed}, args, kwargs)


def _scattered(_: Any, layer: Any, name: str) -> Any:
    """SHiRA: what it adds to a weight, as a dense tensor, because graphs have no sparse ones."""
    values, indices = layer.shira_weight[name] * layer.scaling[name], layer.shira_indices[name]
    return values.new_zeros(layer.out_features, layer.in_features).index_put(tuple(indices.to(values.device)), values)


def _with_labels(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """DeBERTa's classifier with labels and no `problem_type`: the loss is the mean over samples with a label, or 0.

    transformers selects these samples, so sizes would depend on values.
    """
    labels = kwargs.get("labels")
    if labels is None or labels.dim() != 1 or model.num_labels == 1 or model.config.problem_type is not None:
        return original(model, *args, **kwargs)
    result = original(model, *args, **{**kwargs, "labels": None})
    is_tuple, has_label = isinstance(result, tuple), labels >= 0
    logits = result[0] if is_tuple else result.logits
    targets = labels.long().masked_fill(has_label.logical_not(), -100)
    loss = functional.cross_entropy(logits.float(), targets, reduction="sum") / has_label.sum().clamp(min=1)
    if is_tuple:
        return (loss, *result)
    return type(result)(loss=loss, logits=logits, hidden_states=result.hidden_states, attentions=result.attentions)


def _tables(original: Any, rotary: Any, places: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Tables of rotary_embedding_torch, made in each call: it keeps them in a buffer that the first call writes."""
    return original(rotary, places)


def _with_images(_: Any, model: Any, hidden: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Qwen3-VL and others: after their first layers, they add features of images at the places of these.

    transformers selects these places, so sizes would depend on values; here the features are scattered to them.
    """
    places, rows = places.to(hidden.device)[..., None], rows.to(hidden.device, hidden.dtype)
    torch._check_tensor_all(places.sum() == rows.shape[0])
    return torch.where(places, hidden + torch.zeros_like(hidden).masked_scatter(places, rows), hidden)


_OF_IMAGES = {  # models that add features of images after their first layers, by the end of their module's name
    "cohere_compass.modeling_cohere_compass": ("CohereCompassTextModel",),
    "granite_docling.modeling_granite_docling": ("GraniteDoclingTextModel",),
    "qwen3_omni_moe.modeling_qwen3_omni_moe": ("Qwen3OmniMoeThinkerTextModel", "Qwen3OmniMoeTalkerModel"),
    "qwen3_vl.modeling_qwen3_vl": ("Qwen3VLTextModel",),
    "qwen3_vl_moe.modeling_qwen3_vl_moe": ("Qwen3VLMoeTextModel",),
}
_OF_SPEECH = {  # models that mask spans of their hidden states, by the end of their module's name
    "data2vec.modeling_data2vec_audio": "Data2VecAudioModel",
    "hubert.modeling_hubert": "HubertModel",
    "sew.modeling_sew": "SEWModel",
    "sew_d.modeling_sew_d": "SEWDModel",
    "speecht5.modeling_speecht5": "SpeechT5SpeechEncoderPrenet",
    "unispeech.modeling_unispeech": "UniSpeechModel",
    "unispeech_sat.modeling_unispeech_sat": "UniSpeechSatModel",
    "wav2vec2.modeling_wav2vec2": "Wav2Vec2Model",
    "wav2vec2_bert.modeling_wav2vec2_bert": "Wav2Vec2BertModel",
    "wav2vec2_conformer.modeling_wav2vec2_conformer": "Wav2Vec2ConformerModel",
    "wavlm.modeling_wavlm": "WavLMModel",
}
_ROTARY = "rotary_embedding_torch.rotary_embedding_torch"
_DEBERTA = "transformers.models.deberta.modeling_deberta"
_DEBERTA_V2 = "transformers.models.deberta_v2.modeling_deberta_v2"
METHODS: tuple[tuple[str, str, str, Callable[..., Any]], ...] = (  # module, class, method, substitute
    ("peft.tuners.loha.layer", "LoHaLayer", "forward", _with_delta),
    ("peft.tuners.lokr.layer", "LoKrLayer", "forward", _with_delta),
    ("peft.tuners.lora.layer", "ParamWrapper", "forward", _with_changed_parameter),
    ("peft.tuners.shira.layer", "Linear", "get_delta_weight", _scattered),
    (_DEBERTA, "DebertaForSequenceClassification", "forward", _with_labels),
    (_DEBERTA_V2, "DebertaV2ForSequenceClassification", "forward", _with_labels),
    *((f"transformers.models.{end}", kind, "_mask_hidden_states", masked_states) for end, kind in _OF_SPEECH.items()),
    *(
        (f"transformers.models.{end}", kind, "_deepstack_process", _with_images)
        for end, kinds in _OF_IMAGES.items()
        for kind in kinds
    ),
    *((_ROTARY, "RotaryEmbedding", method, _tables) for method in ("forward", "get_scale")),
    ("transformers.models.whisper.modeling_whisper", "WhisperModel", "_mask_input_features", masked_inputs),
)


# Substitutes of functions ---------------------------------------------------------------------------------------------


def _weight(module: Any) -> Any:
    """A weight that DoRA reads. A quantized one still breaks the graph, so that PEFT's own function reads it."""
    if hasattr(module, "W_q"):
        return module.dequantize()
    if type(module.weight).__name__ not in _PLAIN:
        torch._dynamo.graph_break()
    return module.weight


def _transposed(weight: Any, fan_in_fan_out: bool) -> Any:
    """A transposed weight. PEFT makes a parameter of it, which a graph cannot do."""
    if not fan_in_fan_out:
        return weight
    return (weight.detach() if isinstance(weight, torch.nn.Parameter) else weight).T


def _recorded(model: Any) -> None:
    """The installation of hooks by which transformers records attentions, router logits or hidden states.

    It is done in the first forward that is asked for some of these, where Dynamo would break the graph; here it is done
    while Dynamo traces, once for each model.
    """
    comptime(_install_hooks)


def _install_hooks(context: ComptimeContext) -> None:
    model: Any = context.get_local("model")._i_will_not_complain_if_bc_breaks_VariableTracker()
    sys.modules["transformers.utils.output_capturing"].maybe_install_capturing_hooks(model.realize().value)


def _with_noise(module: Any, given: Any, embedded: torch.Tensor) -> torch.Tensor:
    """The noise of NEFTune, for sequences of all lengths.

    transformers passes the bound of the draw as a tensor, which Dynamo can read only if the length is a number.
    """
    if not module.training:
        return embedded
    number = embedded.new_ones(embedded.shape[1:], dtype=torch.float32).sum()
    bound: torch.Tensor = module.neftune_noise_alpha / number.sqrt()
    return embedded + torch.zeros_like(embedded).uniform_(-1, 1) * bound


def _attention_span(query: torch.Tensor, key: torch.Tensor, most: int) -> int:
    """How far DeBERTa's tokens attend, as a number: transformers makes it a tensor and then slices by it."""
    return min(max(query.size(-2), key.size(-2)), most)


def _in_one(*given: Any, options: Any = None, **named: Any) -> Any:
    """`linear_cross_entropy` without chunks, which break the graph. `codegen.pieces` runs whole heads in pieces."""
    return _IN_ONE(*given, **named)


def _is_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether a stack of torch's was told that its mask is causal.

    If it was not told, torch looks at the mask's values, at which Dynamo breaks the graph. It need not: this is only a
    hint for kernels, and the mask is applied in either case.
    """
    return is_causal is True


_LINEAR_LOSS: Any = getattr(functional, "linear_cross_entropy", None)  # of torch 2.13 and later
_IN_ONE: Any = _LINEAR_LOSS and copy_of(_LINEAR_LOSS)  # a copy, for which there is no substitute
FUNCTIONS: tuple[tuple[str, str, Callable[..., Any]], ...] = (  # module, function, substitute
    ("peft.utils.integrations", "dequantize_module_weight", _weight),
    ("peft.utils.other", "transpose", _transposed),
    ("transformers.utils.output_capturing", "maybe_install_capturing_hooks", _recorded),
    ("transformers.integrations.neftune", "neftune_post_forward_hook", _with_noise),
    ("transformers.loss.loss_ctc", "ForCTCLoss", of_ctc_model),
    (_DEBERTA, "compute_attention_span", _attention_span),
    ("torch.nn.functional", "linear_cross_entropy", _in_one),
    ("torch.nn.modules.transformer", "_detect_is_causal_mask", _is_causal),
    ("liger_kernel.transformers.functional", "liger_cross_entropy", cross_entropy),  # without Liger's kernels
    ("liger_kernel.transformers.model.loss_utils", "LigerForCausalLMLoss", of_causal_model),
)
