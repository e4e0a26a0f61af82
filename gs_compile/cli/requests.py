"""requests: the options of the commands, each stated once: tuples whose fields a command takes as its options.

Nothing heavy is imported here, so that help comes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import typer

from gs_compile.options import Clipping, Frozen, Masters, Recompute
from gs_compile.planner.request import OptimizerName, Precision, Request, Saturation, States
from gs_compile.schedules import Schedule

Graph = Literal["captured", "forward", "backward", "program"]
ANY = Parameter.POSITIONAL_OR_KEYWORD
GIVEN = ("model", "request")  # parameters of commands that are made of options


def option(text: str, default: Any = ..., *names: str, unset: str | bool = True, **more: Any) -> Any:
    """An option with its help; `unset`: the words for its default in the help."""
    return typer.Option(default, *names, help=text, show_default=unset, **more)


def flag(text: str, *names: str, unset: str | bool = True, **more: Any) -> Callable[[Any], Any]:
    """The same of whatever default."""
    return lambda default: option(text, default, *names, unset=unset, **more)


def takes(request: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of a tuple as options, before its own; it gets them as one object."""
    defaults, types = request._field_defaults, get_type_hints(request, include_extras=True)
    options = [Parameter(name, ANY, default=defaults[name], annotation=types[name]) for name in types]
    return lambda command: _asking(command, options, lambda **asked: (request(**asked),))


def _asking(
    command: Callable[..., None], options: Sequence[Parameter], given: Callable[..., tuple[Any, ...]]
) -> Callable[..., None]:
    """The command with options before its own. given: what it gets in their place, first among its arguments."""

    @wraps(command)
    def run(*values: Any, **named: Any) -> None:
        asked = whole.bind(*values, **named).arguments
        command(*given(**{each.name: asked.pop(each.name) for each in options}), **asked)

    own = [each for each in signature(command, eval_str=True).parameters.values() if each.name not in GIVEN]
    whole = run.__signature__ = Signature([*options, *own])  # type: ignore[attr-defined]
    return run


Json = Annotated[bool, option("Print one JSON object.", ..., "--json")]
Storage = Annotated[
    list[Path] | None, option("A storage directory; repeat for each drive.", metavar="DIR", unset="in the user's cache")
]
Directory = Annotated[Path, typer.Argument(help="A storage directory.", metavar="DIR", show_default=False)]
File = Path | None


class InspectRequest(NamedTuple):
    """A causal language model of transformers, and the step it is looked at in; None: the config's own."""

    model: str = option(
        'A model type ("llama"), the path of a model or of its config.json, or an id of the hub.', metavar="M"
    )
    layers: int | None = option("Number of layers.", None, min=1, metavar="L", unset="the config's")
    hidden: int | None = option(
        "Hidden size; heads and MLP are scaled with it.", None, min=1, metavar="H", unset="the config's"
    )
    micro_batches: int = option("Number of micro-batches in a step.", 2, min=1, metavar="N")
    micro_batch_size: int = option("Samples in a micro-batch.", 1, min=1, metavar="B")
    sequence: int = option("Tokens in a sample.", 128, min=1, metavar="T")
    after: str | None = option("Show the program after this pass.", None, metavar="PASS", unset="the last")
    graph: Graph | None = option(
        "Show only this: the captured model, the layers' forward or backward, or the step program.", None
    )
    as_json: bool = option("Print one JSON object; with --graph also the graph's text.", False, "--json")


Model = Annotated[
    str,
    option(
        'A known name ("llama-8b", "gpt-65b", "gpt-oss-20b"), a model type ("llama"), the path of a model or of its '
        "config.json, or an id of the hub.",
        metavar="M",
    ),
]
Flag = tuple[Any, Any]  # its type on the command line; its help

# A flag for each field of a `Request`; what is not given is what the field says.
FLAGS: Mapping[str, Flag] = {
    "machine": (
        str | None,
        flag('A machine such as "a100", or the path of a profile.', metavar="NAME", unset="this one, measured"),
    ),
    "sequence": (int, flag("Tokens in a sample.", min=1, metavar="T")),
    "batch_size": (
        int | None,
        flag("Samples in a step, of all GPUs.", min=1, metavar="B", unset="as few as keep the machine busy"),
    ),
    "micro_batch_size": (int | None, flag("Samples in a micro-batch.", min=1, metavar="S", unset="chosen")),
    "num_micro_batches": (
        int | None,
        flag("Micro-batches in a step.", "--micro-batches", min=1, metavar="N", unset="chosen"),
    ),
    "alpha": (
        float | None,
        flag("The part of each update that is delayed to the next forward.", metavar="A", unset="chosen"),
    ),
    "ratios": (
        list[str] | None,
        flag(
            "The part of a class (parameter, checkpoint, optimizer) in host memory, such as parameter=0.5.",
            "--ratio",
            metavar="CLASS=X",
            unset="chosen",
        ),
    ),
    "schedule": (Schedule, flag("The order of the step.")),
    "clip": (bool, flag("Clip by the norm of all gradients.", "--clip")),
    "clipping": (
        Clipping | None,
        flag("With --clip: updates wait for the norm, or run earlier and may be rolled back.", unset="chosen"),
    ),
    "accumulate": (bool, flag("A step has several backwards, and updates wait for the last one.", "--accumulate")),
    "host_memory": (
        str | None,
        flag('A budget of host memory, such as "64GiB".', metavar="SIZE", unset="the machine's"),
    ),
    "device_memory": (str | None, flag("A budget of device memory.", metavar="SIZE", unset="the machine's")),
    "precision": (Precision | None, flag("bf16 with fp32 masters, or the model's own dtype.", unset="bf16")),
    "optimizer": (OptimizerName, flag("AdamW, or Muon for the matrices of layers and AdamW for the rest.")),
    "states": (States, flag("The type in which the optimizer's moments are stored.")),
    "wear_years": (
        float | None,
        flag("Years that the drives must last, training all day.", metavar="Y"),
    ),
    "recompute": (Recompute, flag("What a backward computes again: the whole forward, none of it, or what is faster.")),
    "masters": (
        Masters | None,
        flag(
            "fp32 masters of bf16 parameters: the parameter is the upper half, or the state has all of it.",
            unset="the faster",
        ),
    ),
    "durability": (str, flag('Which steps can be resumed: "off", "step" (each), or N (every N-th).', metavar="N")),
    "storage": (
        list[Path] | None,
        flag("A storage directory; repeat for each drive.", metavar="DIR", unset="in the user's cache"),
    ),
    "saturation": (
        Saturation,
        flag("When a batch is large enough: more brings under a tenth of its growth, or under 1 %."),
    ),
    "gpus": (int, flag("GPUs in a node; each has its own micro-batches.", min=1, metavar="G")),
    "nodes": (int, flag("Number of nodes, each like the machine.", min=1, metavar="N")),
    "lora": (
        int | None,
        flag(
            "Train only PEFT's LoRA adapters of this rank, on all linear layers of blocks.",
            min=1,
            metavar="R",
            unset="none",
        ),
    ),
    "frozen": (Frozen | None, flag("The format of frozen matrices of layers.", unset="not quantized")),
    "layer_tokens": (
        int | None,
        flag("Tokens that layers, except attention, run on at a time; 0: all.", min=0, metavar="T", unset="chosen"),
    ),
    "network": (
        str | None,
        flag("The rate at which a node receives from others, such as 25GB/s.", metavar="RATE", unset="none"),
    ),
}


def plans(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a model and the flags of a plan, before its own; it gets the model's name and a `Request`.

    Raises `BadParameter` for a ratio that is none, and what a `Request` raises.
    """
    defaults = {each.name: each.default for each in fields(Request)} | {"ratios": None}
    flags = [
        Parameter(name, ANY, default=made(defaults[name]), annotation=kind) for name, (kind, made) in FLAGS.items()
    ]
    return _asking(command, [Parameter("model", ANY, annotation=Model), *flags], _planned)


def _planned(model: str, *, ratios: list[str] | None, durability: object, **asked: Any) -> tuple[str, Request]:
    often = str(durability)
    steps: Any = int(often) if often.isdecimal() else often
    return model, Request(ratios=dict(map(_ratio, ratios or ())), durability=steps, **asked)


def _ratio(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name.strip(), float(number)
    except ValueError as error:
        raise typer.BadParameter(f"--ratio {text}: not a class and a number, such as parameter=0.5") from error
