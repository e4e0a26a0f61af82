"""The command line, on models without weights; and the example that shows the same from a script."""

from __future__ import annotations

import json
import math
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import run

import gs_compile
from gs_compile.cli import inspect
from gs_compile.cli.requests import InspectRequest
from gs_compile.errors import (
    InspectionError,
    MemoryBudgetError,
    NoFitError,
    OptionError,
    PlanError,
    ProfileError,
    StorageError,
    StorageFullError,
    StorageLockedError,
)
from gs_compile.planner.cost.model import built, named_config
from gs_compile.program.text import parse

ROOT = Path(__file__).resolve().parents[2]
GPT2 = "inspect --model gpt2 --layers 3 --hidden 64 --micro-batches 2 --micro-batch-size 3 --sequence 16".split()
FORMS = {
    "report after snake": ("--after", "snake"),
    "program": ("--graph", "program"),
    "program after vertical": ("--graph", "program", "--after", "vertical"),
    "captured": ("--graph", "captured"),
    "forward": ("--graph", "forward"),
    "backward": ("--graph", "backward"),
    "report": (),
    "json": ("--json",),
    "json with a graph": ("--json", "--graph", "backward"),
}


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """All that can be printed of one model, which is captured once."""
    made, capture = [], inspect._inspect

    def once(request):
        if not made:
            made.append(capture(request))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "_inspect", once)
        results = {form: run(*GPT2, *arguments) for form, arguments in FORMS.items()}
    assert not [(form, found.stderr) for form, found in results.items() if found.exit_code or found.stderr]
    return {form: result.stdout for form, result in results.items()}


def test_the_programs_of_gpt2(printed):
    program = parse(printed["program"])
    assert (program.made_by, program.num_layers, program.num_micro_batches) == ("free", 3, 2)
    assert "dx1_0.device = backward(x1_0.device, dx2_0.device, side_0.device, w1.device" in printed["program"]
    assert parse(printed["program after vertical"]).made_by == "vertical"
    assert "# gs_compile program 0.1   after snake" in printed["report after snake"]


def test_the_report_of_gpt2(printed):
    headline, *lines = printed["report"].splitlines()
    assert headline.startswith("3 layers of 1 class, 2 micro-batches of 3, 3,432,064 parameters of 13.1 MiB")
    assert "class 0: 3 layers: 0-2" in lines
    assert any("cross_entropy(mean) = cross_entropy(sum) / total" in line for line in lines)
    assert printed["report"].endswith(printed["program"])


def test_graphs(printed):
    assert "torch.nn.functional.embedding" in printed["captured"]
    assert "aten.addmm" in printed["forward"]
    assert printed["backward"].startswith(
        "# backward of layers 0 1 2\n#   arg0_1: x\n#   arg1_1: transformer.h.0.ln_1.weight"
    )
    assert "#   arg14_1: gradient of x" in printed["backward"]
    assert printed["backward"].count("aten.mm") > printed["forward"].count("aten.addmm")


def test_json(printed):
    found = json.loads(printed["json"])
    assert (found["num_layers"], found["num_micro_batches"], found["micro_batch_size"]) == (3, 2, 3)
    assert found["checkpoint"]["spec"] == "float32[3, 16, 64]"
    assert tuple(found["programs"]) == inspect.PROGRAM_PASSES
    assert found["programs"]["free"] == printed["program"]
    assert found["units"][1] == {"units": [0, 1, 2], "parameters_nbytes": 199936}
    assert "graph" not in found
    assert json.loads(printed["json with a graph"])["graph"].strip() == printed["backward"].strip()


def test_a_config_file_made_narrow_and_shallow(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 30, "vocab_size": 100} | sizes))
    changes = inspect._changes(named_config(str(path)), InspectRequest(str(path), layers=2, hidden=64))
    blocks = built(named_config(str(path), **changes)).model.layers
    attention, mlp, norms = 64 * 64 * 2 + 64 * 32 * 2, 64 * 128 * 3, 64 * 2
    assert [sum(each.numel() for each in block.parameters()) for block in blocks] == [attention + mlp + norms] * 2


@pytest.mark.parametrize("layers", [3, 40])
def test_layers_of_several_types_may_be_more_than_a_config_has(layers):
    found = named_config("gemma3_text")
    changed = named_config(
        "gemma3_text", **inspect._changes(found, InspectRequest("gemma3_text", layers=layers, hidden=None))
    )
    assert len(changed.layer_types) == layers
    assert changed.layer_types[:3] == found.layer_types[:3]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--model", "t5"), "Unrecognized configuration class"),
        (("--model", "gpt2", "--layers", "0"), "Invalid value for '--layers'"),
        (("--model", "gpt2", "--sequence", "2000"), "gpt2 has 1024 positions, fewer than a sequence of 2000"),
        (("--model", "gpt2", "--after", "sneak"), "invalid choice: 'sneak'"),
        (("--model", "gpt2", "--graph", "whole"), "Invalid value for '--graph'"),
        ((), "Missing option '--model'"),
    ],
)
def test_wrong_arguments(arguments, complaint):
    result = run("inspect", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in result.stderr


@pytest.mark.parametrize(
    ("model", "layers", "complaint"),
    [
        ("gpt2", "1", "UniformityError: the model has no repeated block: transformer.h (1 block)"),
        pytest.param(
            *("falcon", "2", "InspectionError: Dynamo cannot capture this model without weights"),
            marks=pytest.mark.skipif(torch.__version__ >= "2.15", reason="torch 2.15 captures it"),
        ),
    ],
)
def test_a_refusal(model, layers, complaint):
    result = run("inspect", "--model", model, "--layers", layers)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(complaint)


# How a command ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InspectionError("two\n  lines"), 1),
        (OptionError("wrong"), 2),
        (ProfileError("wrong"), 2),
        (MemoryBudgetError("too large"), 3),
        (NoFitError("too large"), 3),
        (PlanError("contradicts itself"), 2),
        (StorageError(5, "broken"), 5),
        (StorageFullError(28, "full"), 5),
        (PermissionError(13, "no"), 5),
        (StorageLockedError(11, "locked"), 6),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_exit_codes(monkeypatch, error, code):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("gs_compile.cli.inspect.inspect_text", fail)
    result = run(*GPT2)
    assert (result.exit_code, result.stdout) == (code, "")
    message = str(error).replace("\n ", "")
    assert result.stderr == ("" if code == 130 else f"{type(error).__name__}: {message}\n")


def test_a_loss_that_is_no_number_is_null_in_json(monkeypatch):
    monkeypatch.setattr("gs_compile.cli.train.train", lambda *_: {"saved": "here", "steps": 3, "loss": math.nan})
    assert run("train", "run.yaml", "--json").stdout == '{"saved": "here", "steps": 3, "loss": null}\n'


def test_an_error_that_is_not_ours_is_not_hidden(monkeypatch):
    monkeypatch.setattr("gs_compile.cli.inspect.inspect_text", lambda *_, **__: 1 / 0)
    assert isinstance(run(*GPT2).exception, ZeroDivisionError)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_command_and_lets_it_tidy_up(number, code):
    script = (
        "import time, gs_compile.cli.main as cli\n"
        "@cli.app.command()\n"
        "def wait():\n"
        "    try: print('begun', flush=True); time.sleep(60)\n"
        "    finally: print('tidied', flush=True)\n"
        "cli.main()"
    )
    process = subprocess.Popen([sys.executable, "-c", script, "wait"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        assert process.stdout.read() == "tidied\n"
    assert process.returncode == code


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["plan", "--help"], ["store", "ls", "."]], ids=" ".join
)
def test_what_cannot_be_written_is_told_in_a_line(arguments):
    """Fault: that of a version, or of help, was a traceback."""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "gs_compile", *arguments]
        ran = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ran.returncode, ran.stderr) == (5, "OSError: [Errno 28] No space left on device\n")


def test_the_version():
    assert run("--version").stdout == f"greedysnake {gs_compile.__version__}\n"


@pytest.mark.parametrize("group", [(), ("store",)], ids=" ".join)
def test_the_list_of_commands_has_whole_sentences(group):
    commands = run(*group, "--help").stdout.partition("Commands:")[2]
    assert commands
    assert "..." not in commands


def test_help_needs_nothing_heavy():
    """So it comes at once: torch alone takes a second."""
    script = (
        "import sys, gs_compile.cli.main as cli\n"
        "for command in ('inspect', 'doctor', 'probe', 'plan', 'simulate', 'store gc'):\n"
        "    try: cli.app([*command.split(), '--help'])\n"
        "    except SystemExit as stopped: assert stopped.code == 0\n"
        "heavy = {'torch', 'numpy', 'highspy', 'transformers', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=True)


def test_the_example_runs(capsys):
    runpy.run_path(str(ROOT / "examples" / "inspect_program.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "3 layers of 1 class, 2 micro-batches of 2" in printed
    assert "Layers (0, 1, 2) share one forward" in printed
