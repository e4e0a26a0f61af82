"""adapters: what layers of PEFT, models of transformers, losses of Liger, and stacks and losses of torch do that Dynamo
cannot trace, said in a way that it can.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.comptime import ComptimeContext, comptime
from torch.nn import functional
from torch.nn.modules import transformer

from gs_compile.capture.liger import LOSSES

_PLAIN = ("Parameter", "OffloadedParameter")  # types of weights that are not quantized


def trace_libraries() -> bool:
    """Have Dynamo trace what libraries that are imported by now do; returns whether this changed anything."""
    losses = _trace_chunked_loss(), _trace_liger_losses()
    return any([_trace_adapters(), _trace_recorders(), *losses, _trace_noise(), _trace_masks()])


def _trace_adapters() -> bool:
    """How DoRA reads a weight that may be quantized, or is transposed, and `METHODS` of its layers.

    PEFT asks for the name of the weight's module, at which Dynamo breaks the graph. A quantized weight breaks it still,
    and PEFT's own function reads it. What is transposed becomes a parameter there, which no graph can make.
    """
    changed = False
    for module, name, traced in FUNCTIONS:
        original = getattr(sys.modules.get(f"peft.utils.{module}"), name, None)
        changed |= original is not None and _substitute(original, traced)
    for kind, name, method, of_method in METHODS:
        layer = getattr(sys.modules.get(f"peft.tuners.{kind}.layer"), name, None)
        changed |= layer is not None and _substitute_method(layer, method, of_method)
    return changed


def _trace_recorders() -> bool:
    """Models of transformers that record what layers make.

    The hooks for it are installed in the first forward that is asked for attentions, router logits or hidden
    states. Dynamo breaks the graph there; so they are installed while it traces, once for a model.
    """
    install = getattr(sys.modules.get("transformers.utils.output_capturing"), "maybe_install_capturing_hooks", None)
    if install is None:
        return False

    def while_tracing(context: ComptimeContext) -> None:
        model: Any = context.get_local("model")._i_will_not_complain_if_bc_breaks_VariableTracker()
        install(model.realize().value)

    def maybe_install_capturing_hooks(model: Any) -> None:
        comptime(while_tracing)

    return _substitute(install, maybe_install_capturing_hooks)


def _trace_chunked_loss() -> bool:
    """torch's loss of a head, without its own chunks.

    These are a function that breaks the graph; `codegen.pieces` has pieces of all that a head does.
    """
    original = getattr(functional, "linear_cross_entropy", None)  # of torch 2.13 and later
    if original is None:
        return False
    whole: Any = FunctionType(original.__code__, original.__globals__)  # another one, which Dynamo traces
    whole.__kwdefaults__ = original.__kwdefaults__

    def linear_cross_entropy(*given: Any, options: Any = None, **named: Any) -> Any:
        return whole(*given, **named)

    return _substitute(original, linear_cross_entropy)


def _trace_liger_losses() -> bool:
    """Liger's losses, without its kernels; `codegen.pieces` has pieces of the one that is fused with the head."""
    changed = False
    for (module, name), traced in LOSSES.items():
        original = getattr(sys.modules.get(f"liger_kernel.transformers.{module}"), name, None)
        changed |= original is not None and _substitute(original, traced)
    return changed


def _trace_noise() -> bool:
    """The noise of NEFTune, for sequences of all lengths.

    transformers draws it within a bound that is a tensor, which Dynamo can read where the length is a number.
    """
    noisy = getattr(sys.modules.get("transformers.integrations.neftune"), "neftune_post_forward_hook", None)
    return noisy is not None and _substitute(noisy, _with_noise)


def _trace_masks() -> bool:
    """torch's stacks that are given a mask and no `is_causal`.

    They look at the mask's values to find whether it is causal, at which Dynamo breaks the graph. That is a hint to
    kernels alone, and the mask counts in either case: here it is what was said.
    """

    def _detect_is_causal_mask(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    return _substitute(transformer._detect_is_causal_mask, _detect_is_causal_mask)


def _substitute(original: Any, traced: Callable[..., Any]) -> bool:
    """Have Dynamo trace a function as another one; returns whether it was not so."""
    try:
        torch.compiler.substitute_in_graph(original, skip_signature_check=True)(traced)
    except ValueError:  # Dynamo has a substitute
        return False
    return True


def _substitute_method(layer: type, name: str, traced: Callable[..., Any]) -> bool:
    """Have Dynamo trace a method of a class as a function that is given that method first; as `_substitute`."""
    original = getattr(layer, name)
    if original.__module__ == __name__:
        return False

    @functools.wraps(original, assigned=("__name__", "__qualname__", "__doc__"))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return traced(original, self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(layer, name, method)
    return True


def _with_delta(original: Any, layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """LoHa and LoKr: whether a module is dropped is drawn as a tensor, and only where it has a rate."""
    if layer.disable_adapters or layer.merged:
        return original(layer, x, *args, **kwargs)
    result = layer.base_layer(x, *args, **kwargs)
    for name in layer.active_adapters:
        if name in layer._available_adapters:
            delta, rate = layer._get_delta_activations(name, x, *args, **kwargs), layer.module_dropout[name]
            result = result + (delta * (torch.rand(1, device=x.device) > rate) if layer.training and rate else delta)
    return result.to(x.dtype)


def _with_changed_parameter(original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """LoRA of a parameter, as of stacked experts: its module runs with the sum, and registers no parametrization."""
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
    """SHiRA: what it adds to a weight, dense, as graphs have no sparse tensors."""
    values, indices = layer.shira_weight[name] * layer.scaling[name], layer.shira_indices[name]
    return values.new_zeros(layer.out_features, layer.in_features).index_put(tuple(indices.to(values.device)), values)


METHODS = (  # of PEFT's layers, by the module and the name of their class
    ("loha", "LoHaLayer", "forward", _with_delta),
    ("lokr", "LoKrLayer", "forward", _with_delta),
    ("lora", "ParamWrapper", "forward", _with_changed_parameter),
    ("shira", "Linear", "get_delta_weight", _scattered),
)


def _with_noise(module: Any, given: Any, embedded: torch.Tensor) -> torch.Tensor:
    if not module.training:
        return embedded
    number = embedded.new_ones(embedded.shape[1:], dtype=torch.float32).sum()
    bound: torch.Tensor = module.neftune_noise_alpha / number.sqrt()
    return embedded + torch.zeros_like(embedded).uniform_(-1, 1) * bound


def _weight(module: Any) -> Any:
    if hasattr(module, "W_q"):
        return module.dequantize()
    if type(module.weight).__name__ not in _PLAIN:
        torch._dynamo.graph_break()
    return module.weight


def _transposed(weight: Any, fan_in_fan_out: bool) -> Any:
    if not fan_in_fan_out:
        return weight
    return (weight.detach() if isinstance(weight, torch.nn.Parameter) else weight).T


FUNCTIONS = (  # of PEFT, by their modules
    ("integrations", "dequantize_module_weight", _weight),
    ("other", "transpose", _transposed),
)
