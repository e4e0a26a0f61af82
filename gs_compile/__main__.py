"""The command line: ``greedysnake inspect --model gpt2 --layers 3 --micro-batches 2``, or ``python -m gs_compile``.

Nothing heavy is imported before the arguments are known to be sound.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from gs_compile.errors import GreedySnakeError, InspectionError
from gs_compile.passes.lower import PASSES, TIERED

if TYPE_CHECKING:
    from torch import fx, nn

    from gs_compile.inspection import Inspection, UnitClass

PROGRAM_PASSES = ("vertical", *(run.__name__ for run in PASSES if run not in TIERED))


class UsageError(Exception):
    """The arguments do not make a model."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 where the backend refuses the model, 2 for wrong arguments."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        print(_inspect(arguments))
    except UsageError as error:
        parser.error(str(error))
    except GreedySnakeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="greedysnake", description="Training layer by layer, as a compiler pass.")
    commands = parser.add_subparsers(required=True, metavar="command")
    inspect = commands.add_parser(
        "inspect",
        help="show what a model's training step becomes",
        description="Show what the training step of a HuggingFace language model becomes. The model is built from its "
        "config without weights, so any size fits any machine.",
    )
    add = inspect.add_argument
    add("--model", required=True, metavar="M", help='a model type ("gpt2", "llama") or the path of a config.json')
    add("--layers", type=_count, metavar="L", help="number of layers (default: the config's)")
    add("--hidden", type=_count, metavar="H", help="width; heads and MLP are scaled with it (default: the config's)")
    add("--micro-batches", type=_count, default=2, metavar="N", help="micro-batches of the step (default: %(default)s)")
    add("--micro-batch-size", type=_count, default=1, metavar="B", help="samples in each (default: %(default)s)")
    add("--sequence", type=_count, default=128, metavar="T", help="tokens of a sample (default: %(default)s)")
    add("--after", choices=PROGRAM_PASSES, help="the program after this pass (default: the last)")
    add(
        "--graph",
        choices=("captured", "forward", "backward", "program"),
        help="one of these alone: the captured model, forward or backward of the layers, the step program",
    )
    add("--json", action="store_true", help="for programs: one JSON object; with --graph also the graph's text")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def _inspect(arguments: argparse.Namespace) -> str:
    try:
        import torch
        import transformers
        from torch._dynamo.exc import TorchDynamoException
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'greedysnake[hf]'") from error
    import gs_compile
    from gs_compile.backend import greedysnake

    transformers.logging.set_verbosity_error()
    with torch.device("meta"):
        model = _model(arguments)
        batch_size = arguments.micro_batches * arguments.micro_batch_size
        token_ids = torch.zeros(batch_size, arguments.sequence, dtype=torch.long)
    model.compile(backend=greedysnake, options={"micro_batch_size": arguments.micro_batch_size})
    try:
        model(input_ids=token_ids, labels=token_ids)
    except TorchDynamoException as error:
        reason = next((line.strip() for line in str(error).splitlines() if "got " in line), str(error))
        raise InspectionError(
            f"Dynamo cannot capture this model without weights: {shorten(reason.rpartition('got ')[2], 300)}. Build it "
            "with weights in a script, call it once, and print(gs_compile.inspect(model))"
        ) from error
    return _show(gs_compile.inspect(model), arguments)


def _show(inspection: Inspection, arguments: argparse.Namespace) -> str:
    graph = _graph(inspection, arguments) if arguments.graph else None
    if arguments.json:
        return json.dumps(inspection.as_dict() | ({"graph": graph} if graph else {}), indent=2)
    return (graph or inspection.report(arguments.after)).rstrip("\n")


def _graph(inspection: Inspection, arguments: argparse.Namespace) -> str:
    match arguments.graph:
        case "captured":
            return str(inspection.captured.print_readable(print_output=False))
        case "forward":
            return "\n".join(_readable("forward", layers, layers.forward) for layers in inspection.classes)
        case "backward":
            return "\n".join(_readable("backward", layers, layers.backward) for layers in inspection.classes)
        case _:
            return str(inspection.program(arguments.after))


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


def _model(arguments: argparse.Namespace) -> nn.Module:
    """The causal language model that the arguments describe, on the current device."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM

    try:
        config = _config(arguments)
        longest = getattr(config, "max_position_embeddings", None) or arguments.sequence
        if arguments.sequence > longest:
            raise UsageError(f"--sequence {arguments.sequence}: the model has {longest} positions")
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    except (ValueError, StrictDataclassError) as error:  # transformers on what it cannot build
        raise UsageError(f"--model {arguments.model}: {shorten(str(error), 300)}") from error
    return model.train()


def _config(arguments: argparse.Namespace) -> Any:
    from transformers import CONFIG_MAPPING

    fields = _fields(arguments.model)
    model_type = str(fields.pop("model_type", arguments.model))
    if model_type not in CONFIG_MAPPING:
        close = get_close_matches(model_type, list(CONFIG_MAPPING.keys()), n=1)
        hint = f"did you mean {close[0]}?" if close else "give a model type of transformers or a path"
        raise UsageError(f"--model {model_type}: neither a model type nor a file; {hint}")
    config_class = CONFIG_MAPPING[model_type]
    fields |= {"use_cache": False}
    if arguments.layers:
        fields[config_class.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = arguments.layers
        if fields.get("layer_types"):
            fields["layer_types"] = fields["layer_types"][: arguments.layers]
    config = config_class(**fields)
    return config_class(**(fields | _scaled(config, arguments.hidden))) if arguments.hidden else config


def _fields(model: str) -> dict[str, Any]:
    """A config file's content; nothing for a model type."""
    path = Path(model)
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"--model {model}: not a JSON file: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise UsageError(f"--model {model}: not a config of transformers, which names its model_type")
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


if __name__ == "__main__":
    sys.exit(main())
