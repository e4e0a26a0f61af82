"""inspect: what ``greedysnake inspect`` shows: a model built from its config, without weights, and its step."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from typer import BadParameter

from gs_compile.cli.requests import Graph, InspectRequest
from gs_compile.errors import InspectionError
from gs_compile.passes.lower import StepSpec, passes

if TYPE_CHECKING:
    from torch import fx, nn

    from gs_compile.model.inspection import Inspection
    from gs_compile.model.unit_class import UnitClass

PROGRAM_PASSES = ("vertical", *(each.name for each in passes(StepSpec(1, 1))))


def inspect_text(request: InspectRequest) -> str:
    """Return what is printed.

    Raises `BadParameter` where the arguments make no model, and what the backend refuses the model with.
    """
    after, graph = request.after, request.graph
    if after is not None and after not in PROGRAM_PASSES:
        raise BadParameter(f"--after: invalid choice: {after!r} (choose from {', '.join(PROGRAM_PASSES)})")
    inspection = _inspect(request)
    text = _graph(inspection, graph, after) if graph else None
    if request.as_json:
        return json.dumps(inspection.as_dict() | ({"graph": text} if text else {}), indent=2)
    return (text or inspection.report(after)).rstrip("\n")


def _inspect(request: InspectRequest) -> Inspection:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise BadParameter(f"{error.name} is not installed: pip install 'greedysnake[hf]'") from error
    import gs_compile
    from gs_compile.capture.dynamo import TorchDynamoException
    from gs_compile.model.backend import greedysnake

    transformers.logging.set_verbosity_error()
    with torch.device("meta"):
        module = _module(request)
        token_ids = torch.zeros(request.micro_batches * request.micro_batch_size, request.sequence, dtype=torch.long)
    module.compile(backend=greedysnake, options={"micro_batch_size": request.micro_batch_size})
    try:
        module(input_ids=token_ids, labels=token_ids)
    except TorchDynamoException as error:
        reason = next((line.strip() for line in str(error).splitlines() if "got " in line), str(error))
        raise InspectionError(
            f"Dynamo cannot capture this model without weights: {shorten(reason.rpartition('got ')[2], 300)}. Build it "
            "with weights in a script, call it once, and print(gs_compile.inspect(model))"
        ) from error
    return gs_compile.inspect(module)


def _graph(inspection: Inspection, graph: Graph, after: str | None) -> str:
    match graph:
        case "captured":
            return str(inspection.captured.print_readable(print_output=False))
        case "forward":
            return "\n".join(_readable("forward", layers, layers.forward) for layers in inspection.classes)
        case "backward":
            return "\n".join(_readable("backward", layers, layers.backward) for layers in inspection.classes)
        case "program":
            return str(inspection.program(after))


def _readable(what: str, layers: UnitClass, module: fx.GraphModule | None) -> str:
    """A class's graph as code, under what its inputs are."""
    title = f"# {what} of layers {' '.join(map(str, layers.units))}"
    if module is None:
        return f"{title}: nothing has a gradient"
    placeholders = module.graph.find_nodes(op="placeholder")
    inputs = (*layers.inputs, *["gradient of x"] * (len(placeholders) - len(layers.inputs)))
    names = (f"#   {node.name}: {name}" for node, name in zip(placeholders, inputs, strict=True))
    return "\n".join([title, *names, module.print_readable(print_output=False)])


# The model ------------------------------------------------------------------------------------------------------------


def _module(request: InspectRequest) -> nn.Module:
    """The causal language model that the arguments describe, on the current device."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM

    try:
        config = _config(request)
        longest = getattr(config, "max_position_embeddings", None) or request.sequence
        if request.sequence > longest:
            raise BadParameter(f"--sequence {request.sequence}: the model has {longest} positions")
        module: nn.Module = AutoModelForCausalLM.from_config(config)
    except (ValueError, StrictDataclassError) as error:  # transformers on what it cannot build
        raise BadParameter(f"--model {request.model}: {shorten(str(error), 300)}") from error
    return module.train()


def _config(request: InspectRequest) -> Any:
    from transformers import CONFIG_MAPPING

    fields = _fields(request.model)
    model_type = str(fields.pop("model_type", request.model))
    if model_type not in CONFIG_MAPPING:
        close = get_close_matches(model_type, list(CONFIG_MAPPING.keys()), n=1)
        hint = f"did you mean {close[0]}?" if close else "give a model type of transformers or a path"
        raise BadParameter(f"--model {model_type}: neither a model type nor a file; {hint}")
    config_class = CONFIG_MAPPING[model_type]
    fields |= {"use_cache": False}
    if request.layers:
        fields[config_class.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = request.layers
        if fields.get("layer_types"):
            fields["layer_types"] = fields["layer_types"][: request.layers]
    config = config_class(**fields)
    return config_class(**(fields | _scaled(config, request.hidden))) if request.hidden else config


def _fields(model: str) -> dict[str, Any]:
    """A config file's content; nothing for a model type."""
    path = Path(model)
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise BadParameter(f"--model {model}: not a JSON file: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise BadParameter(f"--model {model}: not a config of transformers, which names its model_type")
    return fields


def _scaled(config: Any, hidden: int) -> dict[str, Any]:
    """The fields that make `config` as wide as `hidden`: as wide heads, fewer of them, and the MLP in proportion."""

    def scaled(number: int) -> int:
        return max(1, number * hidden // int(config.hidden_size))

    fields = {"hidden_size": hidden}
    if getattr(config, "num_attention_heads", None):
        fields["num_attention_heads"] = _divisor(hidden, scaled(config.num_attention_heads))
    if getattr(config, "num_key_value_heads", None):
        fields["num_key_value_heads"] = _divisor(fields["num_attention_heads"], scaled(config.num_key_value_heads))
    if getattr(config, "intermediate_size", None):
        fields["intermediate_size"] = scaled(config.intermediate_size)
    return {config.attribute_map.get(name, name): value for name, value in fields.items()}


def _divisor(number: int, at_most: int) -> int:
    return next(n for n in range(at_most, 0, -1) if number % n == 0)
