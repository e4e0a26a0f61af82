"""heat: one number of micro-batches, raced: losses checked, then timed rounds in turn.

Contestants start one after the other and stay, so that a round takes each in turn while the others sleep. Where memory
does not hold all of them, those that have started are raced and stopped before the next start; plain PyTorch, the
common measure, is in every such group.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common import machine_facts
from benchmarks.race.measures import DriveSpeed, MachineSpeed, spread
from benchmarks.race.protocol import Case
from benchmarks.race.registry import PLAIN, Entry
from benchmarks.race.settings import MOST_STEPS, Settings
from benchmarks.race.worker import Team, Worker, WorkerError
from gs_compile.machine import available_memory, format_bytes
from gs_compile.planner.measure.profile import Profile

LEAD_STEPS = 1  # of a round, untimed: consecutive steps have what those before have left to do beside them
CHECKED_STEPS = 2  # before anything is timed; they also compile, and fill whatever is kept from step to step
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # of losses against plain PyTorch's, relative
DRIFT = 10.0  # times as much for the steps that are timed: rounding grows as training goes on
START_SECONDS = 1800.0  # a start may build operators in C++
STEP_SECONDS = 1800.0
PREDICT_SECONDS = 60.0  # that one may take, which times the code anew
CLOSE = 1.1  # times the fastest of its rivals: more rounds tell who is faster
HEADROOM = 1.25  # memory that has to be free for the next start, in peaks of the largest so far


def warmed_up(worker: Worker | Team) -> float:
    """Seconds of the last of a contestant's first steps."""
    return [worker.ask(f"step {number}", STEP_SECONDS)["seconds"] for number in range(CHECKED_STEPS)][-1]


@dataclass
class Runner:
    """A contestant that has started, and what is known of it."""

    entry: Entry
    worker: Worker | Team
    result: dict[str, Any]
    step_seconds: float = math.inf


@dataclass(frozen=True)
class Finals:
    """Further rounds of rivals that the first ones do not tell apart. rivals: sets of names."""

    rivals: Sequence[Sequence[str]] = ()
    rounds: int = 0

    def of(self, seconds: Mapping[str, float]) -> frozenset[str]:
        """Whoever races on, by how long each has taken so far."""
        raced = [{name: seconds[name] for name in names if name in seconds} for names in self.rivals]
        near = [{name for name in each if each[name] <= CLOSE * min(each.values())} for each in raced]
        return frozenset[str]().union(*(names for names in near if len(names) > 1))


NO_FINALS = Finals()


@dataclass
class Run:
    """The race of one case; `run` gives its results."""

    case: Case
    entries: Sequence[Entry]
    settings: Settings
    finals: Finals = NO_FINALS
    speed: MachineSpeed = field(default_factory=MachineSpeed)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    correct: list[float] = field(default_factory=list)  # plain's losses, by step
    drive: DriveSpeed = field(init=False)

    def run(self) -> dict[str, Any]:
        """The results of every contestant by name, and how fast the machine was meanwhile."""
        start = time.monotonic()
        waiting = [entry for entry in self.entries if entry.name != PLAIN]
        with tempfile.TemporaryDirectory(dir=self.settings.storage, prefix="race-") as storage:
            self.drive = DriveSpeed(Path(storage) / "drive", self.settings.drive_seconds, self.settings.slow_drive)
            while True:
                left = len(waiting)
                self._race_group(waiting, Path(storage))
                if not waiting or len(waiting) == left or self.settings.left <= 0:
                    break
        for entry in waiting:
            self.results[entry.name] = {"verdict": "not raced: out of time"}
        return {
            "micro_batches": self.case.micro_batches,
            "machine": machine_facts(),
            "tokens": self.case.samples * self.case.sequence,
            "complete": not any("out of time" in found["verdict"] for found in self.results.values()),
            "minutes": (time.monotonic() - start) / 60,
            "groups": self.groups,
            "matmul_seconds": self.speed.seconds,
            "matmul_spread": self.speed.spread if self.speed.seconds else None,
            "drive": self.drive.median,
            "drive_samples": self.drive.samples,
            "contestants": {entry.name: self.results[entry.name] for entry in self.entries},
        }

    def _race_group(self, waiting: list[Entry], storage: Path) -> None:
        """As many of `waiting` as memory holds, and plain; takes them off the list."""
        with ExitStack() as stack:
            plain = self._start(Entry.parse(PLAIN), storage, stack)
            if plain is None:
                raise SystemExit(f"plain PyTorch, whose losses are right, has failed: {self.results[PLAIN]['verdict']}")
            runners = [plain] if any(entry.name == PLAIN for entry in self.entries) else []
            if self.settings.start_together and waiting:
                with ThreadPoolExecutor(len(waiting)) as pool:
                    started_all = pool.map(lambda entry: self._start(entry, storage, stack), waiting)
                runners += [runner for runner in started_all if runner is not None]
                waiting.clear()
            peak, started = plain.result["peak_rss"], 0
            while waiting and self.settings.left > 0 and started < self.settings.most_together:
                if started and available_memory() < HEADROOM * peak:
                    print(f"  {format_bytes(available_memory())} are free: {waiting[0].name} waits", flush=True)
                    break
                started += 1
                runner = self._start(waiting.pop(0), storage, stack)
                if runner is not None:
                    peak = max(peak, runner.result["peak_rss"])
                    runners.append(runner)
            self.groups.append([runner.entry.name for runner in runners])
            self._rounds(runners, plain)

    def _start(self, entry: Entry, storage: Path, stack: ExitStack) -> Runner | None:
        """A contestant that has taken its first steps, rightly; None, with a verdict, for one that has not."""
        result = self.results.setdefault(entry.name, {})
        result["settings"] = entry.settings
        settings, start = self.settings, time.monotonic()
        worker = stack.enter_context(
            entry.start(self.case, storage, peers_python=settings.peers_python, machine=settings.machine)
        )
        try:
            result["ready"] = worker.ready(START_SECONDS)
            steps = [worker.ask(f"step {number}", STEP_SECONDS) for number in range(CHECKED_STEPS)]
            if entry.is_ours:
                result["describe"] = worker.ask("describe", STEP_SECONDS)
            result |= worker.ask("stats", STEP_SECONDS)
            result["start_seconds"] = time.monotonic() - start
        except WorkerError as error:
            return self._out(entry, worker, f"not raced: {error}")
        result["losses"] = losses = [step["loss"] for step in steps]
        self.correct = losses if entry.name == PLAIN else self.correct
        result["difference"] = difference(losses, self.correct)
        if not result["difference"] <= TOLERANCE[self.case.precision]:
            return self._out(entry, worker, f"wrong: its losses differ from plain's by {result['difference']:.1e}")
        if twin := self._same_step(result.get("describe")):
            return self._out(entry, worker, f"the same step program as `{twin}`, raced once")
        result["verdict"] = "right"
        print(f"  {entry.name}: losses within {result['difference']:.1e}, {steps[-1]['seconds']:.3g} s", flush=True)
        return Runner(entry, worker, result, steps[-1]["seconds"])

    def _same_step(self, described: dict[str, Any] | None) -> str | None:
        """The contestant of ours that runs this very step already; to race both would compare a step with itself."""
        if described is None:
            return None
        right = [name for name, each in self.results.items() if each.get("verdict") == "right"]
        programs = {name: self.results[name].get("describe", {}).get("program") for name in right}
        return next((name for name, program in programs.items() if program == described["program"]), None)

    def _out(self, entry: Entry, worker: Worker | Team, verdict: str) -> None:
        worker.close()
        self.results[entry.name]["verdict"] = verdict
        print(f"  {entry.name}: {verdict}", flush=True)

    def _rounds(self, runners: list[Runner], plain: Runner) -> None:
        """All rounds that the time allows; each takes everyone through the same steps."""
        if not runners:
            return
        fastest = min(runner.step_seconds for runner in runners)
        count = self.settings.num_steps(fastest)
        one_round = (LEAD_STEPS + count) * sum(runner.step_seconds for runner in runners)
        timed = {runner.entry.name: Timing() for runner in runners}
        for runner in list(runners):
            self._ask(runner, runners, "reset_peak")
        self.drive.sample()
        num_rounds, racing = self.settings.rounds, frozenset(timed)
        for number in range(num_rounds + self.finals.rounds):
            if self.settings.left < (one_round if number else 0.0):  # whoever has started is timed once
                print(f"  {number} of {num_rounds} rounds: the time is up", flush=True)
                break
            if number == num_rounds:
                racing = self.finals.of({name: each.median for name, each in timed.items() if each.seconds})
            if not racing:
                break
            for runner in [each for each in runners if each.entry.name in racing]:
                first = CHECKED_STEPS + number * (LEAD_STEPS + count)
                self._time(runner, runners, timed[runner.entry.name], first, count)
            self.drive.sample()
        for runner in list(runners):
            timed[runner.entry.name].close(runner.result, self.speed, count)
            if not runner.entry.is_ours:
                continue
            runner.result |= self._ask(runner, runners, "waits") or {}
        for runner in runners:
            if runner is not plain and plain in runners:
                self._compare(runner.result, timed[runner.entry.name], timed[PLAIN])

    def _time(self, runner: Runner, runners: list[Runner], timing: Timing, first: int, count: int) -> None:
        before = self.speed.sample()
        start = self._ask(runner, runners, "stats")
        found = self._ask(runner, runners, f"steps {first} {count} {LEAD_STEPS}")
        stop = self._ask(runner, runners, "stats")
        if start and found and stop:
            timing.add(found, start, stop, (before, self.speed.sample()))
            print(f"  {runner.entry.name}: {found['seconds'] / count:.3g} s a step", flush=True)
            if runner.entry.is_ours:
                self._predict(runner, runners, timing)

    def _predict(self, runner: Runner, runners: list[Runner], timing: Timing) -> None:
        """What the simulator says of its step, with the drive's rates so far and its code timed right behind its turn.

        The speed of a shared machine changes from minute to minute: a prediction is for the turn before it, so there is
        one of each.
        """
        if self.settings.machine is None:
            return
        path = self.drive.storage.with_name("machine.json")
        replace(Profile.load(self.settings.machine), **self.drive.median).save(path)
        if self.settings.left > PREDICT_SECONDS and (found := self._ask(runner, runners, f"predict {path}")):
            timing.predicted.append(found["predict"])
        self._ask(runner, runners, "reset_peak")  # what timing the code takes is not the step's

    def _ask(self, runner: Runner, runners: list[Runner], question: str) -> dict[str, Any] | None:
        """The answer; whoever fails is out from then on."""
        if runner not in runners:
            return None
        try:
            return runner.worker.ask(question, STEP_SECONDS * MOST_STEPS)
        except WorkerError as error:
            self._out(runner.entry, runner.worker, f"failed in its rounds: {error}")
            runners.remove(runner)
            return None

    def _compare(self, result: dict[str, Any], timing: Timing, plain: Timing) -> None:
        """With plain in the same rounds: its seconds, and the losses of the timed steps, of the same batches."""
        if not timing.seconds:
            return
        pairs = zip(timing.seconds, plain.seconds, strict=False)  # of the rounds that both were in
        result["times_plain"] = statistics.median(ours / theirs for ours, theirs in pairs)
        both = min(len(timing.losses), len(plain.losses))
        result["timed_difference"] = apart = difference(timing.losses[:both], plain.losses[:both])
        if not apart <= DRIFT * TOLERANCE[self.case.precision]:
            result["verdict"] = f"wrong: the losses of its timed steps differ from plain's by {apart:.1e}"


@dataclass
class Timing:
    """The rounds of one contestant."""

    seconds: list[float] = field(default_factory=list)  # of all steps of a round
    speeds: list[tuple[float, float]] = field(default_factory=list)  # the fixed product, before and after
    losses: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)  # of a step, by the simulator
    read_bytes: int = 0
    write_bytes: int = 0
    peak_rss: int = 0
    peak_device: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def add(
        self, found: dict[str, Any], start: dict[str, Any], stop: dict[str, Any], speeds: tuple[float, float]
    ) -> None:
        self.seconds.append(found["seconds"])
        self.speeds.append(speeds)
        self.losses += found["losses"]
        self.read_bytes += stop["read_bytes"] - start["read_bytes"]
        self.write_bytes += stop["write_bytes"] - start["write_bytes"]
        self.peak_rss = max(self.peak_rss, stop["peak_rss"])
        self.peak_device = max(self.peak_device, stop["peak_device"])

    def close(self, result: dict[str, Any], speed: MachineSpeed, count: int) -> None:
        """Enters what is known at the end, of one step each; plain races in every group, and all its rounds count."""
        if not self.seconds:
            if "median_seconds" not in result:
                result["verdict"] = "not raced: out of time"
            return
        here = [seconds / count for seconds in self.seconds]
        steps = (LEAD_STEPS + count) * len(here)
        each = [*result.get("seconds", ()), *here]
        normalised = [speed.normalised(s, *speeds) for s, speeds in zip(here, self.speeds, strict=True)]
        normalised = [*result.get("normalised_seconds", ()), *normalised]
        if self.predicted:
            result["predicted_seconds"] = statistics.median(self.predicted)
        result |= {
            "steps": count,
            "seconds": each,
            "normalised_seconds": normalised,
            "median_seconds": statistics.median(each),
            "median_normalised_seconds": statistics.median(normalised),
            "spread": spread(each),
            "read_bytes": self.read_bytes / steps,
            "write_bytes": self.write_bytes / steps,
            "step_peak_rss": max(self.peak_rss, result.get("step_peak_rss", 0)),
            "step_peak_device": max(self.peak_device, result.get("step_peak_device", 0)),
        }


def difference(losses: Sequence[float], correct: Sequence[float]) -> float:
    """The largest relative difference; infinite where one is not finite."""
    pairs = list(zip(losses, correct, strict=True))
    return max((abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in pairs), default=0.0)
