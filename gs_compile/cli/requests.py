"""requests: the options of the commands, each stated once: tuples whose fields a command takes as its options.

Nothing heavy is imported here, so that help comes at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import typer

from gs_compile.program.ir import Schedule

Graph = Literal["captured", "forward", "backward", "program"]


def option(text: str, default: Any = ..., *names: str, unset: str | bool = True, **more: Any) -> Any:
    """An option with its help; `unset`: the words for its default in the help."""
    return typer.Option(default, *names, help=text, show_default=unset, **more)


def takes(request: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of a tuple as options, before its own; it gets them as one object."""
    defaults, types = request._field_defaults, get_type_hints(request, include_extras=True)
    kind = Parameter.POSITIONAL_OR_KEYWORD
    asked = [Parameter(name, kind, default=defaults[name], annotation=types[name]) for name in types]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            command(request(**{name: given.pop(name) for name in types}), **given)

        _, *own = signature(command, eval_str=True).parameters.values()
        run.__signature__ = Signature([*asked, *own])  # type: ignore[attr-defined]
        return run

    return decorate


Json = Annotated[bool, option("Print one JSON object.", ..., "--json")]
Storage = Annotated[
    list[Path] | None, option("A storage directory; again for each drive.", metavar="DIR", unset="in the user's cache")
]
File = Path | None


class InspectRequest(NamedTuple):
    """A causal language model of transformers, and the step it is looked at in; None: the config's own."""

    model: str = option(
        'A model type ("llama"), the path of a model or its config.json, an id of the hub.', metavar="M"
    )
    layers: int | None = option("Number of layers.", None, min=1, metavar="L", unset="the config's")
    hidden: int | None = option(
        "Width; heads and MLP are scaled with it.", None, min=1, metavar="H", unset="the config's"
    )
    micro_batches: int = option("Micro-batches of the step.", 2, min=1, metavar="N")
    micro_batch_size: int = option("Samples in each.", 1, min=1, metavar="B")
    sequence: int = option("Tokens of a sample.", 128, min=1, metavar="T")
    after: str | None = option("The program after this pass.", None, metavar="PASS", unset="the last")
    graph: Graph | None = option(
        "One of these alone: the captured model, forward or backward of the layers, the step program.", None
    )
    as_json: bool = option("For programs: one JSON object; with --graph also the graph's text.", False, "--json")


class PlanRequest(NamedTuple):
    """What `planner.plan.plan` is given: a model, a machine, and what of a step; None: the planner chooses."""

    model: str = option('As in inspect, or "gpt-65b".', metavar="M")
    machine: str | None = option('"a100", or the path of a profile.', None, metavar="NAME", unset="this one, measured")
    sequence: int = option("Tokens of a sample.", 2048, min=1, metavar="T")
    batch_size: int | None = option(
        "Samples of a step, of all GPUs.", None, min=1, metavar="B", unset="as few as keep it busy"
    )
    micro_batch_size: int | None = option("Samples of a micro-batch.", None, min=1, metavar="S", unset="chosen")
    num_micro_batches: int | None = option(
        "Micro-batches of a step.", None, "--micro-batches", min=1, metavar="N", unset="chosen"
    )
    alpha: float | None = option(
        "The part of each update that is put off.", None, min=0, max=1, metavar="A", unset="chosen"
    )
    ratios: list[str] | None = option(
        "The part of parameter, checkpoint or optimizer that is in host memory, as parameter=0.5.",
        None,
        "--ratio",
        metavar="CLASS=X",
        unset="chosen",
    )
    schedule: Schedule = option("The order of the step.", "vertical")
    clip: bool = option("Clip by the norm of all gradients: updates wait for it.", False, "--clip")
    host_memory: str | None = option('A budget, such as "64GiB".', None, metavar="SIZE", unset="the machine's")
    device_memory: str | None = option("The same for the device.", None, metavar="SIZE", unset="the machine's")
    precision: Literal["bf16", "model"] = option("bf16 with fp32 masters, or the model's own.", "bf16")
    states: Literal["fp32", "bf16", "8bit"] = option("What moments of the optimizer are stored in.", "fp32")
    wear_years: float | None = option("Years that the drives are to last, training all day.", None, min=0, metavar="Y")
    recompute: Literal["auto", "all", "none"] = option(
        "What a backward runs again: the whole forward, none of it, or what is faster.", "auto"
    )
    masters: Literal["split", "whole"] | None = option(
        "fp32 masters of bf16 parameters: the parameter is their upper half, or the state has all.",
        None,
        unset="split",
    )
    durability: str = option('The steps that outlive the process: "off", "step", or N: every N-th.', "off", metavar="N")
    storage: Storage = None
    gpus: int = option("GPUs of a node; each has micro-batches of its own.", 1, min=1, metavar="G")
    nodes: int = option("Nodes, each like the machine.", 1, min=1, metavar="N")
    network: str | None = option("What a node receives of others, such as 25GB/s.", None, metavar="RATE", unset="none")
