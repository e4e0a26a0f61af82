"""The proof: a notebook whose code runs as it stands."""

from __future__ import annotations

import json
import re

import pytest
from bounds import ROOT
from notebook import executed, run

PROOF = ROOT / "examples" / "proof.ipynb"
PATHS = re.compile(r"/(?:tmp|home|root|work|usr)/")  # of the machine that ran it


@pytest.mark.slow
def test_the_proof_runs():
    """It asserts what it shows."""
    cells = [cell for cell in executed(json.loads(PROOF.read_text()))["cells"] if cell["cell_type"] == "code"]
    shown = [output for cell in cells for output in cell["outputs"]]
    assert any("the same bits\n" in output.get("text", ()) for output in shown)
    assert "image/png" in shown[-1]["data"]
    assert not PATHS.search(json.dumps(shown))


def test_it_can_be_read_without_running_it():
    """What it has printed and shown stands in it, and nothing of the machine that ran it."""
    cells = [cell for cell in json.loads(PROOF.read_text())["cells"] if cell["cell_type"] == "code"]
    shown = [output for cell in cells for output in cell["outputs"]]
    assert any("the same bits\n" in output.get("text", ()) for output in shown)
    assert "image/png" in shown[-1]["data"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not PATHS.search(json.dumps(shown))


def test_a_cell_that_fails_says_what_it_had_printed():
    with pytest.raises(ZeroDivisionError) as caught:
        run("print('so far')\n1 / 0", {}, 3)
    assert caught.value.__notes__ == ["cell 3 had printed:\nso far\n"]


def test_a_cell_prints_and_shows():
    outputs = run("print('seen')\n[1]", {}, 1)
    assert [each["output_type"] for each in outputs] == ["stream", "display_data"]
    assert outputs[1]["data"] == {"text/plain": ["[1]"]}
