"""gpu: what `make gpu` runs on a machine with a CUDA device: its tests, rates of lanes, step times, and the race.

    python -m benchmarks.gpu --storage /path/on/an/nvme/drive --output benchmarks/results/gpu.json

smoke   a tiny model in every placement: the same bits, within two minutes
tests   the tests marked `gpu`: placements bitwise, events and pinned memory, planned device peaks
lanes   everything on SSD: the rate that each lane achieves while it works, and how much of its work is hidden behind
        the computation, from the trace of consecutive steps
steps   seconds of a step over the number of micro-batches: optimizer states on SSD, and planned with host memory
        capped; the planned peaks beside what torch's allocator has seen
race    the same model by plain PyTorch, ZeRO-Infinity and GreedySnake, checked for equal losses: benchmarks/race

Results are written after each part, as JSON and as a page beside it, so that a run whose `--minutes` are up, or a part
that fails, leaves what was found. `--device cpu` runs the same on a small model, the device simulated in host memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

import gs_compile
from benchmarks.common import IN_MEMORY, ON_SSD, RESULTS, ROOT, machine_facts, save, step
from benchmarks.gpu_page import page
from benchmarks.race.protocol import Case, batch, build_model, wait_for_device
from benchmarks.race.registry import PEERS_PYTHON
from gs_compile.model.backend import greedysnake
from gs_compile.runtime.trace import TraceEvent

SIZES = {
    "tiny": Case(layers=3, hidden=64, heads=2, vocabulary=256, sequence=32, micro_batch_size=2, precision="bf16"),
    "1b": Case(layers=24, hidden=2048, heads=16, sequence=1024, micro_batch_size=4, precision="bf16"),
    "3b": Case(layers=32, hidden=2560, heads=32, sequence=1024, micro_batch_size=4, precision="bf16"),
}
STATE_NBYTES = 14  # of a parameter in bf16, with its fp32 master and moments
WARM_STEPS = 2
SMOKE_STEPS = 2
PLACEMENTS: dict[str, dict[str, Any]] = {
    "on SSD": {"ratios": ON_SSD, "alpha": 0.0},
    "in host memory": {"ratios": IN_MEMORY, "alpha": 0.0},
    "in parts": {"ratios": {"parameter": 0.3, "checkpoint": 0.5, "optimizer": 0.5}, "alpha": 0.3},
    "on the device": {"ratios": {"device_parameter": 1.0, "device_checkpoint": 1.0, "optimizer": 0.5}, "alpha": 0.5},
}
CONTESTANTS = ("plain", "zero-infinity", "vertical/ssd/eager", "vertical/ssd/inductor", "vertical/half/inductor")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The case that is measured, and how long it may take.

    micro_batches: of the step, for each row. host_share: host memory of planned runs, as a share of the bytes of
    parameters and states. machine: the profile that they plan with; None: measured now.
    """

    case: Case
    micro_batches: tuple[int, ...]
    steps: int
    host_share: float
    storage: Path
    machine: str | None
    compiler: str
    peers_python: Path
    deadline_seconds: float  # of time.monotonic()

    @property
    def left_seconds(self) -> float:
        return max(self.deadline_seconds - time.monotonic(), 0.0)

    @property
    def is_simulated(self) -> bool:
        return self.case.device == "cpu"


class Run:
    """One model in training with its data in given places; a context, past its first steps, that leaves no files."""

    def __init__(self, setting: Setting, micro_batches: int, **options: Any) -> None:
        torch._dynamo.reset()
        gc.collect()  # the model of the row before, which refers to itself
        self.case, self._is_simulated = replace(setting.case, micro_batches=micro_batches), setting.is_simulated
        self.model = build_model(self.case)
        expert = {"compiler": setting.compiler, "trace": True, "separate_device": setting.is_simulated}
        expert |= options.pop("expert", {})
        general = {"micro_batch_size": self.case.micro_batch_size, "outputs": "loss", "storage": str(setting.storage)}
        general |= {"precision": "bf16" if self.case.precision == "bf16" else "model"}
        self.model.compile(backend=greedysnake, options={**general, **options, "expert": expert})
        self.optimizer = gs_compile.AdamW(self.model.parameters(), lr=self.case.lr)

    def __enter__(self) -> Run:
        with ExitStack() as stack:
            stack.push(self)  # a first step that fails leaves nothing either
            self.timed(0, WARM_STEPS)
            stack.pop_all()
        if not self._is_simulated:
            torch.accelerator.reset_peak_memory_stats()  # the model was on the device as a whole before its first step
        return self

    def __exit__(self, *_: object) -> None:
        if self.optimizer.engine is not None:
            self.optimizer.engine.tiers.close()
        if not self._is_simulated:
            torch.accelerator.empty_cache()  # so that each row finds the device as the first one did

    def timed(self, first: int, count: int) -> float:
        """Seconds of one of `count` consecutive steps, all of their transfers included."""
        batches = [batch(self.case, first + number) for number in range(count)]
        start = time.perf_counter()
        for ids in batches:
            step(self.model, self.optimizer, ids)
        self.optimizer.synchronize()
        wait_for_device(self.case)
        return (time.perf_counter() - start) / count

    def events(self) -> list[TraceEvent]:
        assert self.optimizer.engine is not None
        events: list[TraceEvent] = self.optimizer.engine.tiers.trace.events()
        return events


# The parts -----------------------------------------------------------------------------------------------------------


def smoke(setting: Setting) -> dict[str, Any]:
    """Train a tiny model in every placement; raises where one learns other bits than the first."""
    tiny = replace(setting, case=replace(SIZES["tiny"], device=setting.case.device), compiler="eager")
    found: dict[str, list[torch.Tensor]] = {}
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for name, expert in PLACEMENTS.items():
            with Run(tiny, 2, expert=expert) as run:
                run.timed(WARM_STEPS, SMOKE_STEPS)
                found[name] = [parameter.detach().cpu().clone() for parameter in run.model.parameters()]
    finally:
        torch.use_deterministic_algorithms(before)
    first, *others = found
    other_bits = [name for name in others if not all(map(torch.equal, found[name], found[first]))]
    if other_bits:
        raise RuntimeError(f"{', '.join(other_bits)}: other bits than {first}")
    return {"placements": list(found), "steps": WARM_STEPS + SMOKE_STEPS}


def tests(setting: Setting) -> dict[str, Any]:
    """Run the tests that need a CUDA device; how many passed, failed and were skipped, and the names of the failed."""
    report = setting.storage / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([*command, str(ROOT / "tests")], cwd=ROOT, timeout=setting.left_seconds, check=False)
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = [f"{case.get('classname')}.{case.get('name')}" for case in bad]
    return {"passed": len(cases) - len(bad) - skipped, "skipped": skipped, "failed": names}


def lanes(setting: Setting) -> dict[str, Any]:
    """Rates and overlap of every lane in steps with everything on SSD, for the most micro-batches."""
    number = max(setting.micro_batches)
    with Run(setting, number, expert={"ratios": ON_SSD, "alpha": 0.0}) as run:
        start = time.perf_counter()
        seconds = run.timed(WARM_STEPS, setting.steps)
        events = [event for event in run.events() if event.start_seconds >= start]
    return {"micro_batches": number, "seconds": seconds, "lanes": lane_rates(events)}


def steps(setting: Setting) -> dict[str, Any]:
    """Seconds and peaks of a step for each number of micro-batches: states on SSD, and planned with a host budget."""
    elements = sum(parameter.numel() for parameter in build_model(replace(setting.case, device="meta")).parameters())
    budget = int(setting.host_share * STATE_NBYTES * elements)
    ways: dict[str, dict[str, Any]] = {
        "states on SSD": {"expert": {"ratios": {**IN_MEMORY, "optimizer": 0.0}, "alpha": 0.0}},
        "planned, host capped": {"host_memory": budget, "machine": setting.machine},
    }
    rows = []
    for number in setting.micro_batches:
        for name, options in ways.items():
            if not setting.left_seconds:
                return {"rows": rows, "incomplete": "the time is up"}
            rows.append({"micro_batches": number, "run": name, **_step_row(setting, number, options)})
    return {"parameters": elements, "host_budget_nbytes": budget, "rows": rows}


def _step_row(setting: Setting, number: int, options: dict[str, Any]) -> dict[str, Any]:
    try:
        with Run(setting, number, **options) as run:
            seconds = statistics.median(run.timed(WARM_STEPS + index, 1) for index in range(setting.steps))
            planned = dict(gs_compile.inspect(run.model).program().peaks)
    except (gs_compile.errors.GreedySnakeError, torch.OutOfMemoryError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    tokens = run.case.samples * run.case.sequence / seconds
    return {"seconds": seconds, "tokens_per_second": tokens, "planned_nbytes": planned, **_seen(setting)}


def _seen(setting: Setting) -> dict[str, int | None]:
    """What torch's allocator has seen: bytes at their peak, and how often it had to begin again."""
    if setting.is_simulated:
        return {"allocated_nbytes": None}
    seen = torch.accelerator.memory_stats()
    return {
        "allocated_nbytes": torch.accelerator.max_memory_allocated(),
        "reserved_nbytes": torch.accelerator.max_memory_reserved(),
        "retries": seen.get("num_alloc_retries", 0),
        "out_of_memory": seen.get("num_ooms", 0),
    }


def race(setting: Setting) -> dict[str, Any]:
    """Race the other systems on the same model and device; ZeRO-Infinity runs where its environment is built."""
    if not (setting.is_simulated or setting.peers_python.exists()):  # DeepSpeed takes a quarter of an hour to build
        subprocess.run(["make", ".venv-peers/.installed"], cwd=ROOT, check=False)
    output = setting.storage / "race.json"
    case, numbers = setting.case, [str(number) for number in setting.micro_batches]
    given = ("layers", "hidden", "heads", "vocabulary", "sequence", "micro_batch_size", "precision", "device")
    options = [f"--{name.replace('_', '-')}={getattr(case, name)}" for name in given]
    command = [sys.executable, "-m", "benchmarks.race.race", *options, "--micro-batches", *numbers]
    command += [f"--minutes={setting.left_seconds / 60:.2f}", f"--storage={setting.storage}", f"--output={output}"]
    command += [f"--contestants={','.join(CONTESTANTS)}", f"--peers-python={setting.peers_python}", "--rounds=2"]
    command += [f"--machine={setting.machine}"] if setting.machine else []
    subprocess.run(command, cwd=ROOT, timeout=setting.left_seconds + 600, check=True)  # it ends by itself
    found: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {"incomplete": "the time is up"}
    return found


PARTS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "smoke": smoke,
    "tests": tests,
    "lanes": lanes,
    "steps": steps,
    "race": race,
}


# Lanes ---------------------------------------------------------------------------------------------------------------


def lane_rates(events: Iterable[TraceEvent]) -> dict[str, dict[str, float]]:
    """Of each lane: seconds at work, bytes, bytes a second at work, and the share of its work beside the computation.

    Operations that overlap on one lane count their time once.
    """
    by_lane: dict[str, list[TraceEvent]] = {}
    for event in events:
        by_lane.setdefault(event.label.lane, []).append(event)
    busy = {lane: _union((each.start_seconds, each.end_seconds) for each in found) for lane, found in by_lane.items()}
    computing = busy.get("compute", [])
    rates = {}
    for lane, found in by_lane.items():
        seconds, nbytes = _seconds(busy[lane]), sum(event.label.nbytes for event in found)
        together = seconds + _seconds(computing) - _seconds(_union([*busy[lane], *computing]))
        rates[lane] = {
            "seconds": seconds,
            "nbytes": nbytes,
            "bytes_per_second": nbytes / seconds if seconds else 0.0,
            "beside_compute": together / seconds if seconds else 0.0,
        }
    return rates


def _union(periods: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same periods without overlap, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(periods):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _seconds(periods: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in periods)


# The command ---------------------------------------------------------------------------------------------------------


def measure(setting: Setting, parts: Iterable[str], output: Path) -> dict[str, Any]:
    """Run parts one after the other; results are in `output`, and on a page beside it, after each."""
    case = asdict(setting.case)
    found: dict[str, Any] = {"machine": machine_facts(), "torch": torch.__version__, "case": case, "parts": {}}
    for name in parts:
        print(f"{name} ...", flush=True)
        start = time.monotonic()
        try:
            result = PARTS[name](setting) if setting.left_seconds else {"incomplete": "the time is up"}
        except Exception as error:  # noqa: BLE001  a part that fails is a result, and others go on
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        found["parts"][name] = {**result, "part_seconds": time.monotonic() - start}
        save(found, output)
        output.with_suffix(".md").write_text(page(found))
    return found


def main() -> None:
    """Measure what the command line asks for; exit 1 where a part fails, 2 without a CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=list(SIZES), help="of the model (default: 1b, and tiny on a CPU)")
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--host-share", type=float, default=0.4, help="host memory, in bytes of parameters and states")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--minutes", type=float, default=math.inf, help="what does not fit is skipped, and said so")
    parser.add_argument("--storage", type=Path, help="a directory on a fast drive (default: a temporary one)")
    parser.add_argument("--machine", help="a profile to plan with (default: this machine, measured now)")
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON, help="of the environment of the peers")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu.json")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: torch sees none. `--device cpu` runs the same on a small model", file=sys.stderr)
        sys.exit(2)
    size = arguments.size or ("1b" if arguments.device == "cuda" else "tiny")
    with tempfile.TemporaryDirectory(dir=arguments.storage, prefix="gpu-") as storage:
        setting = Setting(
            case=replace(SIZES[size], device=arguments.device),
            micro_batches=tuple(sorted(set(arguments.micro_batches))),
            steps=arguments.steps,
            host_share=arguments.host_share,
            storage=Path(storage),
            machine=arguments.machine,
            compiler=arguments.compiler,
            peers_python=arguments.peers_python,
            deadline_seconds=time.monotonic() + 60 * arguments.minutes,
        )
        found = measure(setting, arguments.parts.split(","), arguments.output)
    print(page(found))
    failed = [name for name, part in found["parts"].items() if part.get("error") or part.get("failed")]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
