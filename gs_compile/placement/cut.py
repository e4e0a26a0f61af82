"""cut: the parts of every unit, from ratios, alpha and the size of one update."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate, count, pairwise
from math import ceil

from gs_compile.placement.levels import is_chosen
from gs_compile.placement.placement import Decision, Layout
from gs_compile.placement.shards import QUANTUM
from gs_compile.placement.stacks import stack_of
from gs_compile.placement.units import Group, Part, UnitPlacement, When
from gs_compile.placement.workload import UnitSize
from gs_compile.program.ir import TIERS, Tier

MOST_UPDATES = 128  # of a unit: each is several operations, and layers of which little is trained make small ones


def cut_units(sizes: Sequence[UnitSize], decision: Decision, layout: Layout) -> tuple[UnitPlacement, ...]:
    """The units, cut as a decision says. No update takes more elements than a layer has, or its part of a layer if
    `layer_updates` is more than one; unless a unit would then have more than `MOST_UPDATES`.

    Only whole tensors live on the device: what one unit falls short of its part, the next ones may have in addition.
    """
    alpha, updates, stacks = decision.alpha, decision.layer_updates, decision.stacks(layout)
    layers = [size.num_trained for size in sizes if isinstance(size.unit, int)]
    largest = max(size.num_trained for size in sizes)
    most_numel = max(ceil((max(layers, default=0) or largest or 1) / updates), ceil(largest / MOST_UPDATES))
    units: list[UnitPlacement] = []
    spare = 0.0  # elements that the units so far have left of the device's part
    for size in sizes:
        ratios = decision.ratios[stack_of(size.unit, stacks)]
        on_device = (ratios.device_parameter or 0.0) if size.may_reside else 0.0
        spare += on_device * size.numel
        numel = int(spare + 1e-9) if size.may_reside else 0
        shares = {"parameter": ratios.parameter or 0.0, "optimizer": ratios.optimizer or 0.0, "device": on_device}
        most = {"most_numel": most_numel, "device_numel": numel}
        units.append(cut(size, shares, alpha=alpha, separate=layout.separate, **most))
        spare -= units[-1].num_resident
    return tuple(units)


def stages_after_first(place: int, layer_updates: int) -> int:
    """The stages between a unit's first update and the one at `place` among them: one for each layer's worth."""
    return place // layer_updates


def cut(
    size: UnitSize,
    ratios: Mapping[str, float],
    *,
    alpha: float,
    most_numel: int,
    separate: bool,
    device_numel: int = 0,
) -> UnitPlacement:
    """Where the parts of a unit live.

    Only whole tensors live on the device. Host memory takes what the device falls short of its share, so that the SSD
    has no more than its own share. If the device reads host memory itself, no tensor may straddle the cut between host
    and SSD: the parameter ratio is rounded down to the end of a tensor. The same holds if updates take whole tensors,
    of which each group then has some. If ranks share such tensors, all that is trained is one group: late in the part
    of all units that alpha says, early in the others.

    ratios: the shares in host memory, of "parameter" and of "optimizer" (the state); the share of parameters on the
        device, "device".
    alpha: the share of the update that is late.
    most_numel: the most elements that one update takes at a time.
    separate: the device has memory of its own.
    device_numel: the most elements that live there, including what earlier units fell short of.
    """
    tensors = [0, *accumulate((*size.trained_numels, *size.frozen_numels))]
    device = max(end for end in tensors if end <= device_numel)
    limit = max(_elements(ratios["parameter"] + ratios.get("device", 0.0), size.numel), device)
    takes_tensors = size.products is not None and not size.products.shared_nbytes
    is_cut_anywhere = separate and not takes_tensors
    ends = [device + (limit - device) // QUANTUM * QUANTUM] if is_cut_anywhere else tensors
    bounds = [0, device, max(end for end in ends if end <= limit), size.numel]
    w_letters, s_letters, dw_letters = _letters(), _letters(), _letters()
    groups = []
    fractions = _fractions(size.num_trained, alpha, most_numel)
    if size.products and size.products.shared_nbytes and fractions:  # all ranks update the same tensors together
        place = size.unit if isinstance(size.unit, int) else 0
        fractions = [("late" if is_chosen(place, alpha) else "early", 1.0)]
    for when, zone in _zones(bounds, size.num_trained, fractions, tensors if takes_tensors else ()):
        w = tuple(Part(next(w_letters), tier, start, stop) for tier, start, stop in zone if start < stop)
        group_numel = sum(part.numel for part in w)
        if group_numel:
            resident = _elements(ratios["optimizer"], group_numel) // QUANTUM * QUANTUM
            homes: list[tuple[Tier, int, int]] = [("host", 0, resident), ("ssd", resident, group_numel)]
            has_state = when != "never" and size.state_itemsize
            s = tuple(Part(next(s_letters), tier, a, b) for tier, a, b in homes if a < b) if has_state else ()
            groups.append(Group(next(dw_letters), when, w, s))
    return UnitPlacement(**{each.name: getattr(size, each.name) for each in fields(size)}, groups=tuple(groups))


def _zones(
    bounds: Sequence[int], num_trained: int, fractions: Sequence[tuple[When, float]], among: Sequence[int]
) -> Iterator[tuple[When, list[tuple[Tier, int, int]]]]:
    """The range of each tier's zone that each group has; frozen elements are a group that no update changes.

    among: the places at which `_cuts` may cut.
    """
    pieces = [_cuts(min(a, num_trained), min(b, num_trained), fractions, among) for a, b in pairwise(bounds)]
    for number, (when, _) in enumerate(fractions):
        yield when, [(tier, *piece[number]) for tier, piece in zip(TIERS, pieces, strict=True)]
    rest = [max(end, num_trained) for end in bounds]
    yield "never", list(zip(TIERS, rest, rest[1:], strict=False))


def _elements(share: float, numel: int) -> int:
    """A share of so many elements; a share that is 1 but for a solver's rounding is all of them."""
    return numel if share > 1 - 1e-6 else int(share * numel + 1e-9)


def _fractions(numel: int, alpha: float, most_numel: int) -> list[tuple[When, float]]:
    """When each group is updated, and where it ends as a fraction of the unit: early groups first."""
    num_early, num_late = (ceil(share * numel / most_numel) for share in (1 - alpha, alpha))
    early: list[tuple[When, float]] = [("early", (1 - alpha) * (k + 1) / num_early) for k in range(num_early)]
    return early + [("late", 1 - alpha + alpha * (k + 1) / num_late) for k in range(num_late)]


def _cuts(
    start: int, stop: int, fractions: Sequence[tuple[When, float]], among: Sequence[int]
) -> list[tuple[int, int]]:
    """A zone cut at fractions of its length, each rounded to a quantum, or to the nearest of the places `among`."""
    wanted = [(stop - start) * end for _, end in fractions]
    ends = [start + round(end / QUANTUM) * QUANTUM for end in wanted]
    if places := [place for place in among if start <= place <= stop]:
        ends = [min(places, key=lambda place: abs(place - start - end)) for end in wanted]
    ends[-1:] = [stop] if ends else []
    return list(zip([start, *ends[:-1]], ends, strict=True)) if ends else []


def _letters() -> Iterator[str]:
    """a, b ... z, ba, bb ..."""
    alphabet = string.ascii_lowercase

    def name(number: int) -> str:
        return (name(number // 26) if number >= 26 else "") + alphabet[number % 26]

    return map(name, count())
