"""The command line in this process."""

from __future__ import annotations

from functools import cache
from typing import Any

from click.testing import Result
from typer import testing

from gs_compile.cli.main import app

testing._get_command = cache(testing._get_command)  # it makes all commands, and would for each call


def run(*arguments: Any, **how: Any) -> Result:
    """What a command prints, and its exit code."""
    return testing.CliRunner().invoke(app, list(map(str, arguments)), prog_name="greedysnake", **how)


def printed(*arguments: Any) -> str:
    """What it prints where nothing is wrong."""
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.exception or result.output
    return result.stdout
