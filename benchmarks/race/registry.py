"""registry: what a contestant's name means: which program runs, in which environment, with which settings.

plain                            a peer: the module of that name
plain/compile=blocks             the same with a setting of its own; values are JSON, or else text
vertical/ssd/eager               ours: schedule, home of the data, compiler of the layers
vertical/half/inductor           planned, with half of the bytes of parameters and states as `host_memory`
vertical/ssd/eager/alpha=0.3     the same with a setting of its own
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.race.protocol import ENVIRONMENT, Case
from benchmarks.race.worker import Team, Worker

PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PEERS = {"plain": "plain", "fsdp2": "fsdp2", "zero-infinity": "zero_infinity"}  # name: module
SCHEDULES = ("vertical", "horizontal", "single", "lifetime")
PLAIN = "plain"  # whose losses are right, and whose seconds are the common measure


@dataclass(frozen=True)
class Entry:
    """One name of the registry."""

    name: str
    module: str
    settings: dict[str, Any]

    @classmethod
    def parse(cls, name: str) -> Entry:
        """Raises ValueError for a name that is none."""
        words = [word for word in name.split("/") if "=" not in word]
        settings = dict(_setting(word) for word in name.split("/") if "=" in word)
        if words[0] in PEERS and len(words) == 1:
            return cls(name, f"benchmarks.race.{PEERS[words[0]]}", settings)
        if words[0] in SCHEDULES and len(words) == 3:
            ours = dict(zip(("schedule", "home", "compiler"), words, strict=True))
            return cls(name, "benchmarks.race.ours", {**ours, **settings})
        raise ValueError(
            f"no contestant is called {name}: there are {', '.join(PEERS)} and SCHEDULE/HOME/COMPILER, such as "
            f"vertical/ssd/eager, with a schedule of {', '.join(SCHEDULES)}"
        )

    @property
    def is_ours(self) -> bool:
        return self.module.endswith(".ours")

    def start(
        self,
        case: Case,
        storage: Path,
        *,
        peers_python: Path = PEERS_PYTHON,
        machine: Path | None,
        environment: Mapping[str, str] | None = None,
    ) -> Worker | Team:
        """Its process, or one for each rank, with a directory and a log of its own in `storage`.

        Ours plan with the profile in `machine`.
        """
        folder = storage / self.name.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        python = sys.executable if self.is_ours or not peers_python.exists() else str(peers_python)
        arguments = ["--case", case.json(), "--storage", str(folder), "--settings", json.dumps(self.settings)]
        given = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), **(environment or {})}
        if machine is not None:
            given["GREEDYSNAKE_MACHINE"] = str(machine)
        command = [python, "-m", self.module, *arguments]
        if case.ranks == 1 or self.name.split("/")[0] == PLAIN:
            return Worker(self.name, command, log=folder.with_suffix(".log"), environment=given)
        given |= {"WORLD_SIZE": str(case.ranks), **meeting_place()}
        given["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // case.ranks))
        return Team(
            [
                Worker(
                    self.name,
                    command,
                    log=folder.with_suffix(f".{rank}.log"),
                    environment={**given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
                for rank in range(case.ranks)
            ]
        )


def meeting_place() -> dict[str, str]:
    """Where ranks on this machine meet, for torch.distributed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def _setting(word: str) -> tuple[str, Any]:
    key, _, text = word.partition("=")
    try:
        return key, json.loads(text)
    except ValueError:
        return key, text
