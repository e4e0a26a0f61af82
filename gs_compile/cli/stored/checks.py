"""checks: `verify` and `repair`, run by run."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gs_compile.cli.stored.blocks import bad_blocks
from gs_compile.cli.stored.repair import repaired
from gs_compile.cli.stored.runs import Found, collect, found_in
from gs_compile.cli.stored.values import Values, opened
from gs_compile.errors import ManifestError
from gs_compile.machine import format_bytes
from gs_compile.planner.summary import table
from gs_compile.runtime.storage.last_commit import order
from gs_compile.runtime.storage.manifest import Manifest, write

MOST_NAMES = 4  # in a table
HEADINGS = ("file", "offset", "bytes", "unit", "parameters", "found")


def check(directory: Path, *, repair: bool = False) -> list[dict[str, Any]]:
    """What is bad of each run in a directory, and stays so.

    Raises StorageLockedError where a process has one, ManifestError where a commit cannot be read.
    """
    runs: dict[str, Found] = {}
    for each in found_in(directory):
        if each.problem is not None:
            raise each.problem
        if each.known:
            runs.setdefault(each.known[0].run, each)
    reports = []
    for found in runs.values():
        of_run = [_checked(made, repair=repair, is_made=made is found.commit) for made in found.known]
        if repair and not any(report["bad"] for report in of_run):
            of_run[-1]["removed"] = collect(found)
        reports += of_run
    return reports


def _checked(commit: Manifest, *, repair: bool, is_made: bool) -> dict[str, Any]:
    begin = time.perf_counter()
    with ExitStack() as stack:
        values = opened(stack, commit)
        bad = bad_blocks(values)
        seconds = time.perf_counter() - begin
        by_part = sorted(bad, key=lambda each: each.part.value)  # states first: parameters are their rounded masters
        mended = [each for each in by_part if repair and repaired(values, each)]
        lost = [each.as_dict() for each in bad if each not in mended]
        if repair and is_made and not lost:
            _write_commit(commit, values)
    return {
        "run": commit.run,
        "step": commit.step,
        "nbytes": commit.nbytes,
        "seconds": seconds,
        "bad": lost,
        "repaired": [each.as_dict() for each in mended],
        "removed": {},
    }


def _write_commit(commit: Manifest, values: Values) -> None:
    """Give a commit whose files are sound to those of its folders that have none, or a damaged or older one."""
    for drive in values.setting.store.drives if values.setting.store else ():
        try:
            found = drive.own.committed()
        except ManifestError:
            found = None
        if found is None or (found.run == commit.run and order(found) < order(commit)):
            write(drive.own.fd, commit)


def words(report: dict[str, Any]) -> str:
    """A report for people."""
    rate = format_bytes(int(report["nbytes"] / report["seconds"]))
    lines = [f"run {report['run']}, step {report['step']}: {format_bytes(report['nbytes'])} read, {rate}/s"]
    for words in ("bad", "repaired"):
        if rows := report[words]:
            cells = [
                list(map(str, (*list(row.values())[:2], row["nbytes"], row["unit"], _names(row), row["reason"])))
                for row in rows
            ]
            lines += [f"{words}:", table(HEADINGS, cells, right=("offset", "bytes"))]
    if report["removed"]:
        lines.append(f"{len(report['removed'])} files removed, {format_bytes(sum(report['removed'].values()))}")
    return "\n".join(lines)


def _names(row: dict[str, Any]) -> str:
    """The first of the parameters, and how many more."""
    names = row["parameters"]
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
