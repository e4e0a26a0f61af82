"""The race: a tiny one with real contestants, its tables and figures; its sums on numbers made up."""

from __future__ import annotations

import json
import sys
import time
from queue import Queue
from threading import Thread
from types import SimpleNamespace

import pytest

from benchmarks.common import save
from benchmarks.race import draw, measures, ours, tables
from benchmarks.race.measures import add_bounds
from benchmarks.race.ours import GreedySnake
from benchmarks.race.protocol import Case, _serve
from benchmarks.race.registry import PEERS_PYTHON, Entry
from benchmarks.race.run import NO_FINALS, Finals, Run, Settings
from benchmarks.race.settings import MOST_STEPS, load
from benchmarks.race.worker import Worker, WorkerError
from benchmarks.slow_drive import AS_IT_IS, bounded
from gs_compile.planner.measure.profile import Profile

TINY = Case(layers=2, hidden=64, heads=2, vocabulary=128, sequence=16, micro_batches=2)
OURS = "vertical/ssd/eager/recompute=all"  # for which no code is timed
NAMES = ("plain", OURS)


@pytest.fixture
def machine(request):
    return Profile.load(request.path.parent / "machine.json")


def raced(names, finals=NO_FINALS, **settings):
    given = {"rounds": 1, "round_seconds": 0.1, "drive_seconds": 0, **settings}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(measures, "ROWS", 64)  # of a product that is timed beside each turn
        return Run(TINY, [Entry.parse(name) for name in names], Settings(**given), finals).run()


class Here:
    """A contestant in a thread of this process, asked and answering as a `Worker`."""

    def __init__(self, contestant):
        self._told, self._answers = Queue(), Queue()
        answers = SimpleNamespace(write=lambda line: self._answers.put(json.loads(line)))
        self._thread = Thread(target=_serve, args=(contestant, iter(self._told.get, None), answers))
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def ready(self, timeout):
        return self._answers.get(timeout=timeout)

    def ask(self, question, timeout):
        self._told.put(question)
        return self.ready(timeout)

    def close(self):
        self._told.put("quit")
        self._thread.join()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A race of plain against ours, both in this environment; plain in a process of its own, as all have."""
    start = Entry.start

    def started(entry, case, storage, **given):
        is_ours = entry.is_ours  # whose first capture in a process takes seconds
        return Here(GreedySnake(case, storage, entry.settings)) if is_ours else start(entry, case, storage, **given)

    settings = {"storage": tmp_path_factory.mktemp("race"), "peers_python": PEERS_PYTHON / "missing"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Entry, "start", started)
        return raced(NAMES, rounds=2, round_seconds=60, drive_seconds=0.02, **settings)


def test_a_race(run):
    plain, ours = (run["contestants"][name] for name in NAMES)
    assert plain["verdict"] == ours["verdict"] == "right"
    assert 0 <= ours["difference"] < 1e-5
    assert ours["steps"] == plain["steps"] == MOST_STEPS
    assert len(run["matmul_seconds"]) == 8  # before and after each turn
    assert len(run["drive_samples"]) == 3  # before and after each round
    for name, rate in run["drive"].items():
        assert rate == sorted(each[name] for each in run["drive_samples"])[1] > 0
    assert ours["write_bytes"] > 0 < ours["median_seconds"]
    assert ours["step_peak_rss"] > 0 < ours["times_plain"]
    assert "on host" in ours["describe"]["describe"]
    assert run["complete"]
    assert run["groups"] == [[*NAMES]]


def test_a_step_is_raced_once(run):
    described = run["contestants"][OURS]["describe"]
    again = Run(TINY, [], Settings(), results=run["contestants"])
    assert again._same_step(described) == OURS
    assert again._same_step({**described, "program": "another"}) is None
    assert again._same_step(None) is None  # plain PyTorch has no step program


def test_one_program_by_two_compilers_is_two_steps(monkeypatch):
    """Fault: with both compilers in a race, one of them was not measured."""
    monkeypatch.setattr(ours.gs_compile, "inspect", lambda model: SimpleNamespace(programs=["x"], tiers=""))
    found = set()
    for settings in ({}, {"compiler": "eager"}, {"compiler": "inductor"}):
        contestant = object.__new__(GreedySnake)
        contestant.model, contestant.settings = None, settings
        found.add(contestant._describe(0.0)["program"])
    assert len(found) == 2


def test_its_table_and_figures(run, machine, tmp_path, monkeypatch):
    run["contestants"]["fsdp2"] = {"verdict": "not raced: does not run here: no drive", "settings": {}}
    add_bounds(run["contestants"], machine)
    result = {
        "setting": {**vars(TINY), "micro_batches": None},
        "heats": [run],
        "commands": ["python -m benchmarks.race.race"],
        "machine": {"device": "cpu", "cores": 2, "processor": "one", "memory_bytes": 2**30, "date": "today"},
    }
    save(result, tmp_path / "race-110m.json")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    found = tables.filled("<!-- table: race-110m -->\nold\n<!-- end -->\n<!-- table: race-350m -->\n<!-- end -->")
    assert f"| 2 | `{OURS}` |" in found
    assert "s: `" in found  # what its steps waited for
    assert "n = 2, `fsdp2`: not raced: does not run here: no drive" in found
    assert "old" not in found
    assert found.endswith(f"<!-- table: race-350m -->\n{tables.MISSING}\n<!-- end -->")
    draw.contestants(result, tmp_path / "figure.svg")
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def test_results_are_gone_on_with(tmp_path):
    path = tmp_path / "results.json"
    save({"setting": {"layers": 2}, "heats": [1]}, path)
    assert load(path, {"setting": {"layers": 2}}, again=False)["heats"] == [1]
    assert load(path, {"setting": {"layers": 3}}, again=True) == {"setting": {"layers": 3}}
    with pytest.raises(SystemExit, match="is of another case"):
        load(path, {"setting": {"layers": 3}}, again=False)


def test_names():
    ours = Entry.parse("vertical/half/inductor/alpha=0.3")
    assert (ours.is_ours, ours.settings["home"], ours.settings["alpha"]) == (True, "half", 0.3)
    assert Entry.parse("plain/compile=blocks").settings == {"compile": "blocks"}
    for name in ("plane", "vertical/ssd", "plain/ssd/eager"):
        with pytest.raises(ValueError, match=f"no contestant is called {name}"):
            Entry.parse(name)


@pytest.mark.parametrize(
    ("script", "seconds", "complaint"),
    [
        ("raise SystemExit('no such thing')", 60.0, "ended with 1.*no such thing"),
        ("import time; time.sleep(60)", 0.5, "no answer in time"),
        ("""print('{"cannot": "x", "why": "no drive"}')""", 60.0, "does not run here: no drive"),
        ("""print('a word');print('{"error": "ValueError", "where": "build"}')""", 60.0, "failed at build: ValueError"),
    ],
)
def test_a_contestant_that_fails_says_why(tmp_path, script, seconds, complaint):
    with Worker("it", [sys.executable, "-c", script], log=tmp_path / "log") as worker:
        with pytest.raises(WorkerError, match=f"(?s){complaint}"):
            worker.ready(seconds)
        worker.close()


SCRIPT = """
import json, sys
print(json.dumps({"ready": "it"}), flush=True)
for line in sys.stdin:
    word, *numbers = line.split()
    if word == "quit":
        break
    count = int(numbers[1]) if word == "steps" else 1
    if word in ("step", "steps"):
        answer = {"seconds": 0.5 * count, "loss": LOSS, "losses": [LOSS] * count}
    else:
        answer = {"peak_rss": 1, "peak_device": 0, "read_bytes": 0, "write_bytes": 0}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def scripted(monkeypatch):
    """Contestants that only answer: fsdp2 with the losses of another model."""

    def start(entry, case, storage, **_):
        script = SCRIPT.replace("LOSS", "2.1" if entry.name == "fsdp2" else "2.0")
        log = storage / f"{entry.name.replace('/', '-')}.log"
        return Worker(entry.name, [sys.executable, "-c", script], log=log)

    monkeypatch.setattr(Entry, "start", start)


@pytest.mark.parametrize("start_together", [False, True])
def test_who_is_wrong_is_not_timed(scripted, start_together):
    found = raced(("plain", "fsdp2", "zero-infinity"), start_together=start_together)
    each = found["contestants"]
    assert each["fsdp2"]["verdict"] == "wrong: its losses differ from plain's by 5.0e-02"
    assert "median_seconds" not in each["fsdp2"]
    assert each["zero-infinity"]["verdict"] == "right"
    assert each["zero-infinity"]["times_plain"] == 1.0
    assert found["groups"] == [["plain", "zero-infinity"]]


def test_whoever_has_started_is_timed_once(scripted, monkeypatch):
    monkeypatch.setattr(Settings, "left", 1.0)  # seconds; a round takes two
    found = raced(("plain", "zero-infinity"), rounds=3)
    assert [len(each["seconds"]) for each in found["contestants"].values()] == [1, 1]


def test_rivals_that_are_close_race_on(scripted):
    names = "plain", "zero-infinity", "zero-infinity/parameters=cpu", "fsdp2"
    found = raced(names, Finals([names[1:]], 2), rounds=2)["contestants"]
    assert [len(each.get("seconds", ())) for each in found.values()] == [2, 4, 4, 0]
    assert found["zero-infinity"]["times_plain"] == 1.0  # in the rounds that both were in


def test_who_races_on():
    finals = Finals([("a", "b", "c"), ("c", "d"), ("e", "out")], 1)
    assert finals.of({"a": 1.0, "b": 1.08, "c": 2.0, "d": 2.1, "e": 1.0}) == {"a", "b", "c", "d"}


def test_a_race_whose_time_is_up_says_so(scripted):
    found = raced(("plain", "zero-infinity"), deadline=time.monotonic())
    assert not found["complete"]
    assert all(each["verdict"] == "not raced: out of time" for each in found["contestants"].values())


def test_the_share_of_the_roofline(machine):
    def one(seconds, settings, nbytes=0.0):
        found = {"verdict": "right", "median_seconds": seconds, "settings": settings}
        return {**found, "read_bytes": nbytes, "write_bytes": 0.0}

    results = {
        "plain": one(2.0, {}),
        "plain/compile=blocks": one(1.9, {"compile": "blocks"}),
        "vertical/host/eager": one(2.2, {"compiler": "eager"}),
        "vertical/ssd/eager": one(2.5, {"compiler": "eager"}),
        "vertical/ssd/inductor": one(4.0, {"compiler": "inductor"}, machine.ssd_read_bytes_per_second * 3.8),
        "fsdp2": {"verdict": "not raced", "settings": {}},
        "vertical/host/eager/alpha=0": {**one(0.1, {"compiler": "eager"}), "verdict": "wrong: of its losses"},
    }
    add_bounds(results, machine)
    assert results["vertical/ssd/eager"]["share"] == pytest.approx(0.8)
    assert results["vertical/ssd/inductor"]["share"] == pytest.approx(0.95)
    assert results["plain"]["share"] == results["plain/compile=blocks"]["share"] == 1.0
    assert "share" not in results["fsdp2"]


def test_a_slowed_drive_is_as_fast_as_its_limit_where_that_binds():
    rates = {
        "ssd_read_bytes_per_second": 8e8,
        "ssd_read_mixed_bytes_per_second": 1.9e8,
        "read_compute_speed": 0.5,  # 400 MB/s
        "compute_read_speed": 0.9,
        "read_update_speed": 0.25,  # 200 MB/s
        "update_read_speed": 0.8,
        "ssd_write_bytes_per_second": 9e7,
        "write_compute_speed": 0.5,
        "compute_write_speed": 0.9,
        "write_update_speed": 0.5,
        "update_write_speed": 0.9,
    }
    left = {"ssd_read_bytes_per_second": 2e8, "read_compute_speed": 1.0, "compute_read_speed": pytest.approx(0.95)}
    left["read_update_speed"] = 1.0
    assert bounded(rates, (2e8, 1e8)) == {**rates, **left}
    left |= {"ssd_read_bytes_per_second": 6e8, "read_compute_speed": pytest.approx(2 / 3), "compute_read_speed": 0.9}
    left["read_update_speed"] = pytest.approx(1 / 3)
    assert bounded(rates, (6e8, 1e8)) == {**rates, **left}
    assert bounded(rates, AS_IT_IS.limits) == pytest.approx(rates)
