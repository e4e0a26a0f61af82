"""again: measure what the pages show once more, all of it by one command, and write their tables and figures.

    make tables                                     # all that there is: a day on 2 cores, with nothing else on them
    python -m benchmarks.again ssd 'race-110m*'     # these results alone, by their names in benchmarks/results
    python -m benchmarks.again --list               # what makes which of them
    python -m benchmarks.again --write              # nothing is measured: the pages, from the results that are there

What fails is told at the end, and the others are measured all the same; a result that failed is as it was. `make zoo`
and `make gpu` have environments, or a machine, of their own.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.common import RESULTS, ROOT

SLOWED = "--drive-bytes-per-second 200e6"
RACE = "race.race --rounds 1 --again"
CHOSEN = "chosen --rounds 2 --again"
PEERS = "plain,plain/recompute=none/compile=blocks,zero-infinity"
OURS = "vertical/ssd/inductor,vertical/half/inductor,vertical/host/inductor"
BOTH_WAYS = "zero-infinity,zero-infinity/parameters=cpu,vertical/ssd/inductor,vertical/parameters/inductor"
LATE = "vertical/ssd/inductor,vertical/ssd/inductor/alpha=0.3,vertical/ssd/inductor/alpha=1"
DRIVE_BINDS = "--vocabulary 1024 --sequence 16 --micro-batches 1"
RECOMPUTED = "tiers --compare recompute --vocabulary 50257 --micro-batches 8"

COMMANDS: Mapping[str, Sequence[str]] = {  # of each file of results, what follows `python -m benchmarks.`
    "step-cpu": ["step --compiler eager inductor"],
    "tiers": ["tiers --micro-batches 1 4 16"],
    "tiers-io-bound": [f"tiers --layers 24 {DRIVE_BINDS} --rounds 2 --steps 3"],
    "durable": [
        "tiers --compare durability --hidden 256 --vocabulary 1024 --sequence 128 --micro-batches 4 --rounds 20"
    ],
    "durable-io-bound": [f"tiers --compare durability --layers 12 {DRIVE_BINDS} --rounds 8"],
    "masters": [
        "tiers --compare masters --precision bf16 --layers 16 --sequence 16 --micro-batches 1 2 --rounds 7 --steps 2"
    ],
    "recompute-110m-eager": [f"{RECOMPUTED} --layers 12 --rounds 5"],
    "recompute-110m-compiled": [f"{RECOMPUTED} --layers 12 --rounds 5 --compiler inductor"],
    "recompute-350m-eager": [f"{RECOMPUTED} --layers 24 --hidden 1024"],
    "recompute-350m-compiled": [f"{RECOMPUTED} --layers 24 --hidden 1024 --compiler inductor"],
    "checksums": ["checksums --rounds 9 --request-mib 128 --requests 2"],
    "ssd": ["ssd --request-mib 256 --requests 4 --rounds 7"],
    "ssd-pages": ["ssd --request-mib 64 --requests 8 --rounds 7 --pages"],
    "ssd-sizes": ["ssd --request-mib 64 --requests 8 --rounds 7 --sizes"],
    "optimizer": ["optimizer"],
    "optimizer-passive": ["optimizer --passive"],
    "first_step": ["first_step"],
    "first_step-gpt2": ["first_step --size gpt2 --threads 2"],
    "compilation-cpu": ["compilation"],
    "memory-gpt2-medium": ["memory --host-memory 1GiB"],
    "memory-gpt2-xl": ["memory --size gpt2-xl --precision bf16 --host-memory 6GiB"],
    "memory-qwen3-4b": ["memory --config benchmarks/models/qwen3-4b.json --host-memory 8GiB"],
    "pieces": ["pieces --tokens 8192"],
    "pieces-layer": ["pieces --unit layer --tokens 32768 --vocabulary 1024 --threads 1 --exact"],
    "pieces-experts": ["pieces --unit layer --experts 8 --width 512 --tokens 8192 --vocabulary 1024"],
    "frozen": [f"frozen {SLOWED}"],
    "states": ["states"],
    "clipping": ["clipping shares", "clipping times", "clipping simulated"],
    "prediction": ["prediction"],
    "prediction-saved": ["prediction --sizes middle large --micro-batches 1 4 16 --steps 2"],
    "race-110m": [f"{RACE} --preset 110m --micro-batches 1 16 --round-seconds 20 --contestants {PEERS},{OURS}"],
    "race-110m-slow": [
        f"{RACE} --preset 110m --micro-batches 1 2 4 8 16 --round-seconds 16 {SLOWED}"
        f" --contestants plain,{BOTH_WAYS},vertical/host/inductor"
    ],
    "race-110m-paper": [
        f"{RACE} --preset 110m --micro-batches 1 2 4 8 16 --round-seconds 8 --drive-bytes-per-second 80e6"
        " --contestants plain,zero-infinity,vertical/ssd/inductor,vertical/host/inductor"
    ],
    "race-350m": [f"{RACE} --preset 350m --micro-batches 16 --contestants {PEERS},vertical/quarter/inductor"],
    "race-alpha": [f"{RACE} --preset 110m --micro-batches 4 --round-seconds 16 {SLOWED} --contestants plain,{LATE}"],
    "race-25m-2-ranks": [
        f"{RACE} --ranks 2 --preset 25m --micro-batches 1 8 --round-seconds 2"
        " --contestants plain,fsdp2,zero-infinity,vertical/ssd/eager,vertical/ssd/inductor"
    ],
    "race-orders": ["race.orders --preset 25m --minutes 10 --rounds 3 --again"],
    "race-curves": ["race.curves"],
    "chosen-slow": [f"{CHOSEN} --preset 25m --micro-batches 1 4 16 --round-seconds 4 {SLOWED}"],
    "chosen-free": [f"{CHOSEN} --preset 25m --micro-batches 4 --compilers inductor --round-seconds 4"],
    "chosen-110m-free": [
        f"{CHOSEN} --preset 110m --micro-batches 1 2 --compilers inductor --round-seconds 5 --final-rounds 6"
    ],
    "chosen-110m-slow": [
        f"{CHOSEN} --preset 110m --micro-batches 4 --compilers inductor --round-seconds 8 --final-rounds 4 {SLOWED}"
    ],
    "paper": ["figures sweep", "figures orders", "figures credit"],
    "cluster": ["cluster"],
    "saved": ["saved"],
    "wear": ["wear"],
}
IN_OTHER_ENVIRONMENTS = {"zoo": "make zoo", "gpu-h200": "make gpu"}  # on a machine that has one
WRITES_ITS_OWN = ("cluster", "figures", "saved")  # they know their file
PAGES = ("race.tables --write", "race.draw", "figures draw", "picture")
FORGOTTEN = ("paper",)  # keeps what it has found before


def commands_of(name: str) -> list[list[str]]:
    """The arguments of Python that make a file of results, to be run in the checkout's root."""
    return [_line(each, RESULTS / f"{name}.json") for each in COMMANDS[name]]


def _line(words: str, output: Path | None = None) -> list[str]:
    module, *arguments = shlex.split(words)
    if output is not None and module not in WRITES_ITS_OWN:
        arguments += ["--output", str(output.relative_to(ROOT))]
    return ["-m", f"benchmarks.{module}", *arguments]


def measure(name: str) -> bool:
    """Whether all of a result's commands ended well. Where one does not, the file is as it was."""
    path = RESULTS / f"{name}.json"
    before = path.read_bytes() if path.exists() else None
    if name in FORGOTTEN:
        path.unlink(missing_ok=True)
    if all(_run(command) for command in commands_of(name)):
        return True
    if before is not None:
        path.write_bytes(before)
    return False


def _run(command: list[str]) -> bool:
    print(shlex.join(["python", *command]), flush=True)
    return subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["*"], help="of results; * and ? stand for any letters and one")
    parser.add_argument("--list", action="store_true", help="print the commands, and run nothing")
    parser.add_argument("--write", action="store_true", help="measure nothing: write tables and figures alone")
    arguments = parser.parse_args()
    names = [name for name in COMMANDS if any(fnmatch(name, wanted) for wanted in arguments.names)]
    if not names:
        parser.error(f"no results of this name; there are {', '.join(COMMANDS)}")
    if arguments.list:
        for name in names:
            print(f"{name}:", *(shlex.join(["python", *line]) for line in commands_of(name)), sep="\n    ")
        print("in environments of their own:", *IN_OTHER_ENVIRONMENTS.values(), sep="\n    ")
        return
    failed = [] if arguments.write else [name for name in names if not measure(name)]
    failed += [words for words in PAGES if not _run(_line(words))]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
