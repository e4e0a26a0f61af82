"""chosen: the planner's choice beside placements that are made by hand within the same memory, and with other budgets.

    python -m benchmarks.chosen --preset 25m --drive-bytes-per-second 200e6 --output benchmarks/results/chosen-slow.json

A race (`benchmarks.race`) of ours against itself. `host_memory` is half of the bytes of parameters and states, for the
choice and for all that is set by hand: everything on SSD, half and half, everything in host memory where it fits, an
alpha, saved activations or none. Budgets of 0.3 to 1.5 of these bytes follow: a larger one may be no slower.
Whoever is close to the fastest after the first rounds races on: what few rounds do not tell apart, more do.

    python -m benchmarks.race.tables        # prints what was found
"""

from __future__ import annotations

import argparse
from itertools import pairwise

from benchmarks.race.race import add_race_arguments, raced
from benchmarks.race.registry import PLAIN
from benchmarks.race.run import Finals

MEMORY = 0.5  # of the bytes of parameters and states
BUDGETS = (0.3, MEMORY, 0.75, 1.5)
HOMES, ALPHAS, RECOMPUTES = ("ssd", "mixed", "host"), (0, 0.3, 1), ("all", "none")
MOST_SLOWER, MOST_SLOWER_WITH_MORE = 1.02, 1.01  # times the fastest by hand, and the next smaller budget


def planned(compiler: str, memory: float = MEMORY) -> str:
    """The contestant that the planner places."""
    return f"vertical/{memory}/{compiler}"


def by_hand(compiler: str) -> tuple[str, ...]:
    """The contestants that it must not lose to."""
    placed = (f"vertical/{home}/{compiler}/memory={MEMORY}" for home in HOMES)
    late = (f"{planned(compiler)}/alpha={alpha}" for alpha in ALPHAS)
    saving = (f"{planned(compiler)}/recompute={word}" for word in RECOMPUTES)
    return (*placed, *late, *saving)


def contestants(compilers: list[str]) -> list[str]:
    """All of them, with plain PyTorch, whose losses are right."""
    ours = ((*(planned(each, part) for part in BUDGETS), *by_hand(each)) for each in compilers)
    return [PLAIN, *(name for names in ours for name in names)]


def rivals(compiler: str) -> list[tuple[str, ...]]:
    """Who is compared with whom: the choice with all by hand, and each budget with the next smaller one."""
    return [(planned(compiler), *by_hand(compiler)), *pairwise(planned(compiler, part) for part in BUDGETS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_race_arguments(parser, [1, 2, 4, 16])
    parser.add_argument("--compilers", nargs="+", default=["eager", "inductor"], choices=["eager", "inductor"])
    parser.add_argument("--final-rounds", type=int, default=6, help="more, of rivals that are close")
    arguments = parser.parse_args()
    pairs = [names for compiler in arguments.compilers for names in rivals(compiler)]
    raced(arguments, contestants(arguments.compilers), Finals(pairs, arguments.final_rounds))


if __name__ == "__main__":
    main()
