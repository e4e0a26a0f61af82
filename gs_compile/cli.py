"""cli: the command line, ``greedysnake`` or ``python -m gs_compile``.

Nothing heavy is imported before the arguments are known to be sound, so help comes at once. An error of this package is
one line on stderr and an exit code, for scripts:

    0 done   1 refused, or a check is bad   2 wrong arguments   3 does not fit   5 the storage failed   6 it is locked
    130 interrupted   143 terminated
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from gs_compile import __version__
from gs_compile.errors import (
    GreedySnakeError,
    MemoryBudgetError,
    OptionError,
    PlanError,
    ProfileError,
    StorageError,
    StorageLockedError,
)

INTERRUPTED = 130
TERMINATED = 143
EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (  # the first that fits
    (OptionError, 2),
    (ProfileError, 2),
    (MemoryBudgetError, 3),
    (PlanError, 3),
    (StorageLockedError, 6),
    (StorageError, 5),
    (GreedySnakeError, 1),
    (OSError, 5),  # a file that was asked for cannot be written
)


class Commands(TyperGroup):
    """Turns what a command raises into a line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # whoever read has seen enough: typer ends quietly
        except (GreedySnakeError, OSError) as error:
            message = " ".join(line.strip() for line in str(error).splitlines())
            typer.echo(f"{type(error).__name__}: {message}", err=True)
            raise typer.Exit(next(code for kind, code in EXIT_CODES if isinstance(error, kind))) from error
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(INTERRUPTED) from interrupt


app = typer.Typer(
    cls=Commands,
    help="Training layer by layer, as a compiler pass.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes longer to import than everything else, and breaks an error's line
)


def main() -> None:
    """Run the command that the process was started with, and exit."""
    signal.signal(signal.SIGTERM, _terminate)
    app(prog_name="greedysnake")


def _terminate(number: int, frame: FrameType | None) -> None:
    """Leave as from an error, so that files are removed on the way."""
    sys.exit(TERMINATED)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"greedysnake {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Storage = Annotated[
    list[Path] | None, typer.Option(metavar="DIR", help="A storage directory; again for each drive; the default's.")
]


@app.command()
def inspect(
    model: Annotated[
        str, typer.Option(metavar="M", help='A model type ("gpt2", "llama") or the path of a config.json.')
    ],
    layers: Annotated[int | None, typer.Option(min=1, metavar="L", help="Number of layers; the config's.")] = None,
    hidden: Annotated[
        int | None, typer.Option(min=1, metavar="H", help="Width; heads and MLP are scaled with it; the config's.")
    ] = None,
    micro_batches: Annotated[int, typer.Option(min=1, metavar="N", help="Micro-batches of the step.")] = 2,
    micro_batch_size: Annotated[int, typer.Option(min=1, metavar="B", help="Samples in each.")] = 1,
    sequence: Annotated[int, typer.Option(min=1, metavar="T", help="Tokens of a sample.")] = 128,
    after: Annotated[str | None, typer.Option(metavar="PASS", help="The program after this pass; the last.")] = None,
    graph: Annotated[
        Literal["captured", "forward", "backward", "program"] | None,
        typer.Option(
            help="One of these alone: the captured model, forward or backward of the layers, the step program."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: one JSON object; with --graph also the graph's text.")
    ] = False,
) -> None:
    """Show what a model's training step becomes.

    The model is a HuggingFace language model, built from its config without weights: any size fits any machine.
    """
    from gs_compile.command_inspect import Model, inspect_text

    described = Model(
        name=model,
        layers=layers,
        hidden=hidden,
        micro_batches=micro_batches,
        micro_batch_size=micro_batch_size,
        sequence=sequence,
    )
    typer.echo(inspect_text(described, after=after, graph=graph, as_json=as_json))


@app.command()
def doctor(storage: Storage = None, as_json: Json = False) -> None:
    """Check whether this machine is fit to train on; the exit code is 1 where something is bad."""
    from gs_compile.config import Options
    from gs_compile.doctor import examine

    checks = examine(Options(storage=tuple(storage or ())).storage)
    if as_json:
        typer.echo(json.dumps({"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        from gs_compile.tables import show

        rows = [(check.name, check.state, check.found, check.advice) for check in checks]
        styles = {"ok": "green", "warn": "yellow", "bad": "bold red"}
        show(("check", "state", "found", "what to do"), rows, styles=styles)
    raise typer.Exit(1 if any(check.state == "bad" for check in checks) else 0)
