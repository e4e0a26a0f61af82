"""inspect: the command ``greedysnake inspect``: a model built from its config, without weights, and its step."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import fx, nn
from typer import BadParameter

from gs_compile.capture.call import no_capture
from gs_compile.capture.dynamo import TorchDynamoException
from gs_compile.cli.requests import InspectRequest
from gs_compile.model.backend import greedysnake
from gs_compile.model.inspection import Inspection, UnitClass, inspect
from gs_compile.passes.lower import StepSpec, lower
from gs_compile.planner.cost.model import built, check_length, named_config

PROGRAM_PASSES = tuple(program.made_by for program in lower(StepSpec(1, 1)))


def inspect_text(request: InspectRequest) -> str:
    """The text to print.

    Raises `BadParameter` or `PlanError` if the arguments give no model, and the backend's errors for the model.
    """
    after = request.after
    if after is not None and after not in PROGRAM_PASSES:
        raise BadParameter(f"--after: invalid choice: {after!r} (choose from {', '.join(PROGRAM_PASSES)})")
    inspection = _inspect(request)
    text = _graph(inspection, request) if request.graph else None
    if request.as_json:
        return json.dumps(inspection.as_dict() | ({"graph": text} if text else {}), indent=2)
    return (text or inspection.report(after)).rstrip("\n")


def _inspect(request: InspectRequest) -> Inspection:
    module = _module(request)
    batch_size = request.micro_batches * request.micro_batch_size
    token_ids = torch.zeros(batch_size, request.sequence, dtype=torch.long, device="meta")
    module.compile(backend=greedysnake, options={"micro_batch_size": request.micro_batch_size})
    try:
        module(input_ids=token_ids, labels=token_ids)
    except TorchDynamoException as error:
        instead = ". Build it with weights in a script, call it once, and print(gs_compile.inspect(model))"
        raise no_capture(error, instead) from error
    return inspect(module)


def _graph(inspection: Inspection, request: InspectRequest) -> str:
    match request.graph:
        case "captured":
            return str(inspection.captured.print_readable(print_output=False))
        case "forward" | "backward" as name:
            return "\n".join(_readable(name, layers) for layers in inspection.classes)
        case _:
            return str(inspection.program(request.after))


def _readable(name: str, layers: UnitClass) -> str:
    """The graph of a class's forward or backward as code, with a comment that names its inputs."""
    title = f"# {name} of layers {' '.join(map(str, layers.units))}"
    module: fx.GraphModule | None = getattr(layers, name)
    if module is None:
        return f"{title}: nothing has a gradient"
    placeholders = module.graph.find_nodes(op="placeholder")
    inputs = (*layers.inputs, *["gradient of x"] * (len(placeholders) - len(layers.inputs)))
    names = (f"#   {node.name}: {name}" for node, name in zip(placeholders, inputs, strict=True))
    return "\n".join([title, *names, module.print_readable(print_output=False)])


# The model ------------------------------------------------------------------------------------------------------------


def _module(request: InspectRequest) -> nn.Module:
    """The causal language model that the arguments describe, on the meta device."""
    config = named_config(request.model)
    check_length(config, request.sequence)
    changes = _changes(config, request)
    return built(named_config(request.model, **changes) if changes else config).train()


def _changes(config: Any, request: InspectRequest) -> dict[str, Any]:
    """The fields that make `config` as deep and as wide as asked for: as wide heads, and the MLP in proportion."""
    fields: dict[str, Any] = {}
    if layers := request.layers:
        fields["num_hidden_layers"] = layers
        if types := getattr(config, "layer_types", None):
            fields["layer_types"] = types[:layers] if layers <= len(types) else None  # of more the config's own default
    if hidden := request.hidden:
        fields["hidden_size"] = multiple = hidden
        for name in ("num_attention_heads", "num_key_value_heads"):
            if heads := getattr(config, name, None):
                most = max(1, heads * hidden // config.hidden_size)
                fields[name] = multiple = next(n for n in range(most, 0, -1) if multiple % n == 0)
        if width := getattr(config, "intermediate_size", None):
            fields["intermediate_size"] = max(1, width * hidden // config.hidden_size)
    return {config.attribute_map.get(name, name): value for name, value in fields.items()}
