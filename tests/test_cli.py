"""The command line, on models without weights; and the example that shows the same from a script."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import expecttest
import pytest

from gs_compile.__main__ import PROGRAM_PASSES, main
from gs_compile.text import parse

ROOT = Path(__file__).resolve().parent.parent
GPT2 = ("inspect", "--model", "gpt2", "--layers", "3", "--micro-batches", "2")
FORMS = {
    "report": (),
    "report after snake": ("--after", "snake"),
    "program": ("--graph", "program"),
    "program after vertical": ("--graph", "program", "--after", "vertical"),
    "captured": ("--graph", "captured"),
    "forward": ("--graph", "forward"),
    "backward": ("--graph", "backward"),
    "json": ("--json",),
    "json with a graph": ("--json", "--graph", "backward"),
}


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """All that can be printed of one model, which Dynamo captures once."""
    texts = {}
    for form, arguments in FORMS.items():
        with redirect_stdout(StringIO()) as out:
            assert main([*GPT2, *arguments]) == 0
        texts[form] = out.getvalue()
    return texts


def test_the_program_of_gpt2(printed):
    expecttest.assert_expected_inline(
        printed["program"],
        """\
# gs_compile 0.1   after free   3 layers x 2 micro-batches
# forward e   micro-batches 1 0
total.device = count(batch_0, batch_1)
x0_1.device, side_1.device = embed(batch_1, we.device)
x0_0.device, side_0.device = embed(batch_0, we.device)
# forward 0   micro-batches 0 1
x1_0.device = forward(x0_0.device, side_0.device, w0.device)
x1_1.device = forward(x0_1.device, side_1.device, w0.device)
# forward 1   micro-batches 1 0
x2_1.device = forward(x1_1.device, side_1.device, w1.device)
x2_0.device = forward(x1_0.device, side_0.device, w1.device)
# forward 2   micro-batches 0 1
x3_0.device = forward(x2_0.device, side_0.device, w2.device)
x3_1.device = forward(x2_1.device, side_1.device, w2.device)
# backward h   micro-batches 1 0
dwh.device = zeros()
loss_1.device, dx3_1.device, yh_1.device = head(x3_1.device, side_1.device, batch_1, total.device, wh.device, into=dwh.device)
loss_0.device, dx3_0.device, yh_0.device = head(x3_0.device, side_0.device, batch_0, total.device, wh.device, into=dwh.device)
# backward 2   micro-batches 0 1
dw2.device = zeros()
dx2_0.device = backward(x2_0.device, dx3_0.device, side_0.device, w2.device, into=dw2.device)
free(x2_0.device)
free(dx3_0.device)
dx2_1.device = backward(x2_1.device, dx3_1.device, side_1.device, w2.device, into=dw2.device)
free(x2_1.device)
free(dx3_1.device)
# backward 1   micro-batches 1 0
dw1.device = zeros()
dx1_1.device = backward(x1_1.device, dx2_1.device, side_1.device, w1.device, into=dw1.device)
free(x1_1.device)
free(dx2_1.device)
dx1_0.device = backward(x1_0.device, dx2_0.device, side_0.device, w1.device, into=dw1.device)
free(x1_0.device)
free(dx2_0.device)
# backward 0   micro-batches 0 1
dw0.device = zeros()
dx0_0.device = backward(x0_0.device, dx1_0.device, side_0.device, w0.device, into=dw0.device)
free(x0_0.device)
free(dx1_0.device)
dx0_1.device = backward(x0_1.device, dx1_1.device, side_1.device, w0.device, into=dw0.device)
free(x0_1.device)
free(dx1_1.device)
# backward e   micro-batches 1 0
dwe.device = zeros()
embed_backward(batch_1, dx0_1.device, we.device, into=dwe.device)
free(dx0_1.device)
embed_backward(batch_0, dx0_0.device, we.device, into=dwe.device)
free(dx0_0.device)
""",
    )


def test_the_report_of_gpt2(printed):
    headline, *lines = printed["report"].splitlines()
    assert headline.startswith("3 layers of 1 class, 2 micro-batches of 1, 60,648,960 parameters of 231.4 MiB")
    assert "class 0: 3 layers: 0-2" in lines
    assert any("cross_entropy(mean) = cross_entropy(sum) / total" in line for line in lines)
    assert printed["report"].endswith(printed["program"])


def test_the_program_after_a_pass(printed):
    assert parse(printed["program after vertical"]).made_by == "vertical"
    assert "# gs_compile 0.1   after snake" in printed["report after snake"]


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
    assert (found["num_layers"], found["num_micro_batches"], found["micro_batch_size"]) == (3, 2, 1)
    assert tuple(found["programs"]) == PROGRAM_PASSES
    assert found["programs"]["free"] == printed["program"]
    assert found["units"][1] == {"units": [0, 1, 2], "parameters_nbytes": 28351488}
    assert "graph" not in found
    assert json.loads(printed["json with a graph"])["graph"].strip() == printed["backward"].strip()


def test_a_config_file_made_narrow_and_shallow(capsys, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 30, "vocab_size": 100} | sizes))
    arguments = ("--layers", "2", "--hidden", "64", "--micro-batch-size", "3", "--sequence", "16", "--json")
    assert main(["inspect", "--model", str(path), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_layers"] == 2
    assert found["checkpoint"]["spec"] == "float32[3, 16, 64]"
    attention, mlp, norms = 64 * 64 * 2 + 64 * 32 * 2, 64 * 128 * 3, 64 * 2
    assert found["units"][1]["parameters_nbytes"] == 4 * (attention + mlp + norms)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--model", "gtp2"), "did you mean gpt2?"),
        (("--model", "t5"), "Unrecognized configuration class"),
        (("--model", __file__), "not a JSON file"),
        (("--model", "gpt2", "--layers", "0"), "--layers: 0 is not 1 or more"),
        (("--model", "gpt2", "--layers", "many"), "--layers: invalid"),
        (("--model", "gpt2", "--sequence", "2000"), "--sequence 2000: the model has 1024 positions"),
        (("--model", "gpt2", "--after", "sneak"), "invalid choice: 'sneak'"),
        ((), "required: --model"),
    ],
)
def test_wrong_arguments(capsys, arguments, complaint):
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", *arguments])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "layers", "complaint"),
    [
        ("gpt2", "1", "UniformityError: the model has no repeated block: transformer.h (1 block)"),
        ("falcon", "2", "InspectionError: Dynamo cannot capture this model without weights"),
    ],
)
def test_a_refusal(capsys, model, layers, complaint):
    assert main(["inspect", "--model", model, "--layers", layers]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(complaint)
    assert not printed.out


def test_help_needs_no_torch():
    code = (
        "import sys, gs_compile.__main__ as cli\n"
        "try: cli.main(['inspect', '--help'])\n"
        "except SystemExit as stopped: assert stopped.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert "--micro-batches" in run.stdout


def test_the_example_runs(tmp_path):
    installed = tmp_path / "greedysnake-0.dist-info"  # what pip would leave, so that torch finds the backend by name
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: greedysnake\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(
        "[torch_dynamo_backends]\ngreedysnake = gs_compile.backend:greedysnake\n"
    )
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "inspect_program.py"],
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert "3 layers of 1 class, 2 micro-batches of 2" in run.stdout
    assert "Layers (0, 1, 2) share one forward" in run.stdout
