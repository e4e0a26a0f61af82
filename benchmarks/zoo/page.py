"""page: docs/models.md, from the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from textwrap import fill
from typing import Any

from benchmarks.common import RESULTS as FOLDER
from benchmarks.common import ROOT, table
from benchmarks.zoo.case import BATCH, LAYERS, WIDTH, Case
from benchmarks.zoo.registry import CASES

RESULTS = FOLDER / "zoo.json"
PAGE = ROOT / "docs" / "models.md"
HEAD = ("model", "result", "blocks streamed", "remark")
TRAINS = ["trains", "", ""]  # with all blocks streamed
INTRODUCTION = f"""\
# Models that were tried

{{counts}} They come from six packages.

Each model is built in a tiny configuration (mostly {LAYERS} layers of width {WIDTH}), and trained for two steps of
{BATCH} samples in micro-batches of 2: by plain PyTorch, with everything on SSD, and with everything in host memory. The
versions were {{versions}}.

* **trains**: losses, parameters and AdamW's first moments are within 1e-5 of plain PyTorch's (relative to a tensor's
  largest entry if that is above 1; the largest difference found is {{difference}}), and bitwise equal on SSD and in
  memory. All its blocks are streamed, unless a table says how many.
* **refused**: an error says why, before anything is learned ([limits.md](limits.md)).
* **wrong**, **failed**: a bug of this package.

Dropout is off. AdamW's epsilon is 1e-3, so that gradients that are only rounding errors do not become whole steps.
Initial values are changed a little, because zeros would block the gradients of everything below them.

`make zoo ZOO_ARGS="timm transformers/gpt"` repeats a part of it in an environment of its own, `make zoo` all of it, and
writes this page."""


def page(found: Mapping[str, Any]) -> str:
    """The page of these results."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    largest = max(result.get("difference", 0.0) for result in found["cases"].values())
    told = INTRODUCTION.format(versions=versions, counts=counts(found["cases"]), difference=f"{largest:.0e}")
    parts = [told]
    for package in dict.fromkeys(case.package for case in CASES.values()):
        cases = {key: case for key, case in CASES.items() if case.package == package and key in found["cases"]}
        rows = [row(case, found["cases"][key]) for key, case in cases.items()]
        names = ", ".join(name for name, *rest in rows if rest == TRAINS)
        parts += [f"## {package}", fill(f"**trains**: {names}.", 120, break_on_hyphens=False)]
        if others := [each for each in rows if [*each[1:]] != TRAINS]:
            parts.append(table(HEAD, others))
    return "\n\n".join(parts) + "\n"


def counts(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """How many have come to each result."""
    numbers = Counter(each["result"] for each in cases.values())
    words = {"trains": "train", "refused": "are refused", "wrong": "are wrong", "failed": "fail"}
    words["does not run"] = "do not run in plain PyTorch either"
    found = [f"{numbers[result]} {said}" for result, said in words.items() if numbers[result]]
    return f"Of {len(cases)} models {', '.join(found)}."


def row(case: Case, result: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """A line of the table; of a model that trains with all its blocks streamed there is nothing more to say."""
    streamed = result.get("streamed", case.num_blocks)
    parts = f"{streamed} of {case.num_blocks}" if streamed != case.num_blocks else ""
    kept = f"not on the tiers: {', '.join(result['kept'])}" if result.get("kept") else ""
    why, _, _ = result.get("why", kept).partition(" Explanation: ")  # Dynamo says its reason twice
    return f"`{case.name}`", result["result"], parts, why
