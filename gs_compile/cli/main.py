"""main: the command line, ``greedysnake`` or ``python -m gs_compile``.

Nothing heavy is imported before the arguments are checked, so help is fast. An error of this package is one line on
stderr and an exit code, for scripts:

    0 done   1 refused, or a check is bad   2 wrong arguments   3 does not fit   5 the storage failed   6 it is locked
    130 interrupted   143 terminated
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gs_compile import __version__
from gs_compile.cli import store
from gs_compile.cli.process import do_with_all, do_without
from gs_compile.cli.requests import (
    Directory,
    File,
    InspectRequest,
    Json,
    Longest,
    Storage,
    file_option,
    folder_option,
    option,
    plans,
    takes,
)
from gs_compile.errors import (
    GreedySnakeError,
    MemoryBudgetError,
    OptionError,
    PlanError,
    ProfileError,
    StorageLockedError,
)
from gs_compile.planner.request import Request

INTERRUPTED = 130
TERMINATED = 143
EXIT_CODES = (  # the first one that fits counts
    (MemoryBudgetError, 3),
    ((OptionError, ProfileError, PlanError), 2),
    (StorageLockedError, 6),
    (OSError, 5),  # the storage's, or a file that was asked for cannot be written
    (GreedySnakeError, 1),
)


class Commands(TyperGroup):
    """Turns errors of a command, or of its help, into a line and an exit code."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _told():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _told():
            return super().invoke(ctx)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of a pipe has closed it: typer ends quietly
    except (GreedySnakeError, OSError) as error:
        message = " ".join(line.strip() for line in str(error).splitlines())
        typer.echo(f"{type(error).__name__}: {message}", err=True)
        raise typer.Exit(next(code for kind, code in EXIT_CODES if isinstance(error, kind))) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(INTERRUPTED) from interrupt


app = typer.Typer(
    cls=Commands,
    help="Train models larger than memory, layer by layer.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes longer to import than everything else, and breaks an error's line
)
app.add_typer(store.app, name="store")


def main() -> None:
    """Run the command that the process was started with, and exit."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # as from an error: files are removed on the way
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for a terminal without the characters of bars
    do_without()
    atexit.register(_leave)
    app(prog_name="greedysnake")


def _leave() -> None:
    """Skip the garbage collection of all objects at the end, unless a command has turned the collector on."""
    if not gc.isenabled():
        gc.freeze()


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"greedysnake {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[bool, option("Show the version.", ..., "--version", callback=_version, is_eager=True)] = False,
) -> None:
    pass


@app.command()
def doctor(storage: Storage = None, as_json: Json = False) -> None:
    """Check whether this machine is fit for training.

    The exit code is 1 if a check is bad.
    """
    from gs_compile.cli.doctor import examine
    from gs_compile.options import Options
    from gs_compile.planner.summary import table

    checks = examine(Options.of({"storage": storage or None}).storage)
    rows = [check.as_dict() for check in checks]
    told = table(("check", "state", "found", "what to do"), [tuple(row.values()) for row in rows])
    typer.echo(json.dumps({"checks": rows}, indent=2) if as_json else told)
    raise typer.Exit(1 if any(check.state == "bad" for check in checks) else 0)


@app.command()
def probe(
    storage: Storage = None,
    output: Annotated[File, file_option("Save the profile to this file too.")] = None,
    refresh: Annotated[bool, option("Measure again, even if there is a stored result.", ..., "--refresh")] = False,
    as_json: Json = False,
) -> None:
    """Measure this machine and store the result.

    With torchrun, the network between its ranks is measured too.
    """
    from gs_compile.cli.plan import busy, profile_table
    from gs_compile.options import Options
    from gs_compile.planner.measure.machines import forget_code, profile
    from gs_compile.runtime.ranks import ranks_of

    ranks = ranks_of(Options())
    with busy("measuring this machine"):
        found = profile(None, storage, refresh=refresh, ranks=ranks)
    if ranks and ranks.name != ranks.names[0]:
        return
    if output is not None:
        found.save(output)
        forget_code(output)
    typer.echo(json.dumps(found.as_dict(), indent=2) if as_json else profile_table(found))


@app.command()
@plans
def fit(
    model: str,
    request: Request,
    tokens: Annotated[float, option("Number of tokens to train on.", metavar="N")] = 1e9,
    longest: Longest = False,
    as_json: Json = False,
) -> None:
    """Predict how fast a machine trains a model, in full or by LoRA.

    It also predicts LoRA over 4-bit weights, and needs neither the model's weights nor the machine.
    """
    from gs_compile.cli.plan import busy
    from gs_compile.cli.report.fits import fits_dict, fits_report
    from gs_compile.planner.measure.shipped import named

    if not 0 < tokens < math.inf:
        raise typer.BadParameter(f"--tokens {tokens:g}: not a number of tokens")
    with busy(f"planning {model}"):  # also while it is imported
        from gs_compile.planner.fit import fit as find

        found = find(model, request, longest=longest, keeps=True)
    asked = f"{model} on {named(request.machine) or 'this machine'}, samples of {request.sequence} tokens"
    typer.echo(json.dumps(fits_dict(found, tokens), indent=2) if as_json else fits_report(found, tokens, asked))


@app.command()
@plans
def plan(model: str, request: Request, longest: Longest = False, as_json: Json = False) -> None:
    """Show where data would be stored, and how fast a step would be.

    It also says what limits the speed, and needs neither the model's weights nor the machine.
    """
    from gs_compile.cli.plan import busy, make_plan
    from gs_compile.cli.report.explain import as_dict, report

    found = make_plan(model, request)
    if longest:
        with busy(f"looking for the longest sequence of {model}"):
            from gs_compile.planner.fit import longest_sequence

            most = longest_sequence(model, request, keeps=True)
    if as_json:
        typer.echo(json.dumps(as_dict(found) | ({"longest_sequence": most} if longest else {}), indent=2))
    else:
        typer.echo(report(found) + (f"\nThe longest sequence of which a sample fits: {most} tokens" if longest else ""))


@app.command()
@plans
def simulate(
    model: str,
    request: Request,
    trace: Annotated[File, file_option("Save the operations as a trace for ui.perfetto.dev.")] = None,
    page: Annotated[File, file_option("Save the timeline as an HTML page.", "--html")] = None,
    figures: Annotated[File, folder_option("Save figures to this directory; needs matplotlib.")] = None,
    as_json: Json = False,
) -> None:
    """Show when each operation of a planned step would run.

    It also shows what the computation would wait for.
    """
    from gs_compile.cli.plan import make_plan
    from gs_compile.cli.report.draw import save
    from gs_compile.cli.report.explain import step_dict, step_report

    found = make_plan(model, request)
    files = save(found, trace=trace, page=page, figures=figures)
    typer.echo(json.dumps(step_dict(found, files), indent=2) if as_json else step_report(found, files))


@app.command()
@takes(InspectRequest)
def inspect(request: InspectRequest) -> None:
    """Show the training step of a model as a program.

    The model is a HuggingFace language model, built from its config without weights: any size fits any machine.
    """
    from gs_compile.cli.inspect import inspect_text

    typer.echo(inspect_text(request))


@app.command()
def watch(
    directory: Annotated[
        Path | None, typer.Argument(help="A directory of a run.", metavar="DIR", show_default=False)
    ] = None,
    once: Annotated[bool, option("Show one screen; the default if the output is no terminal.", ..., "--once")] = False,
    as_json: Json = False,
) -> None:
    """Follow runs live: speed, bottleneck, lanes and drives.

    All are compared with the plan. DIR is a directory of a run's option `storage` or `status`. Without it, all your
    runs on this machine are shown.
    """
    from gs_compile.cli.watch import statuses, watch
    from gs_compile.progress import is_terminal

    if as_json:
        typer.echo(json.dumps(statuses(directory), indent=2))
    else:
        watch(directory, typer.echo, once=once or not is_terminal(sys.stdout))


@app.command()
def report(
    directory: Directory,
    output: Annotated[Path, option("The file for the page.", ..., metavar="FILE")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write a page about a run: loss, step times, lanes and plan.

    DIR is a directory of a run's option `storage` or `status`. If it has several runs, the newest is taken; if a run
    has several ranks, the first.
    """
    from gs_compile.cli.watch import newest
    from gs_compile.status.page import page

    output.write_text(page(newest(directory)), encoding="utf-8")
    typer.echo(json.dumps({"report": str(output)}) if as_json else f"report: {output}")


@app.command()
def train(
    file: Annotated[
        Path, typer.Argument(help="A YAML file that describes the run.", metavar="FILE", show_default=False)
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(help="Entries that override the file's: args.max_steps=5", metavar="NAME=VALUE"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model with TRL's SFTTrainer by a YAML file.

    The model is saved at the end.
    """
    from gs_compile.cli.train import train
    from gs_compile.status.file import plain

    do_with_all()
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # Trainer prints what it logs
        done = train(file, changes or ())
    if done is None:
        return
    loss = "" if done["loss"] is None else f", loss {done['loss']:.4g}"
    typer.echo(json.dumps(plain(done)) if as_json else f"{done['steps']} steps{loss}; saved in {done['saved']}")
