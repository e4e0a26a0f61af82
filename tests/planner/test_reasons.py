"""Reasons, of searches and solutions that are made up."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest
from planned import A100, gpt, ratios

from gs_compile.errors import NoFitError
from gs_compile.placement.placement import Decision, Layout, Placement
from gs_compile.planner.lp.search import Search
from gs_compile.planner.lp.solve import Solution
from gs_compile.planner.reasons import ADAPTERS, alternatives, binding, longer_life, notes
from gs_compile.planner.request import SECONDS_PER_YEAR, Request
from gs_compile.planner.step_plan import SECONDS_PER_DAY

WORKLOAD = gpt(4, 512, sequence=256, vocabulary=5000)
MACHINE = replace(A100, host_nbytes=64 * 2**30, device_nbytes=40 * 2**30)
BUDGETS = Request().budgets(MACHINE)


def solution(number, seconds, alpha=0.0, resident=0.0):
    return Solution(number, Decision(ratios=(ratios(resident, resident, resident),), alpha=alpha), seconds)


def found(*history):
    return Search(history[-1], tuple((each.num_micro_batches, each) for each in history))


class Faked(SimpleNamespace):
    """A problem whose linear program is `answer`, a function of the problem, the micro-batches and alpha."""

    @property
    def budgets(self):
        return self.request.budgets(self.profile, host_nbytes=self.host_nbytes, device_nbytes=self.device_nbytes)

    def of(self, workload=None, profile=None, **changes):
        changes |= {"workload": workload or self.workload, "profile": profile or self.profile}
        return Faked(**{**vars(self), **changes})

    def solved(self, number, alpha=None):
        return self.answer(self, number, alpha)

    def asked(self, request):
        return self.of(request=request)

    def at(self, number):
        return self.of(number=number)

    def updated_in(self, number):
        return self.of(most=self.most_in_pieces)

    @property
    def best(self):
        """With the smallest number of micro-batches of which drives do not have a step wait."""
        assert self.number == 0, "a larger batch may be found"
        self.tried.append(self.request)
        steps = (solution(number, number / 2) for number in range(1, self.most + 1))
        rate = self.budgets.wear_bytes_per_second
        for each in steps:
            if self.needs(each)[1] <= rate * each.seconds:
                return each
        raise NoFitError("nothing fits")


def problem(answer, *, machine=MACHINE, workload=WORKLOAD, **asked):
    known = {"host_nbytes": None, "device_nbytes": None}
    return Faked(answer=answer, profile=machine, workload=workload, request=Request(**asked), **known)


# What binds -----------------------------------------------------------------------------------------------------------


def test_more_of_each_resource_is_tried_alone():
    asked = {}

    def solved(richer, number, alpha):
        assert (number, alpha) == (4, 0.2)
        profile, budgets = richer.profile, richer.budgets
        if budgets.host_nbytes > BUDGETS.host_nbytes:
            asked["host"] = budgets.host_nbytes - BUDGETS.host_nbytes
            return solution(4, 0.8)
        if budgets.ssd_nbytes > BUDGETS.ssd_nbytes:
            asked["ssd"] = profile.ssd_write_mixed_bytes_per_second / A100.ssd_write_mixed_bytes_per_second
            return solution(4, 0.5)
        if budgets.device_nbytes > BUDGETS.device_nbytes:
            asked["device"] = budgets.device_nbytes - BUDGETS.device_nbytes
            return None
        if richer.workload.costs[0].forward_flops < WORKLOAD.costs[0].forward_flops:
            asked["code"] = WORKLOAD.costs[0].backward_flops / richer.workload.costs[0].backward_flops
            return solution(4, 0.95)
        return solution(4, 0.995 if profile.h2d_bytes_per_second > A100.h2d_bytes_per_second else 1.0)

    assert list(binding(problem(solved), solution(4, 1.0, 0.2))) == [
        "8.0 GiB more host memory: 25% faster",
        "a second SSD like the first: 100% faster",
        "10.0 GiB more device memory: nothing",
        "a link to the device twice as fast: nothing",
        "an optimizer twice as fast: nothing",
        "a device that computes 10% faster: 5% faster",
    ]
    assert asked == {"host": 8 * 2**30, "ssd": 2.0, "device": 10 * 2**30, "code": pytest.approx(1.1)}


def test_where_nothing_helps_alone_the_best_two_are_told():
    def solved(richer, number, alpha):
        profile, budgets = richer.profile, richer.budgets
        is_faster = richer.workload.costs[0].forward_flops < WORKLOAD.costs[0].forward_flops
        if is_faster and profile.ssd_read_bytes_per_second > A100.ssd_read_bytes_per_second:
            return solution(4, 0.92)
        return solution(4, 0.95 if is_faster and budgets.host_nbytes > BUDGETS.host_nbytes else 1.0)

    *alone, pair = binding(problem(solved), solution(4, 1.0, 0.2))
    assert len(alone) == 6
    assert all(words.endswith(": nothing") for words in alone)
    assert pair == "a second SSD like the first and a device that computes 10% faster: 9% faster"
    assert len(list(binding(problem(lambda *_: solution(4, 1.0)), solution(4, 1.0, 0.2)))) == 6


def test_a_second_drive_wears_half_as_fast():
    rooms = []
    worn = replace(MACHINE, ssd_rated_nbytes=5 * SECONDS_PER_YEAR)
    asked = problem(lambda richer, *_: rooms.append(richer.budgets), machine=worn, wear_years=1)
    list(binding(asked, solution(1, 1.0)))
    tried = [*combinations(range(6), 1), *combinations(range(6), 2)]  # alone, then in pairs
    assert [room.wear_bytes_per_second for room in rooms] == [10.0 if 1 in each else 5.0 for each in tried]


def test_one_memory_has_neither_link_nor_device_memory():
    machine = replace(MACHINE, device="cpu", device_nbytes=0)
    words = list(binding(problem(lambda *_, **__: None, machine=machine), solution(1, 1.0)))
    assert len(words) == 4
    assert not any("device memory" in each or "link" in each for each in words)


# What else there was --------------------------------------------------------------------------------------------------


def test_the_nearest_come_first():
    """By throughput, of which two micro-batches in 1.9 s have less than four in 3.7 s."""
    best = solution(4, 3.7, alpha=0.3, resident=1.0)
    own = found(solution(1, 1.0), solution(2, 1.9), solution(3, 2.8), best)
    other = SimpleNamespace(best=solution(2, 4.0), tokens_per_second=256.0, solved=lambda *_: solution(2, 8.0))
    other.workload = replace(WORKLOAD, micro_batch_size=2)
    seconds = {2: 1.9, 3: 2.8, 4: 3.75}

    def solved(other, number, alpha):
        return solution(number, 9.0 if other.request.ratios.given() else seconds[number], alpha)

    rows = list(alternatives(problem(solved), own, [other]))
    assert [row.label for row in rows] == ["3 micro-batches", "no delayed updates (alpha 0)", "2 micro-batches"]
    assert rows[0].tokens_per_second == pytest.approx(3 * 256 / 2.8)


def test_others_are_told_with_the_alpha_of_the_plan():
    """Where the simulator has chosen no late updates, what the linear program makes of some is no alternative."""
    own = Search(solution(4, 3.7), ((3, solution(3, 2.0, alpha=0.3)), (4, solution(4, 3.0, alpha=0.3))))
    seconds = {0.0: 2.8, 0.3: 2.0}
    (row,) = alternatives(problem(lambda _, number, alpha: solution(number, seconds[alpha], alpha)), own, [])
    assert (row.label, row.seconds) == ("3 micro-batches", 2.8)


def test_clipping_cannot_do_without_delay():
    own = found(solution(1, 1.0, alpha=1.0))
    assert list(alternatives(problem(lambda *_, **__: solution(1, 1.0), clip=True), own, [])) == []
    (row,) = alternatives(problem(lambda *_, **__: solution(1, 1.0)), own, [])
    assert row.label == "no delayed updates (alpha 0)"


# What is worth knowing ------------------------------------------------------------------------------------------------


def made(**changes):
    usual = {
        "schedule": "vertical",
        "num_micro_batches": 4,
        "seconds": 2.0,
        "written": 100,
        "homes": {("s", "ssd"): 1},
        "placement": Placement(
            layout=Layout(x_nbytes=((0,),) * 4), decision=Decision(layer_updates=changes.pop("layer_updates", 1))
        ),
    }
    simulation = SimpleNamespace(busy={"compute": changes.pop("compute", 0.5)})
    budgets = replace(BUDGETS, wear_bytes_per_second=changes.pop("wear", None))
    return SimpleNamespace(**{**usual, **changes}, simulation=simulation, budgets=budgets)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"num_micro_batches": 1}, ["one micro-batch: the horizontal order is the same step"]),
        (
            {"num_micro_batches": 20},
            ["micro-batches are simulated in 4 bundles: times, peaks and the timeline are of these"],
        ),
        ({"homes": {("s", "host"): 1}}, ["everything fits in host memory: nothing is moved to SSD"]),
        ({"layer_updates": 4}, ["host memory is scarce: layers are updated in pieces, and less is read ahead"]),
        ({"compute": 0.995}, ["the computation never waits"]),
        ({"wear": 50.0}, []),
        ({"wear": 10.0}, ["the drives last as long as asked if a step begins every 10 s, and not sooner"]),
    ],
)
def test_notes(changes, expected):
    assert list(notes(made(**changes))) == expected


# How long drives last --------------------------------------------------------------------------------------------------

PER_DAY = 50.0 * SECONDS_PER_DAY  # a step of 4 micro-batches writes 100 bytes in 2 s; one of n takes n / 2 s


def lasting(fixed, most=32, most_in_pieces=0, **changes):
    """A problem whose step of n micro-batches writes `fixed` + 5 n bytes, and does not fit with more than `most`."""
    worn = problem(None, machine=replace(MACHINE, ssd_rated_nbytes=int(100 * PER_DAY)))
    needs = {"needs": lambda found: ({}, fixed + 5 * found.num_micro_batches)}
    return worn.of(**{"tried": [], "most": most, "most_in_pieces": most_in_pieces, **needs, **changes})


def lives(given, narrower=(), **changes):
    usual = {"problem": given, "workload": given.workload, "profile": given.profile, "written_per_day": PER_DAY}
    changes = {"alpha": 0.0, "num_micro_batches": 4, **usual, **changes}
    now = solution(changes["num_micro_batches"], changes["num_micro_batches"] / 2)
    return list(longer_life(made(bound=now, **changes), narrower))


AS_THEY_ARE = (
    "with `--wear-years 0.55` the drives last 203.7 days, by the linear program: 2,816 tokens a step instead of 1,024, "
    "512 tokens/s instead of 512"
)
IN_BF16 = (
    "with `--states bf16 --wear-years 0.55` the drives last 205.9 days, by the linear program: 1,792 tokens a step "
    "instead of 1,024, 512 tokens/s instead of 512; training is not bit for bit that with states in fp32"
)


def test_each_way_to_have_drives_last_twice_as_long_says_its_costs():
    assert lives(lasting(80)) == [AS_THEY_ARE, ADAPTERS]
    assert lives(lasting(80), [("bf16", lasting(50))]) == [AS_THEY_ARE, IN_BF16, ADAPTERS]
    assert lives(lasting(80, most=10), [("bf16", lasting(50))]) == [IN_BF16, ADAPTERS]  # more do not fit as they are
    assert lives(lasting(80), [("bf16", lasting(50, most=6))]) == [AS_THEY_ARE, ADAPTERS]
    assert lives(lasting(80, most=10, most_in_pieces=32)) == [AS_THEY_ARE, ADAPTERS]  # with updates in pieces


def test_a_batch_that_is_given_is_left_out():
    given = lasting(80, request=Request(batch_size=4))
    assert lives(given)[0] == AS_THEY_ARE.replace("` the", "` and no given batch the")
    assert [asked.batch_size for asked in given.tried] == [None]


def test_what_then_fits_in_memory_wears_nothing():
    words, *_ = lives(lasting(0, needs=lambda found: ({}, 0)))
    assert words.startswith("with `--wear-years 0.55` nothing is written to SSD, by the linear program: ")


def test_ranks_count_once():
    """The tokens of a workload are those of all ranks."""
    given = lasting(80, workload=replace(WORKLOAD, world=2))
    assert ": 5,632 tokens a step instead of 2,048, 1,024 tokens/s instead of 1,024" in lives(given)[0]


def test_what_is_frozen_has_adapters_already():
    first, *others = WORKLOAD.sizes
    frozen = replace(first, trained_numels=(), frozen_numels=first.trained_numels)
    assert lives(lasting(80, workload=replace(WORKLOAD, sizes=(frozen, *others)))) == [AS_THEY_ARE]


@pytest.mark.parametrize("days", [0, 5000])
def test_of_drives_that_last_for_years_or_nobody_knows_how_long_nothing_is_asked(days):
    def refused():
        raise AssertionError("states are laid out in vain")
        yield

    given = lasting(80, profile=replace(MACHINE, ssd_rated_nbytes=int(days * PER_DAY)))
    assert not lives(given, refused())
    assert not given.tried


def test_where_the_batch_is_one_micro_batch_no_more_of_them_are_proposed():
    assert not lives(lasting(80, request=Request(schedule="single")))
