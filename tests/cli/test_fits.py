"""`greedysnake fit`: its table and its JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import expecttest
import pytest
from command_line import run

from gs_compile.cli.report.fits import fits_report
from gs_compile.planner import fit as planner
from gs_compile.planner.fit import Fit
from gs_compile.planner.measure.shipped import ENVIRONMENT

FULL = Fit(way="in full", missing="m does not fit: it needs 2.0 GiB of host memory, 1.0 GiB more than it may use")
LORA = Fit(
    way="LoRA of rank 16",
    batch_size=8,
    micro_batch_size=2,
    tokens_per_second=250.0,
    seconds=16.0,
    peaks={"device": 3 << 30, "host": 1 << 30, "ssd": 40 << 30},
    written_nbytes=10**9,
    rated_nbytes=10**15,
    largest_micro_batch=4,
)
OVER = Fit(
    way="the same over nf4",
    batch_size=8,
    micro_batch_size=8,
    tokens_per_second=1000.0,
    seconds=4.0,
    peaks={"device": 3 << 30, "host": 12 << 30},
    largest_micro_batch=16,
)


class TestText(expecttest.TestCase):
    def test_what_fits_and_what_is_missing(self):
        self.assertExpectedInline(
            fits_report([FULL, LORA, OVER], 3.6e6, "m on this machine"),
            """\
m on this machine: 3,600,000 tokens, by the linear program; batch: samples of a step; `plan` simulates one

                   tokens/s  batch  hours  host memory  device memory       SSD    written  drives last  largest micro-batch
LoRA of rank 16         250      8      4      1.0 GiB        3.0 GiB  40.0 GiB  838.2 GiB   185.2 days                    4
the same over nf4     1,000      8      1     12.0 GiB        3.0 GiB         -          -            -                   16

in full: m does not fit: it needs 2.0 GiB of host memory, 1.0 GiB more than it may use""",
        )


def test_what_is_told_of_several_ranks_and_of_few_tokens():
    """Memory is each rank's; an hour's part is not none."""
    title, _, _, row, *_ = fits_report([replace(LORA, ranks=8)], 9e4, "m").splitlines()
    assert title.endswith("memory, SSD and what is written are those of each of 8 ranks")
    assert row.split()[4:7] == ["250", "8", "0.1"]


def test_what_is_wrong_with_the_request_is_no_answer():
    result = run("fit", "--machine", "a100", "--model", "gtp2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("PlanError: gtp2 is neither the name of a model")


@pytest.fixture
def found(monkeypatch):
    asked = []

    def fit(model, request, *, longest, keeps):
        assert keeps
        asked.append((model, request.lora, longest))
        return [FULL, LORA, OVER]

    monkeypatch.setattr(planner, "fit", fit)
    return asked


def test_the_command(found, monkeypatch):
    shown = run("fit", "--model", "m", "--lora", "8", "--longest", "--tokens", "3.6e6", "--json")
    assert shown.exit_code == 0, shown.stderr
    told = json.loads(shown.stdout)
    assert found == [("m", 8, True)]
    full, lora, over = told["ways"]
    assert (full["missing"], "hours" in full) == (FULL.missing, False)
    assert (lora["hours"], over["hours"]) == (4.0, 1.0)
    assert lora["written_nbytes_for_tokens"] == 900 * 10**9
    assert lora["drive_days"] == pytest.approx(10**15 / (10**9 / 16) / 86400)
    for machine in ("", "a100"):
        monkeypatch.setenv(ENVIRONMENT, machine)
        asked = f"m on {machine or 'this machine'}, samples of 2048 tokens"
        shown = run("fit", "--model", "m", "--tokens", "3.6e6").stdout
        assert shown == fits_report([FULL, LORA, OVER], 3.6e6, asked) + "\n"


@pytest.mark.parametrize("tokens", ["nan", "inf", "0", "-3"])
def test_a_number_of_tokens_that_is_none(found, tokens):
    refused = run("fit", "--model", "m", f"--tokens={tokens}")
    assert (refused.exit_code, refused.stdout, found) == (2, "", [])
    assert f"--tokens {tokens}: not a number of tokens" in refused.stderr
