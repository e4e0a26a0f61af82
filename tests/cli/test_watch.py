"""`greedysnake watch` and `report`, from given files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import expecttest
import pytest
import told
from command_line import printed, run

from gs_compile.cli import watch
from gs_compile.status import file, runs, words


@pytest.fixture(autouse=True)
def _goes_on(monkeypatch):
    for module in (words, watch):
        monkeypatch.setattr(module, "is_alive", lambda status: status.state == "running")


class TestScreen(expecttest.TestCase):
    def test_a_run(self):
        self.assertExpectedInline(
            in_ascii(watch.run_text(told.status(), told.WRITTEN + 1)),
            """\
run       pid 1 has run for 31 min 41 s
model     3.82 B parameters, 36 layers, on cpu
now       step 61 ##############...... backward of layer 20, 21 s, about 10 s left
step 60   31.2 s, 1,024 tokens, 32.8 tokens/s, loss 5.523, gradient norm 1.25
mean      32.8 tokens/s over 59 steps
plan      28 s predicted, measured 11% longer
binds     ssd_read, busy for 85% of the step

last step  busy   works  predicted     moves  predicted       rate
compute     40%  12.4 s       13 s         -          -          -
ssd_read    85%  26.5 s       24 s  44.1 GiB   44.1 GiB  1.7 GiB/s
ssd_write   61%    19 s       20 s  36.0 GiB   36.0 GiB  1.9 GiB/s
cpu         26%     8 s      7.5 s         -          -          -

in use
host memory   5.9 GiB  of 8.0 GiB  ##############...... 74%
SSD          35.5 GiB    in files

drive   share        reads       writes       free
/mnt/a    60%  868.4 MiB/s  708.9 MiB/s  120.0 GiB
/mnt/b    40%  579.0 MiB/s  472.6 MiB/s  400.0 GiB
wear      2.1 TiB so far; 97.4 TiB written to SSD in a day; the drives are rated for 600.0 TiB, 6.2 days of it""",
        )

    def test_a_run_before_its_first_step_has_ended(self):
        changes = {"last": None, "num_steps": 0, "seconds": 0.0, "lanes": {}, "history": (), "step": None}
        about = replace(told.ABOUT, rank=1, num_ranks=2, drives={})
        text = watch.run_text(told.status(about=about, **changes), told.WRITTEN + 1)
        self.assertExpectedInline(
            in_ascii(text),
            """\
run       pid 1, rank 1 of 2 has run for 31 min 41 s
model     3.82 B parameters, 36 layers, on cpu
now       between two steps
plan      Plan of model on a machine <of two>, vertical: 4 micro-batches of 2 samples of 128 tokens,
          alpha 0.25. A step takes 28.0 s: 36.6 tokens/s. What would make it faster: a second SSD
          like the first: 41% faster.

in use
host memory   5.9 GiB  of 8.0 GiB  ##############...... 74%
SSD          35.5 GiB    in files""",
        )


def test_a_run_after_its_first_step():
    """Whose length nobody knows, as of none is known when it began."""
    sums = {"num_steps": 0, "seconds": 0.0, "num_tokens": 0, "lanes": {}}
    text = watch.run_text(told.status(last=replace(told.LAST, number=1, seconds=math.nan), **sums), told.WRITTEN + 1)
    assert "mean      known after the second step" in text
    assert "step 1    1,024 tokens, loss 5.523" in text


def in_ascii(text: str) -> str:
    """With other signs for bars: golden text is rewritten in ASCII alone."""
    return text.replace("━", "#").replace("─", ".")


def test_all_runs_of_a_directory_are_shown_and_a_torn_file_is_said(tmp_path):
    told.write(tmp_path / "greedysnake-run.json", told.status(state="ended"))
    (tmp_path / "greedysnake-run-1.json").write_text('{"format": 1')
    found = printed("watch", tmp_path)
    assert "greedysnake-run-1.json is torn" in found.replace("\n", " ")
    assert "pid 1 ended" in found
    data = json.loads(printed("watch", tmp_path, "--json"))
    assert data[str(tmp_path / "greedysnake-run.json")] == file.plain(told.status(state="ended"))
    assert "is torn" in data[str(tmp_path / "greedysnake-run-1.json")]["problem"]


def test_no_file_moves_the_cursor(tmp_path):
    told.write(tmp_path / "greedysnake-run.json", told.status(state="failed", reason="\x1b[2Jgone"))
    assert "\x1b" not in printed("watch", tmp_path)


def test_a_live_screen_ends_with_its_run(tmp_path, monkeypatch, capsys):
    path = tmp_path / "greedysnake-run.json"
    told.write(path, told.status())
    monkeypatch.setattr(watch.time, "sleep", lambda _: path.unlink())
    watch.watch(tmp_path, print, once=False)
    shown = capsys.readouterr().out
    assert shown.startswith(watch.HIDE)
    assert shown.endswith(watch.SHOW)
    assert shown.count("pid 1 has run for") == 1, "what it last was stays on the screen"
    assert f"the run has ended, and has left nothing in {tmp_path}" in shown


def test_a_live_screen_ends_with_runs_whose_status_stays(tmp_path, monkeypatch, capsys):
    """Fault: of a durable run, or with the option `status`, it went on for good."""
    first, second = (tmp_path / f"greedysnake-run{end}.json" for end in ("", "-1"))
    for path in (first, second):
        told.write(path, told.status())
    ends = iter((first, second))
    monkeypatch.setattr(watch.time, "sleep", lambda _: told.write(next(ends), told.status(state="ended")))
    watch.watch(tmp_path, print, once=False)
    assert capsys.readouterr().out.count(watch.HOME) == 3


def test_a_live_screen_is_no_longer_than_the_terminal(tmp_path, monkeypatch, capsys):
    """Fault: of two runs the ends were shown, and all the rest was moved up once a second."""
    for end in ("", "-1"):
        told.write(tmp_path / f"greedysnake-run{end}.json", told.status(state="ended"))
    monkeypatch.setattr(watch, "get_terminal_size", lambda: os.terminal_size((80, 24)))
    watch.watch(tmp_path, print, once=False)
    shown = capsys.readouterr().out.partition(watch.HOME)[2].partition(watch.REST)[0]
    lines = shown.replace(watch.LINE_END, "").split("\n")
    assert sum(1 + (len(line) - 1) // 80 for line in lines if line) + lines.count("") <= 24
    assert lines[1].startswith("run       pid 1 ended")
    left = len(printed("watch", tmp_path).splitlines()) - len(lines) + 1
    assert lines[-1] == f"{left} lines more: make this terminal larger, or use --once"


def test_a_terminal_of_few_letters(tmp_path):
    """It shows others as "?"; a page has all letters."""
    drives = {"/mnt/漢": 1.0}
    told.write(tmp_path / "greedysnake-run.json", told.status(about=replace(told.ABOUT, drives=drives)))
    few = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}
    script = (
        "import sys, gs_compile.cli.main as cli\n"
        "for command in ('watch --once', 'report --output page.html'):\n"
        "    sys.argv[1:] = [*command.split(), '.']\n"
        "    try: cli.main()\n"
        "    except SystemExit as ended: assert not ended.code\n"
    )
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, **few, "PYTHONPATH": str(root)},
        capture_output=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr.decode()
    assert b"step 61 ????" in found.stdout
    assert "/mnt/漢" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_runs_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run("watch").stderr.startswith("StatusError: no run of this user is active on this machine")
    told.write(runs.entry(), told.status())
    told.write(tmp_path / "greedysnake-run.json", told.status(about=replace(told.ABOUT, pid=2)))
    runs.link(linked := runs.entry(), tmp_path / "greedysnake-run.json")
    killed = runs.folder() / f"{file.process_space()}-1-0-1.json"  # init, but not of that start
    told.write(killed, told.status())
    shown = printed("watch")
    assert "pid 1 has run" in shown
    assert f"{tmp_path / 'greedysnake-run.json'}\nrun       pid 2 has run" in shown
    assert len(json.loads(printed("watch", "--json"))) == 2
    assert not killed.exists()
    linked.unlink()
    assert (tmp_path / "greedysnake-run.json").exists()
    runs.folder().chmod(0o755)
    assert "is not this user's alone" in run("watch").stderr


@pytest.mark.parametrize(("seconds", "shown", "stays"), [(5, True, True), (600, False, True), (2e5, False, False)])
def test_runs_of_containers_that_share_the_folder(tmp_path, monkeypatch, seconds, shown, stays):
    """Their pids are no others': what goes on there, or leads to where nobody here can look, is left alone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    theirs, linked = (runs.folder() / f"7-1-0-{number}.json" for number in range(2))
    about = replace(told.ABOUT, process_space=7)
    told.write(theirs, told.status(about=about, written=time.time() - seconds))
    runs.link(linked, tmp_path / "only there.json")
    told.write(runs.entry(), told.status())
    assert len(json.loads(printed("watch", "--json"))) == 1 + shown
    assert (theirs.exists(), linked.is_symlink()) == (stays, True)


@pytest.mark.parametrize("command", ["watch", "report"])
def test_a_directory_without_a_run(tmp_path, command):
    result = run(command, tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"StatusError: {tmp_path} has the status of no run")


def test_a_report_is_of_the_first_rank(tmp_path):
    told.write(tmp_path / "greedysnake-run-1.json", told.status(about=replace(told.ABOUT, rank=1), state="ended"))
    told.write(tmp_path / "greedysnake-run.json", told.status(state="ended", num_steps=7))
    output = tmp_path / "page.html"
    assert printed("report", tmp_path, "--output", output) == f"report: {output}\n"
    assert "Means of 7 steps" in output.read_text()
    output.unlink()
    assert json.loads(printed("report", tmp_path, "--output", output, "--json")) == {"report": str(output)}
    assert output.exists()
