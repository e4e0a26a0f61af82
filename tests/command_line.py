"""The command line in this process, with a user's cache of its own: what one command keeps there no other finds."""

from __future__ import annotations

from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

from click.testing import Result
from typer import testing

from gs_compile.cli.main import app

testing._get_command = cache(testing._get_command)  # it makes all commands, and would for each call


def run(*arguments: Any, **how: Any) -> Result:
    """What a command prints, and its exit code."""
    with TemporaryDirectory() as folder:
        env = {"XDG_CACHE_HOME": folder}
        return testing.CliRunner().invoke(app, list(map(str, arguments)), prog_name="greedysnake", env=env, **how)


def printed(*arguments: Any) -> str:
    """What it prints where nothing is wrong."""
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.exception or result.output
    return result.stdout
