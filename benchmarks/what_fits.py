"""what_fits: what known models come to on the machines that ship, in full, by LoRA and over 4-bit weights, as a page.

    python -m benchmarks.what_fits --output docs/what_fits.md                  a quarter of an hour on one core
    python -m benchmarks.what_fits --models qwen3-8b --machines laptop         a part of the table

By the linear program of `greedysnake fit`, so each figure is a bound that a simulated step stays below by some per
cent. Configs are in benchmarks/models, in the form of transformers; no weights are needed. One that is put there has a
row in the next table.
"""

from __future__ import annotations

import argparse
import datetime
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common import table
from gs_compile.planner.cost.model import KNOWN, named_config
from gs_compile.planner.fit import Fit, fit
from gs_compile.planner.measure.machines import profile
from gs_compile.planner.measure.shipped import known
from gs_compile.planner.plan import Planner
from gs_compile.planner.summary import rate_text

FOLDER = Path(__file__).resolve().parent / "models"
SEQUENCE = 2048  # tokens, or as many as a model has positions for
# Those that `greedysnake fit` knows by name.
NAMED = (*(name for name in KNOWN if name.startswith("llama-")), "gpt-65b")
INTRODUCTION = """\
# What fits

Predicted tokens/s of models on the machines that ship, trained **in full / by LoRA of rank 16 / by LoRA over nf4**; *-*
does not fit. Weights have 16 bits, with fp32 masters and AdamW, without clipping. Sequences have {sequence} tokens,
or as many as the model has positions for. The batch is the smallest that reaches the machine's rate.

Nothing here was run. The figures are upper bounds of the linear program, from the models' configs and the machines'
figures in `gs_compile/planner/measure/machines`, which name their sources. A simulated step (`greedysnake plan`) is up
to an eighth slower. `greedysnake fit --model Qwen/Qwen3-14B --machine rtx4090`, with an id of the hub or a config,
prints the details of one cell: hours, memory, bytes written, and days that the drives last.

Made on {date} by `python -m benchmarks.what_fits --output docs/what_fits.md`.
"""


def models() -> dict[str, str]:
    """What `fit` takes, by name: paths of configs, and names that the planner knows."""
    found = {path.stem: str(path) for path in FOLDER.glob("*.json")} | {name: name for name in NAMED}
    return dict(sorted(found.items()))


def rows(names: Sequence[str], machines: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """A model's name and its cell for each machine; a model is captured once for all of them."""
    for name in names:
        model, planners = models()[name], list[Planner]()
        sequence = min(SEQUENCE, named_config(model).max_position_embeddings)
        yield name, *(cell(fit(model, machine=machine, sequence=sequence, planners=planners)) for machine in machines)


def cell(found: Sequence[Fit]) -> str:
    """``438 / 1,020 / -``: tokens a second of each way."""
    return " / ".join("-" if each.missing else rate_text(each.tokens_per_second) for each in found)


def page(names: Sequence[str], machines: Sequence[str]) -> str:
    lines = [INTRODUCTION.format(sequence=SEQUENCE, date=datetime.datetime.now(datetime.UTC).date())]
    lines += [f"* **{machine}**: {profile(machine).name}" for machine in machines]
    return "\n".join([*lines, "", table(("model", *machines), rows(names, machines))]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.what_fits", description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=models(), default=list(models()), metavar="NAME")
    parser.add_argument("--machines", nargs="+", choices=known(), default=list(known()), metavar="NAME")
    parser.add_argument("--output", type=Path, help="a file; else it is printed")
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # of PEFT
    made = page(asked.models, asked.machines)
    if asked.output:
        asked.output.write_text(made)
    else:
        print(made, end="")


if __name__ == "__main__":
    main()
