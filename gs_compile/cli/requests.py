"""requests: the options of the commands, each defined once: tuples whose fields are a command's options.

Nothing heavy is imported here, so that help is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import typer

from gs_compile.planner.request import Request

Graph = Literal["captured", "forward", "backward", "program"]
ANY = Parameter.POSITIONAL_OR_KEYWORD
GIVEN = ("model", "request")  # parameters of commands that are made from options


def option(text: str, default: Any = ..., *names: str, unset: str | bool = True, **more: Any) -> Any:
    """An option with its help text; `unset`: its default in words, for the help."""
    return typer.Option(default, *names, help=text, show_default=unset, **more)


def file_option(text: str, *names: str) -> Any:
    """The option of a file to write. A folder, or a file that cannot be written, is refused before the work begins."""
    return option(text, ..., *names, metavar="FILE", callback=_writable)


def folder_option(text: str) -> Any:
    """The option of a folder to write to, which is made if it is missing."""
    return option(text, metavar="DIR", callback=_made)


def _writable(path: Path | None) -> Path | None:
    """Raises OSError as writing would. A pipe is not opened, as its reader would see its end."""
    if path is not None and not path.is_fifo():
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.resolve().unlink()
    return path


def _made(folder: Path | None) -> Path | None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def takes(request: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: a tuple's fields become options of the command, before its own; it receives them as one object."""
    defaults, types = request._field_defaults, get_type_hints(request, include_extras=True)
    options = [Parameter(name, ANY, default=defaults[name], annotation=types[name]) for name in types]
    return lambda command: _asking(command, options, lambda **asked: (request(**asked),))


def _asking(
    command: Callable[..., None], options: Sequence[Parameter], given: Callable[..., tuple[Any, ...]]
) -> Callable[..., None]:
    """The command with further options before its own. given: makes its first arguments from these options."""

    @wraps(command)
    def run(*values: Any, **named: Any) -> None:
        asked = whole.bind(*values, **named).arguments
        command(*given(**{each.name: asked.pop(each.name) for each in options}), **asked)

    own = [each for each in signature(command, eval_str=True).parameters.values() if each.name not in GIVEN]
    whole = run.__signature__ = Signature([*options, *own])  # type: ignore[attr-defined]
    return run


Longest = Annotated[bool, option("Also find the longest sequence that fits; takes longer.", ..., "--longest")]
Json = Annotated[bool, option("Print one JSON object.", ..., "--json")]
Storage = Annotated[
    list[Path] | None, option("A storage directory; repeat for each drive.", metavar="DIR", unset="in the user's cache")
]
Directory = Annotated[Path, typer.Argument(help="A directory of a run.", metavar="DIR", show_default=False)]
File = Path | None


class InspectRequest(NamedTuple):
    """A causal language model of transformers, and the step to show; None: the config's own value."""

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
# The types of a request's fields that are text, or lists, on a command line; others have the request's types.
TYPES: dict[str, Any] = {
    "storage": list[Path] | None,
    "ratios": list[str] | None,
    "durability": str,
    **dict.fromkeys(("machine", "host_memory", "device_memory", "network"), str | None),
}


def plans(command: Callable[..., None]) -> Callable[..., None]:
    """A decorator: the command gets a model and the flags of a plan, before its own options, and receives the model's
    name and a `Request`.

    Raises `BadParameter` for an invalid ratio, and the errors of `Request`.
    """
    types = get_type_hints(Request, localns={"Profile": object}) | TYPES
    flags = [Parameter(each.name, ANY, default=_flag(each), annotation=types[each.name]) for each in fields(Request)]
    return _asking(command, [Parameter("model", ANY, annotation=Model), *flags], _planned)


def _flag(asked: Field[Any]) -> Any:
    """The option for a field of a `Request`."""
    told = dict(asked.metadata)
    names = [told.pop("flag")] if "flag" in told else []
    return option(told.pop("text"), asked.default, *names, min=told.pop("least", None), **told)


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
