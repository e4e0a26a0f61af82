"""Functions that no cache has are compiled by several processes, and whatever becomes of these, all are compiled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import figures
import pytest

from gs_compile.codegen import side_by_side
from gs_compile.codegen.side_by_side import Wanted, compile_all
from gs_compile.planner.measure.shipped import ENVIRONMENT as MACHINE

pytestmark = pytest.mark.skipif(side_by_side.sys.platform != "linux", reason="processes are forked on Linux alone")


@dataclass(eq=False)
class Code:
    """Writes down, in a folder that all processes see, who compiles what; `of_forks` is called in forks alone."""

    folder: Path
    own: int = field(default_factory=os.getpid)
    compiles_in_forks: bool = True
    of_forks: object = staticmethod(lambda name: None)
    done: list = field(default_factory=list)

    def has_function(self, name, level):
        return (name, level) in self.done

    def function(self, name, level):
        is_fork = os.getpid() != self.own
        (self.folder / f"{name}{level} {'fork' if is_fork else 'own'}").write_text(str(os.getpid()))
        if is_fork:
            self.of_forks(name)
        self.done.append((name, level))

    def of(self, who):
        return {path.name.split()[0] for path in self.folder.iterdir() if path.name.endswith(who)}


@pytest.fixture
def cold(monkeypatch):
    """Each graph misses the cache; three processes may run."""
    misses = iter(range(1000))
    monkeypatch.setattr(side_by_side, "num_cache_misses", lambda: next(misses))
    monkeypatch.setattr(side_by_side, "_most_processes", lambda: 3)


NAMES = [f"f{number}" for number in range(6)]


def wanted(code):
    return [Wanted(code, name, 0) for name in NAMES]


@pytest.mark.usefixtures("cold")
def test_forks_compile_what_this_process_takes_from_the_cache_then(tmp_path):
    code = Code(tmp_path)
    compile_all([*wanted(code), Wanted(code, NAMES[2], 0)])
    assert len(code.done) == len(NAMES)
    assert code.of("own") == {f"{name}0" for name in NAMES}
    assert code.of("fork") == {"f20", "f50", "f30"}  # every third after the first is this process's
    forks = {path.read_text() for path in tmp_path.glob("*fork")}
    assert len(forks) == 2
    compile_all(wanted(code))
    assert len(code.done) == len(NAMES)


@pytest.mark.usefixtures("cold")
def test_one_function_is_compiled_here(tmp_path):
    code = Code(tmp_path)
    compile_all(wanted(code)[:1])
    assert (code.of("own"), code.of("fork")) == ({"f00"}, set())


@pytest.mark.parametrize("hit", [True, False])
def test_nothing_is_forked_for_what_is_in_the_cache_or_runs_on_the_way(tmp_path, monkeypatch, hit):
    misses = iter(range(1000))
    monkeypatch.setattr(side_by_side, "num_cache_misses", lambda: 0 if hit else next(misses))
    monkeypatch.setattr(side_by_side, "_most_processes", lambda: 3)
    monkeypatch.setattr(side_by_side, "_fork", lambda share: pytest.fail("forked"))
    code = Code(tmp_path, compiles_in_forks=hit)
    compile_all(wanted(code))
    assert len(code.done) == len(NAMES)


def children():
    """The processes that this one has started; ranks of other tests may be among them."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("way", ["dies", "fails", "lasts"])
def test_a_fork_that_does_not_help_costs_time_alone(tmp_path, monkeypatch, capfd, way):
    monkeypatch.setattr(side_by_side, "PATIENCE", (0.2, 0.0))

    def of_forks(name):
        if way == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "fails":
            raise RuntimeError("in a fork")
        time.sleep(1000)

    code, before = Code(tmp_path, of_forks=of_forks), children()
    compile_all(wanted(code))
    assert sorted(code.done) == [(name, 0) for name in NAMES]
    assert children() == before
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("cold")
def test_where_this_process_fails_no_fork_is_left(tmp_path):
    code, before = Code(tmp_path, of_forks=lambda name: time.sleep(1000)), children()
    code.function = lambda name, level: (
        1 / 0 if name == "f1" and os.getpid() == code.own else Code.function(code, name, level)
    )
    with pytest.raises(ZeroDivisionError):
        compile_all(wanted(code))
    assert children() == before


def test_no_fork_outlives_a_process_that_is_killed(tmp_path):
    """It holds the locks of the process on its storage, which the next run waits for."""
    forked = tmp_path / "forked"

    def of_forks(name):
        forked.write_text(str(os.getpid()))
        time.sleep(1000)

    middle = os.fork()
    if middle == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        code = Code(tmp_path, of_forks=of_forks)
        with side_by_side._forked([wanted(code)]) as wait:
            wait()
        os._exit(0)
    until(lambda: forked.exists() and forked.read_text())
    os.kill(middle, signal.SIGKILL)
    os.waitpid(middle, 0)
    until(lambda: has_ended(int(forked.read_text())))


def test_a_fork_that_is_interrupted_as_it_begins_ends(tmp_path):
    """Fault: it went on behind the interrupt, with the script of the process that it is a fork of."""
    middle, fork = os.fork(), os.fork
    if middle == 0:

        def interrupted():
            if (pid := fork()) == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return pid

        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.fork = interrupted
            os.waitpid(side_by_side._fork([]), 0)
        except KeyboardInterrupt:
            (tmp_path / "went on").touch()
        finally:
            os._exit(0)
    os.waitpid(middle, 0)
    assert not (tmp_path / "went on").exists()


def has_ended(pid):
    """Also where nobody has asked for its exit status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until(holds):
    end = time.monotonic() + 240
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


COLD = """
import torch
import gs_compile
from gs_compile.capture.inductor import num_cache_misses
from gs_compile.codegen import side_by_side
from torch._dynamo.utils import counters

side_by_side._most_processes = lambda: 3
forks, fork = [], side_by_side._fork
side_by_side._fork = lambda share: forks.append(len(share)) or fork(share)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)

    def forward(self, x):
        return x + torch.nn.functional.gelu(self.linear(x))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x):
        return self.blocks(x)


model = Model()
optimizer = gs_compile.SGD(model.parameters(), lr=0.1)
expert = {"compiler": "inductor", "recompute": "all"}
model.compile(backend="greedysnake", options={"outputs": "all", "storage": STORAGE, "expert": expert})
model(torch.randn(2, 8, 32)).square().mean().backward()
optimizer.step()
print(len(forks), sum(forks), num_cache_misses(), counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_what_forks_have_compiled_is_in_inductors_cache(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), MACHINE: str(figures.MACHINE)}
    program = COLD.replace("STORAGE", repr(str(tmp_path / "storage")))
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=600
    )
    num_forks, of_forks, misses, hits = map(int, ran.stdout.split()[-4:])
    assert num_forks == 2
    assert hits == of_forks, "each that a fork has compiled is found"
    assert misses >= 2, "and this process has compiled its own part"


@pytest.mark.usefixtures("cold")
def test_where_no_process_can_be_forked_this_one_compiles_all(tmp_path, monkeypatch):
    def full(share):
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(side_by_side, "_fork", full)
    code = Code(tmp_path)
    compile_all(wanted(code))
    assert len(code.done) == len(NAMES)
