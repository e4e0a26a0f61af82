"""Pull the plug: a run is killed (kill -9) at random moments, goes on, and is held against one that was left alone.

A process trains a small GPT-2 from SSD, with dropout, on the help text that ships with every CPython; each step is
durable. Wherever it is killed, also before its first step and while it takes up what the one before it has left, the
next process goes on from the last commit. All losses, parameters and states of the optimizer have to be the same bits.

    python -m benchmarks.plug
    python -m benchmarks.plug --kills 100 --seed 2 --storage /path/on/an/nvme/drive
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SEQUENCE, BATCH, MICRO_BATCH = 64, 8, 2
STEPS, END = "steps.jsonl", "end.json"  # what a run's processes write beside its tiers


@dataclass
class Run:
    """What the processes of a run have told. losses: of closed steps, by number; one taken again has several."""

    losses: dict[int, list[str]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)  # of parameters and states after the last step, by name

    @property
    def num_repeated(self) -> int:
        return sum(len(each) - 1 for each in self.losses.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument(
        "--steps", type=int, default=12, help="of a run; a run that ends before the last kill is followed by another"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the moments of kills")
    parser.add_argument("--storage", type=Path, help="a directory on a fast SSD (default: a temporary one)")
    parser.add_argument("--compiler", choices=("auto", "inductor", "eager"), default="auto")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        train(arguments.child, arguments.steps, arguments.compiler)
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.storage and arguments.storage.resolve()) as folder:
        return pull(Path(folder), arguments.kills, arguments.steps, arguments.seed, arguments.compiler)


def pull(folder: Path, kills: int, num_steps: int, seed: int, compiler: str) -> int:
    """Run, kill and compare; the exit code: 0 if nothing differs."""
    moments, killed, num_runs, repeated = random.Random(seed), 0, 0, 0
    command = [sys.executable, "-m", "benchmarks.plug", "--steps", str(num_steps), "--compiler", compiler, "--child"]
    start_process([*command, str(folder / "warm")], None)  # compiles, which the others find in the cache
    start = time.perf_counter()
    start_process([*command, str(folder / "alone")], None)
    seconds = time.perf_counter() - start
    alone = told(folder / "alone")
    last = float.fromhex(alone.losses[num_steps][0])
    print(f"a run that is left alone: {num_steps} steps in {seconds:.1f} s, loss {last:.3f}", flush=True)
    while killed < kills:
        num_runs += 1
        place = folder / f"run-{num_runs}"
        while not (place / END).exists():
            moment = moments.uniform(0, seconds) if killed < kills else None
            if start_process([*command, str(place)], moment):
                killed += 1
                closed = told(place).losses
                print(
                    f"kill {killed} after {moment:.2f} s; the run has closed {max(closed, default=0)} steps", flush=True
                )
        found = told(place)
        repeated += found.num_repeated
        if wrong := list(differences(alone, found)):
            print(f"run {num_runs} differs: {', '.join(wrong)}", file=sys.stderr)
            return 1
    print(
        f"{killed} kills of {num_runs} runs; {repeated} of {num_runs * num_steps} steps were taken again; "
        f"all losses and {len(alone.digests)} tensors are the same bits"
    )
    return 0


def start_process(command: list[str], moment: float | None) -> bool:
    """Run a process until it ends, or kill it at a moment, in seconds; whether it was killed."""
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1])
    try:
        process.wait(timeout=moment)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True
    finally:
        process.kill()  # whatever has ended this one
    if process.returncode:
        raise SystemExit(f"a process ended with {process.returncode}")
    return False


def told(folder: Path) -> Run:
    run = Run()
    for line in (folder / STEPS).read_text().splitlines() if (folder / STEPS).exists() else ():
        step, loss = json.loads(line)
        run.losses.setdefault(step, []).append(loss)
    if (folder / END).exists():
        run.digests = json.loads((folder / END).read_text())
    return run


def differences(alone: Run, found: Run) -> Iterator[str]:
    """What is other in a run than in the one that was left alone, in words."""
    for step, (loss,) in alone.losses.items():
        if set(found.losses.get(step, ())) != {loss}:
            yield f"the loss of step {step}"
    for name in alone.digests.keys() | found.digests.keys():
        if alone.digests.get(name) != found.digests.get(name):
            yield name


def train(folder: Path, num_steps: int, compiler: str) -> None:
    """What a process does: from the last commit on to the end, each step told once it is closed."""
    import torch

    import gs_compile
    from benchmarks.common import gpt2, step
    from examples.train_gpt2 import text_as_bytes

    folder.mkdir(exist_ok=True)
    torch.use_deterministic_algorithms(True)
    model = gpt2(4, 128, SEQUENCE, 256, n_head=4)
    optimizer = gs_compile.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    options = {
        "micro_batch_size": MICRO_BATCH,
        "outputs": "loss",
        "storage": folder / "tiers",
        "durability": "step",
        "expert": {
            "ratios": {"parameter": 0.5, "checkpoint": 0.0, "optimizer": 0.0},
            "alpha": 0.5,
            "compiler": compiler,
        },
    }
    model.compile(backend="greedysnake", options=options)
    (folder / "tiers").mkdir(exist_ok=True)
    run = gs_compile.resume(model, optimizer, storage=folder / "tiers")
    text = text_as_bytes()
    sampler = gs_compile.StepSampler(len(text) // SEQUENCE, batch_size=BATCH, start=run.step)
    with (folder / STEPS).open("a", buffering=1) as steps:
        for number, rows in zip(range(run.step, num_steps), sampler, strict=False):
            ids = torch.stack([text[row * SEQUENCE : (row + 1) * SEQUENCE] for row in rows])
            loss = step(model, optimizer, ids)
            steps.write(json.dumps([number + 1, loss.item().hex()]) + "\n")
    if run.step == num_steps:  # killed after its last step: a call brings the values back
        with torch.no_grad():
            model(input_ids=text[None, :SEQUENCE].expand(BATCH, -1))
    optimizer.commit()
    values = {f"parameter {name}": value for name, value in model.state_dict().items()}
    for number, states in optimizer.state_dict()["state"].items():
        values |= {f"{name} of parameter {number}": torch.as_tensor(value) for name, value in states.items()}
    digests = {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in values.items()}
    (folder / "end.next").write_text(json.dumps(digests))
    (folder / "end.next").rename(folder / END)  # whole, or not there


if __name__ == "__main__":
    sys.exit(main())
