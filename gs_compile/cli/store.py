"""store: commands for the durable runs in a directory; nothing heavy is imported before their arguments are checked.

All except `ls` lock a run while they work, and are refused if a process uses it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gs_compile.cli.requests import Directory, Json, option

app = typer.Typer(help="List, verify, export or remove durable runs.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def ls(directory: Directory, as_json: Json = False) -> None:
    """List the durable runs in a directory.

    These are the runs of all ranks and models, including runs in use.
    """
    from gs_compile.cli.stored.runs import found_in, listing

    runs = found_in(directory)
    if as_json:
        typer.echo(json.dumps({"runs": [each.as_dict() for each in runs]}, indent=2))
    else:
        typer.echo(listing(runs) if runs else f"no runs in {directory}")
    for each in runs:
        if each.problem is not None:
            raise each.problem


@app.command()
def gc(
    directory: Directory,
    everything: Annotated[bool, option("Also remove the runs themselves.", ..., "--all")] = False,
    as_json: Json = False,
) -> None:
    """Remove files of killed runs that no commit names.

    Only files that a run has made are removed.
    """
    from gs_compile.cli.stored.runs import collect, found_in
    from gs_compile.machine import format_bytes

    removed: dict[str, int] = {}
    for each in found_in(directory):
        removed |= collect(each, everything=everything)
    told = "\n".join((*removed, f"removed {len(removed)} files, {format_bytes(sum(removed.values()))}"))
    typer.echo(json.dumps({"removed": removed}, indent=2) if as_json else told)


@app.command()
def verify(directory: Directory, as_json: Json = False) -> None:
    """Compare every block of durable runs with its checksum.

    The exit code is 5 if a block is corrupt.
    """
    from gs_compile.cli.plan import busy
    from gs_compile.cli.stored.verify import verify, words

    with busy(f"reading what is in {directory}"):
        reports = verify(directory)
    told = "\n".join(map(words, reports)) or f"no commits in {directory}"
    typer.echo(json.dumps({"runs": reports}, indent=2) if as_json else told)
    raise typer.Exit(5 if any(report["bad"] for report in reports) else 0)


@app.command()
def export(
    directory: Directory,
    target: Annotated[Path, typer.Argument(help="A new directory.", metavar="OUT", show_default=False)],
    masters: Annotated[bool, option("Write fp32 masters instead of narrower parameters.", ..., "--masters")] = False,
    states: Annotated[bool, option("Also write the optimizer's states.", ..., "--states")] = False,
    as_json: Json = False,
) -> None:
    """Write the parameters of a run as safetensors, with an index."""
    from gs_compile.cli.plan import busy
    from gs_compile.cli.stored.export import export
    from gs_compile.cli.stored.runs import found_in

    with busy(f"writing to {target}"):
        done = export(found_in(directory), target, masters=masters, states=states)
    words = f"step {done['step']} of run {done['run']} in {len(done['files'])} files in {target}"
    typer.echo(json.dumps(done, indent=2) if as_json else words)
