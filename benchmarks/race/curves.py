"""curves: the loss over many steps on real text: vertical, horizontal and plain PyTorch, and how far apart they are.

All start from the same weights and take the same batches, so the curves would be one, but for rounding: sums are added
in other orders, and training makes a difference of the last bit grow. How far rounding alone takes a curve is measured
on plain PyTorch against itself: with one thread, and with the batch in one piece. Ours should be no further off.

The text is the help that ships with every CPython, one token a byte, as in examples/train_gpt2.py.

    python -m benchmarks.race.curves --output benchmarks/results/race-curves.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy

from benchmarks.common import save
from benchmarks.race.protocol import Case
from benchmarks.race.registry import PLAIN, Entry
from benchmarks.race.run import START_SECONDS, STEP_SECONDS
from benchmarks.race.settings import add_output_arguments, begin, started
from benchmarks.race.worker import WorkerError
from examples.train_gpt2 import text_as_bytes

AT_ONCE = 10  # steps of one question
NOISE_FACTOR = 2.0  # what is within so many times the noise is noise: two curves are apart by both of theirs


@dataclass(frozen=True)
class Curve:
    """One run; `whole`: the batch in one piece."""

    entry: str
    whole: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


CURVES = {
    PLAIN: Curve(PLAIN),
    "plain, one thread": Curve(PLAIN, environment={"OMP_NUM_THREADS": "1"}),
    "plain, the batch in one piece": Curve(PLAIN, whole=True),
    "vertical": Curve("vertical/ssd/eager"),
    "horizontal": Curve("horizontal/ssd/eager"),
}
NOISE = ("plain, one thread", "plain, the batch in one piece")


def train(curve: Curve, case: Case, num_steps: int, storage: Path, deadline: float) -> list[float] | None:
    """The loss of every step; None where the time is up before the end."""
    if curve.whole:
        case = replace(case, micro_batch_size=case.samples, micro_batches=1)
    losses: list[float] = []
    entry = Entry.parse(curve.entry)
    with entry.start(case, storage, machine=None, environment=curve.environment) as worker:
        worker.ready(START_SECONDS)
        while len(losses) < num_steps:
            if time.monotonic() > deadline:
                return None
            count = min(AT_ONCE, num_steps - len(losses))
            losses += worker.ask(f"steps {len(losses)} {count}", STEP_SECONDS)["losses"]
    return losses


def apart(losses: Mapping[str, list[float]]) -> dict[str, float]:
    """The largest relative difference of each curve from plain's."""
    return {
        name: max(abs(a - b) / b for a, b in zip(values, losses[PLAIN], strict=True))
        for name, values in losses.items()
        if name != PLAIN
    }


def noise(differences: Mapping[str, float]) -> float:
    """How far rounding alone takes a curve."""
    return max((differences[name] for name in NOISE if name in differences), default=0.0)


def real_text(path: Path) -> None:
    """Writes the token numbers."""
    numpy.save(path, text_as_bytes().numpy().astype(numpy.uint8))


def report(found: Mapping[str, Any]) -> str:
    """For people."""
    differences = found.get("largest_difference", {})
    scale = noise(differences)
    lines = [f"{name}: {value:.2e} from plain at most" for name, value in differences.items()]
    for name in sorted(set(differences) - set(NOISE)):
        verdict = "within rounding noise" if differences[name] <= NOISE_FACTOR * scale else "more than rounding"
        lines.append(f"{name}: {verdict}, {differences[name] / scale:.2f} times that of plain against itself")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--storage", type=Path)
    add_output_arguments(parser)
    arguments = parser.parse_args()
    begin()
    deadline = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(dir=arguments.storage, prefix="race-") as folder:
        text = Path(folder) / "text.npy"
        real_text(text)
        shape = {name: getattr(arguments, name) for name in ("layers", "hidden", "sequence", "precision", "lr")}
        shape |= {name: getattr(arguments, name) for name in ("micro_batches", "micro_batch_size")}
        case = Case(**shape, heads=max(1, arguments.hidden // 64), vocabulary=256, tokens=str(text))
        setting = {**asdict(case), "tokens": "the help texts of CPython, bytes", "steps": arguments.steps}
        found = started({"setting": setting}, arguments)
        losses = found.setdefault("losses", {})
        for name, curve in CURVES.items():
            if name in losses:
                print(f"{name}: done before", flush=True)
                continue
            try:
                values = train(curve, case, arguments.steps, Path(folder), deadline)
            except WorkerError as error:
                print(f"{name}: {error}", flush=True)
                continue
            if values is None:
                print(f"{name}: the time is up", flush=True)
                break
            losses[name] = values
            print(f"{name}: loss {values[0]:.4f} to {values[-1]:.4f}", flush=True)
            found["largest_difference"] = apart(losses)
            save(found, arguments.output)
    print(report(found))


if __name__ == "__main__":
    main()
