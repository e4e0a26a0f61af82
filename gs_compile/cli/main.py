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
    NoFitError,
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
    (NoFitError, 3),
    (PlanError, 2),
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
    list[Path] | None,
    typer.Option(metavar="DIR", help="A storage directory; again for each drive.", show_default="in the user's cache"),
]
ModelName = Annotated[
    str, typer.Option("--model", metavar="M", help='"gpt-65b", a model type ("llama") or the path of a config.json.')
]
Machine = Annotated[
    str | None,
    typer.Option(metavar="NAME", help='"a100", or the path of a profile.', show_default="this one, measured"),
]
SequenceLength = Annotated[int, typer.Option("--sequence", min=1, metavar="T", help="Tokens of a sample.")]
Batch = Annotated[
    int | None,
    typer.Option("--batch", min=1, metavar="B", help="Samples of a step.", show_default="as few as keep it busy"),
]
MicroBatchSize = Annotated[
    int | None, typer.Option(min=1, metavar="S", help="Samples of a micro-batch.", show_default="chosen")
]
MicroBatches = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Micro-batches of a step.", show_default="chosen")
]
Alpha = Annotated[
    float | None,
    typer.Option(min=0, max=1, metavar="A", help="The part of each update that is put off.", show_default="chosen"),
]
Ratio = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CLASS=X",
        help="The part of parameter, checkpoint or optimizer that is in host memory, as parameter=0.5.",
        show_default="chosen",
    ),
]
Clip = Annotated[bool, typer.Option("--clip", help="Clip by the norm of all gradients: updates wait for it.")]
HostMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help='A budget, such as "64GiB".', show_default="the machine's")
]
DeviceMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="The same for the device.", show_default="the machine's")
]
Precision = Annotated[Literal["bf16", "model"], typer.Option(help="bf16 with fp32 masters, or the model's own.")]
WearYears = Annotated[
    float | None, typer.Option(min=0, metavar="Y", help="Years that the drives are to last, training all day.")
]


@app.command()
def inspect(
    model: Annotated[
        str, typer.Option(metavar="M", help='A model type ("gpt2", "llama") or the path of a config.json.')
    ],
    layers: Annotated[
        int | None, typer.Option(min=1, metavar="L", help="Number of layers.", show_default="the config's")
    ] = None,
    hidden: Annotated[
        int | None,
        typer.Option(min=1, metavar="H", help="Width; heads and MLP are scaled with it.", show_default="the config's"),
    ] = None,
    micro_batches: Annotated[int, typer.Option(min=1, metavar="N", help="Micro-batches of the step.")] = 2,
    micro_batch_size: Annotated[int, typer.Option(min=1, metavar="B", help="Samples in each.")] = 1,
    sequence: Annotated[int, typer.Option(min=1, metavar="T", help="Tokens of a sample.")] = 128,
    after: Annotated[
        str | None, typer.Option(metavar="PASS", help="The program after this pass.", show_default="the last")
    ] = None,
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
    from gs_compile.cli.inspect import Model, inspect_text

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
    from gs_compile.cli.doctor.doctor import examine
    from gs_compile.options import Options

    checks = examine(Options(storage=tuple(storage or ())).storage)
    if as_json:
        typer.echo(json.dumps({"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        from gs_compile.cli.report.tables import show

        rows = [(check.name, check.state, check.found, check.advice) for check in checks]
        styles = {"ok": "green", "warn": "yellow", "bad": "bold red"}
        show(("check", "state", "found", "what to do"), rows, styles=styles)
    raise typer.Exit(1 if any(check.state == "bad" for check in checks) else 0)


@app.command()
def probe(
    storage: Storage = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the profile there too.")] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, whatever is remembered.")] = False,
    as_json: Json = False,
) -> None:
    """Measure what this machine can do; it is remembered."""
    from gs_compile.cli.probe import rows
    from gs_compile.cli.report.tables import busy, show
    from gs_compile.planner.measure.machines import profile

    with busy("measuring this machine"):
        found = profile(None, storage, refresh=refresh)
    if output is not None:
        found.save(output)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        show(("", "", "source"), rows(found))


@app.command()
def plan(
    model: ModelName,
    machine: Machine = None,
    sequence: SequenceLength = 2048,
    batch: Batch = None,
    micro_batch_size: MicroBatchSize = None,
    micro_batches: MicroBatches = None,
    alpha: Alpha = None,
    ratio: Ratio = None,
    clip: Clip = False,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    precision: Precision = "bf16",
    wear_years: WearYears = None,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Show where everything of a model's step would live, how fast it would run, and why.

    Neither the model's weights nor the machine are needed.
    """
    from gs_compile.cli.plan import made
    from gs_compile.cli.report.explain import as_dict, report

    found = made(
        model,
        machine=machine,
        sequence=sequence,
        batch_size=batch,
        micro_batch_size=micro_batch_size,
        num_micro_batches=micro_batches,
        alpha=alpha,
        ratios=ratio,
        clip=clip,
        host_memory=host_memory,
        device_memory=device_memory,
        precision=precision,
        wear_years=wear_years,
        storage=storage,
    )
    typer.echo(json.dumps(as_dict(found), indent=2) if as_json else report(found))


@app.command()
def simulate(
    model: ModelName,
    machine: Machine = None,
    sequence: SequenceLength = 2048,
    batch: Batch = None,
    micro_batch_size: MicroBatchSize = None,
    micro_batches: MicroBatches = None,
    alpha: Alpha = None,
    ratio: Ratio = None,
    clip: Clip = False,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    precision: Precision = "bf16",
    wear_years: WearYears = None,
    storage: Storage = None,
    schedule: Annotated[
        Literal["vertical", "horizontal", "single", "lifetime"], typer.Option(help="The order of the step.")
    ] = "vertical",
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the operations as a trace, for ui.perfetto.dev.")
    ] = None,
    page: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Save the timeline as a page.")] = None,
    figures: Annotated[Path | None, typer.Option(metavar="DIR", help="Save figures there; needs matplotlib.")] = None,
    as_json: Json = False,
) -> None:
    """Show when each operation of a planned step would run, and what the computation would wait for."""
    from gs_compile.cli.plan import made
    from gs_compile.cli.simulate import as_dict, report, save

    found = made(
        model,
        machine=machine,
        sequence=sequence,
        batch_size=batch,
        micro_batch_size=micro_batch_size,
        num_micro_batches=micro_batches,
        alpha=alpha,
        ratios=ratio,
        clip=clip,
        host_memory=host_memory,
        device_memory=device_memory,
        precision=precision,
        wear_years=wear_years,
        storage=storage,
        schedule=schedule,
    )
    files = save(found, trace=trace, page=page, figures=figures)
    typer.echo(json.dumps(as_dict(found, files), indent=2) if as_json else report(found, files))
