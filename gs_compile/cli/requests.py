"""requests: the options of the commands, each stated once: dataclasses whose fields a command takes as its options.

Nothing heavy is imported here, so that help comes at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer

Graph = Literal["captured", "forward", "backward", "program"]
Schedule = Literal["vertical", "horizontal", "single", "lifetime"]
Request = TypeVar("Request")


def option(text: str, *names: str, metavar: str | None = None, unset: str | bool = True, **bounds: Any) -> Any:
    """An option with its help; `unset`: the words for its default in the help."""
    return typer.Option(*names, metavar=metavar, help=text, show_default=unset, **bounds)


def takes(request: Callable[..., Request]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of a dataclass as options, before its own; it gets them as one object."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        fields = _parameters(request)
        parameters = [*fields, *_parameters(command)[1:]]

        @wraps(command)
        def run(**given: Any) -> None:
            command(request(**{field.name: given.pop(field.name) for field in fields}), **given)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return [
        parameter.replace(annotation=hints.get(parameter.name), kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in parameters
    ]


Json = Annotated[bool, option("Print one JSON object.", "--json")]
Storage = Annotated[
    list[Path] | None, option("A storage directory; again for each drive.", metavar="DIR", unset="in the user's cache")
]
File = Path | None


@dataclass(frozen=True, kw_only=True)
class InspectRequest:
    """A causal language model of transformers, and the step it is looked at in; None: the config's own."""

    model: Annotated[str, option('A model type ("gpt2", "llama") or the path of a config.json.', metavar="M")]
    layers: Annotated[int | None, option("Number of layers.", min=1, metavar="L", unset="the config's")] = None
    hidden: Annotated[
        int | None, option("Width; heads and MLP are scaled with it.", min=1, metavar="H", unset="the config's")
    ] = None
    micro_batches: Annotated[int, option("Micro-batches of the step.", min=1, metavar="N")] = 2
    micro_batch_size: Annotated[int, option("Samples in each.", min=1, metavar="B")] = 1
    sequence: Annotated[int, option("Tokens of a sample.", min=1, metavar="T")] = 128
    after: Annotated[str | None, option("The program after this pass.", metavar="PASS", unset="the last")] = None
    graph: Annotated[
        Graph | None,
        option("One of these alone: the captured model, forward or backward of the layers, the step program."),
    ] = None
    as_json: Annotated[bool, option("For programs: one JSON object; with --graph also the graph's text.", "--json")] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A model, a machine, and what of a step is given; None: the planner chooses."""

    model: Annotated[
        str, option('"gpt-65b", a model type ("llama") or the path of a config.json.', "--model", metavar="M")
    ]
    machine: Annotated[
        str | None, option('"a100", or the path of a profile.', metavar="NAME", unset="this one, measured")
    ] = None
    sequence: Annotated[int, option("Tokens of a sample.", "--sequence", min=1, metavar="T")] = 2048
    batch: Annotated[
        int | None, option("Samples of a step.", "--batch", min=1, metavar="B", unset="as few as keep it busy")
    ] = None
    micro_batch_size: Annotated[int | None, option("Samples of a micro-batch.", min=1, metavar="S", unset="chosen")] = (
        None
    )
    micro_batches: Annotated[int | None, option("Micro-batches of a step.", min=1, metavar="N", unset="chosen")] = None
    alpha: Annotated[
        float | None, option("The part of each update that is put off.", min=0, max=1, metavar="A", unset="chosen")
    ] = None
    ratio: Annotated[
        list[str] | None,
        option(
            "The part of parameter, checkpoint or optimizer that is in host memory, as parameter=0.5.",
            metavar="CLASS=X",
            unset="chosen",
        ),
    ] = None
    clip: Annotated[bool, option("Clip by the norm of all gradients: updates wait for it.", "--clip")] = False
    host_memory: Annotated[str | None, option('A budget, such as "64GiB".', metavar="SIZE", unset="the machine's")] = (
        None
    )
    device_memory: Annotated[str | None, option("The same for the device.", metavar="SIZE", unset="the machine's")] = (
        None
    )
    precision: Annotated[Literal["bf16", "model"], option("bf16 with fp32 masters, or the model's own.")] = "bf16"
    wear_years: Annotated[
        float | None, option("Years that the drives are to last, training all day.", min=0, metavar="Y")
    ] = None
    storage: Storage = None
