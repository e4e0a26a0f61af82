"""fit: how fast a machine trains a model: in full, by adapters, and by adapters over encoded matrices.

Answers come from the linear program alone (`lp.search`): no step is lowered and simulated, as `plan` does. Its seconds
are a lower bound, which a simulated step exceeds by up to an eighth.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gs_compile.errors import CaptureError, NoFitError, PlanError
from gs_compile.planner.in_pieces import smallest
from gs_compile.planner.lp.counting import host_classes
from gs_compile.planner.lp.solve import Solution
from gs_compile.planner.plan import Planner, planner_of
from gs_compile.planner.problem import Problem
from gs_compile.planner.request import Request
from gs_compile.planner.step_plan import SECONDS_PER_DAY

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig

RANK = 16  # of adapters, where none is given
MOST_SAMPLES = 256  # of a micro-batch


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One way of training a model on a machine.

    missing: why it does not fit, and what would; "": it fits. batch_size: samples of a step of all `ranks`. peaks: by
    tier, the most bytes of a step of one rank; written_nbytes: to SSD in such a step. largest_micro_batch: in samples,
    micro_batch_size times a power of two. longest: tokens of the longest single sample that fits, the request's times a
    power of two; None: not asked for.
    """

    way: str
    missing: str = ""
    ranks: int = 1
    batch_size: int = 0
    micro_batch_size: int = 0
    tokens_per_second: float = 0.0
    seconds: float = 0.0
    peaks: Mapping[str, int] = field(default_factory=dict)
    written_nbytes: int = 0
    rated_nbytes: int = 0
    largest_micro_batch: int = 0
    longest: int | None = None

    @property
    def drive_days(self) -> float | None:
        """The days of training for which the drives are rated; None: they are not written, or not rated."""
        if not (self.written_nbytes and self.rated_nbytes):
            return None
        return self.rated_nbytes / (self.written_nbytes / self.seconds) / SECONDS_PER_DAY

    def hours(self, tokens: float) -> float:
        return tokens / self.tokens_per_second / 3600

    def written_for(self, tokens: float) -> float:
        """The bytes that training on so many tokens writes to SSD."""
        return self.written_nbytes * tokens / (self.tokens_per_second * self.seconds)


def fit(
    model: str | Path | PretrainedConfig,
    request: Request | None = None,
    *,
    longest: bool = False,
    planners: list[Planner] | None = None,
    keeps: bool = False,
    **settings: Any,
) -> list[Fit]:
    """Each way of training a model, which is given as for `plan`; request.lora, frozen: the adapters' rank and codec.

    planners: of the same model, whose captures are reused; new ones are added. keeps: see `planner_of`.

    Raises `PlanError` if model or request are wrong. A way that does not fit, or cannot be planned, says so.
    """
    request = Request(**settings) if request is None else replace(request, **settings)
    fits: list[Fit] = []
    planners = [] if planners is None else planners
    for way, asked in ways(request):
        planners.append(planner_of(model, asked, planners, keeps=keeps))
        try:
            fits.append(_fit(way, planners[-1], longest=longest))
        except (CaptureError, PlanError) as error:
            if not asked.lora:
                raise
            fits.append(Fit(way=way, missing=error.message))
    return fits


def longest_sequence(model: str | Path | PretrainedConfig, request: Request, *, keeps: bool = False) -> int:
    """The tokens of the longest sample that fits: the request's own, for which there is a plan, times a power of two.
    keeps: see `planner_of`.

    Raises `PlanError` if model or request are wrong.
    """
    with suppress(NoFitError):  # by the linear program: then no longer one fits
        planner, found = _searched(planner_of(model, request, keeps=keeps))
        return _longest(planner, _largest(planner, found.workload.micro_batch_size))
    return request.sequence


def ways(request: Request) -> Iterator[tuple[str, Request]]:
    rank, codec = request.lora or RANK, request.frozen or "nf4"
    yield "in full", replace(request, lora=None, frozen=None)
    yield f"LoRA of rank {rank}", replace(request, lora=rank, frozen=None)
    yield f"the same over {codec}", replace(request, lora=rank, frozen=codec)


def _searched(planner: Planner) -> tuple[Planner, Problem]:
    """The planner and the problem for which the linear program finds a solution."""
    return planner.or_storing_gradients(lambda each: (each, each.searched()[0]))


def _fit(way: str, planner: Planner, *, longest: bool) -> Fit:
    try:
        planner, problem = _searched(planner)
    except NoFitError as error:
        return Fit(way=way, missing=error.message)
    best = _in_memory(problem)
    peaks, written = problem.needs(best)
    size, number = problem.workload.micro_batch_size, best.num_micro_batches
    largest = _largest(planner, size)
    return Fit(
        way=way,
        ranks=planner.request.ranks,
        batch_size=planner.request.ranks * size * number,
        micro_batch_size=size,
        tokens_per_second=problem.workload.tokens * best.throughput,
        seconds=best.seconds,
        peaks=peaks,
        written_nbytes=written,
        rated_nbytes=problem.profile.ssd_rated_nbytes,
        largest_micro_batch=largest,
        longest=_longest(planner, largest) if longest else None,
    )


def _in_memory(problem: Problem) -> Solution:
    """The best solution; with everything in host memory if a run would store it there. (The linear program would put
    checkpoints on SSD, which saves a copy.)
    """
    best = problem.best
    if problem.profile.separate or problem.request.ratios.given():
        return best
    everything = dict.fromkeys(host_classes(problem.builder.layout), 1.0)
    ratios = tuple(replace(each, **everything) for each in best.decision.ratios)
    found = problem.at(best.num_micro_batches).valued(replace(best.decision, ratios=ratios))
    return found if problem.needs(found)[0]["host"] <= problem.budgets.host_nbytes else best


def _largest(planner: Planner, size: int) -> int:
    """The samples of the largest micro-batch that fits: `size`, which fits, times a power of two."""
    sizes = [size << times for times in range(1, MOST_SAMPLES.bit_length()) if size << times <= MOST_SAMPLES]
    return ([size, *sizes])[bisect_left(sizes, True, key=lambda each: not does_fit(planner, each))]


def _longest(planner: Planner, largest: int) -> int:
    """The longest sequence of which one sample fits. A first guess: as many tokens as in the largest micro-batch."""
    shortest = planner.request.sequence
    for length in (shortest << times for times in range(largest.bit_length() - 1, 0, -1)):
        with suppress(PlanError):  # longer than the model's positions
            if does_fit(planner.asked(sequence=length), 1):
                return length
    return shortest


def does_fit(planner: Planner, samples: int) -> bool:
    """Whether a micro-batch of so many samples fits, with updates and layers in pieces if necessary."""
    problem = planner.problem(samples).at(1)
    return problem.does_fit() or smallest(problem).does_fit()
