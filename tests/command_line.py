"""The command line in this process."""

from __future__ import annotations

from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from gs_compile.cli.main import app


def run(*arguments: Any, **how: Any) -> Result:
    """What a command prints, and its exit code."""
    return CliRunner().invoke(app, list(map(str, arguments)), prog_name="greedysnake", **how)


def printed(*arguments: Any) -> str:
    """What it prints where nothing is wrong."""
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.exception or result.output
    return result.stdout
