"""page: docs/models.md, from the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common import RESULTS as FOLDER
from benchmarks.common import ROOT, table
from benchmarks.zoo.case import BATCH, LAYERS, WIDTH, Case
from benchmarks.zoo.registry import CASES

RESULTS = FOLDER / "zoo.json"
PAGE = ROOT / "docs" / "models.md"
HEAD = ("model", "result", "blocks streamed", "difference", "remark")
INTRODUCTION = f"""\
# Models that were tried

{{counts}} They come from six packages.

Each model is built in a tiny configuration (mostly {LAYERS} layers of width {WIDTH}, some have a few more), and trained
for two steps of {BATCH} samples in micro-batches of 2: by plain PyTorch, with everything on SSD, and with everything in
host memory. The versions were {{versions}}.

* **trains**: losses, parameters and AdamW's first moments are within 1e-5 of plain PyTorch's (relative to a tensor's
  largest entry if that is above 1), and bitwise equal on SSD and in memory. *Difference* is the largest one found.
* **refused**: an error of this package says why, before anything is learned. [limits.md](limits.md) has the reasons.
* **wrong**, **failed**: a bug of this package.

*Blocks streamed*: how many of the model's layers are units of their own in the step. The others are loaded for the
whole step. In x-transformers, attention and feed-forward are separate blocks. In a model with stages of several blocks
each, such as swin and convnext, a stage counts as one block.

Dropout is off. AdamW's epsilon is 1e-3, so that gradients that are only rounding errors do not become whole steps.
Initial values are changed a little, because zeros would block the gradients of everything below them.

To repeat it, run `make zoo`, or a part of it: `make zoo ZOO_ARGS="timm transformers/gpt"`. It creates its own
environment with the versions of `benchmarks/zoo/requirements.txt` under those of `constraints.txt`. litgpt is installed
without its dependencies, because it needs an older huggingface-hub than transformers does. This page is written from
`benchmarks/results/zoo.json`."""


def page(found: Mapping[str, Any]) -> str:
    """The page of these results."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    parts = [INTRODUCTION.format(versions=versions, counts=counts(found["cases"]))]
    for package in dict.fromkeys(case.package for case in CASES.values()):
        cases = {key: case for key, case in CASES.items() if case.package == package and key in found["cases"]}
        parts.append(f"## {package}\n\n" + table(HEAD, (row(case, found["cases"][key]) for key, case in cases.items())))
    return "\n\n".join(parts) + "\n"


def counts(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """How many have come to each result."""
    numbers = Counter(each["result"] for each in cases.values())
    words = {"trains": "train", "refused": "are refused", "wrong": "are wrong", "failed": "fail"}
    words["does not run"] = "do not run in plain PyTorch either"
    found = [f"{numbers[result]} {said}" for result, said in words.items() if numbers[result]]
    return f"Of {len(cases)} models {', '.join(found)}."


def row(case: Case, result: Mapping[str, Any]) -> Sequence[str]:
    """A line of the table."""
    streamed = f"{result['streamed']} of {case.num_blocks}" if "streamed" in result else ""
    difference = f"{result['difference']:.0e}" if "difference" in result else ""
    return f"`{case.name}`", result["result"], streamed, difference, "; ".join(remarks(result))


def remarks(result: Mapping[str, Any]) -> Iterator[str]:
    """What there is to say of a result."""
    if "why" in result:
        yield result["why"]
    if result.get("kinds", 1) > 1:
        yield f"layers of {result['kinds']} kinds, each compiled once"
    if result.get("kept"):
        yield f"not on the tiers: {', '.join(result['kept'])}"
