from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gs_compile.options import Ratios
from gs_compile.placement.cut import MOST_UPDATES, cut, cut_units
from gs_compile.placement.placement import Decision, Layout
from gs_compile.placement.shards import QUANTUM
from gs_compile.placement.workload import Products, UnitSize

Q = QUANTUM
SIZES = st.lists(st.integers(1, 9).map(lambda quanta: quanta * Q), max_size=5)
RATIOS = {"parameter": 0.5, "optimizer": 0.5, "device": 0.0}
SHARES = st.floats(0, 1) | st.sampled_from([0.0, 0.25, 0.3, 0.5, 1.0])


def parts(trained, frozen=(), **given):
    of_unit = {"itemsize": 2, "gradient_itemsize": 4, "state_itemsize": 12, "has_master": True, "products": None}
    of_unit |= {name: given.pop(name) for name in of_unit.keys() & given.keys()}
    ratios = {name: given.pop(f"{name}_ratio", default) for name, default in RATIOS.items()}
    cuts = {"alpha": 0.25, "most_numel": 1 << 40, "separate": True}
    return cut(UnitSize(0, tuple(trained), tuple(frozen), **of_unit), ratios, **cuts | given)


def picture(unit):
    """One line a group: when, its parameter parts and its state parts, in quanta."""
    return "\n".join(
        f"{group.letter} {group.when}: w {_intervals(group.w)} s {_intervals(group.s)}" for group in unit.groups
    )


def _intervals(parts):
    return " ".join(f"{p.letter}.{p.tier}[{p.start // Q}:{p.stop // Q}]" for p in parts) or "-"


def test_two_zones_and_two_groups():
    """The picture of `placement.py`, with a tensor that is not trained at the end of the SSD's zone."""
    assert picture(parts([8 * Q, 8 * Q], [4 * Q])) == (
        "a early: w a.host[0:8] b.ssd[10:14] s a.host[0:6] b.ssd[6:12]\n"
        "b late: w c.host[8:10] d.ssd[14:16] s c.host[0:2] d.ssd[2:4]\n"
        "c never: w e.ssd[16:20] s -"
    )


def test_whole_tensors_live_on_the_device():
    unit = parts([4 * Q, 8 * Q], [4 * Q], device_numel=10 * Q, device_ratio=0.25, parameter_ratio=0.25)
    assert picture(unit) == (
        "a early: w a.device[0:3] b.host[4:7] c.ssd[8:11] s a.host[0:4] b.ssd[4:9]\n"
        "b late: w d.device[3:4] e.host[7:8] f.ssd[11:12] s c.host[0:1] d.ssd[1:3]\n"
        "c never: w g.ssd[12:16] s -"
    )
    assert unit.num_resident == 4 * Q


@settings(deadline=None, max_examples=100)
@given(st.lists(SIZES.filter(bool), min_size=1, max_size=8), SHARES)
def test_what_a_unit_is_short_of_the_next_ones_have(tensors, share):
    sizes = tuple(UnitSize(unit, tuple(each), (), 2, 4, 12, True) for unit, each in enumerate(tensors))
    ratios = Ratios(parameter=0.0, optimizer=0.0, device_parameter=share)
    units = cut_units(sizes, Decision(ratios=(ratios,)), Layout(separate=True))
    largest, wanted, found = 0, 0.0, 0
    for size, unit in zip(sizes, units, strict=True):
        wanted, found, largest = (
            wanted + share * size.numel,
            found + unit.num_resident,
            max(largest, *size.trained_numels),
        )
        assert found <= wanted + 1e-6
        assert unit.num_resident in (0, *accumulate(size.trained_numels))
    if len(set(tensors[0])) == 1 and all(each == tensors[0] for each in tensors):
        assert found > wanted - largest


def test_without_a_master_a_trained_unit_has_no_part_on_the_device():
    sizes = (UnitSize(0, (8 * Q,), (), 4, 4, 8, False), UnitSize(1, (), (8 * Q,), 4, 4, 8, False))
    ratios = Ratios(parameter=0.0, optimizer=0.0, device_parameter=1.0)
    units = cut_units(sizes, Decision(ratios=(ratios,)), Layout(separate=True))
    assert [unit.num_resident for unit in units] == [0, 8 * Q]


def test_in_one_memory_no_tensor_straddles_the_zones():
    for ratio, host in ((0.2, 0), (0.4, 4), (0.99, 10), (1.0, 16)):
        unit = parts([4 * Q, 6 * Q, 6 * Q], parameter_ratio=ratio, separate=False)
        assert sum(part.numel for part in unit.w.values() if part.tier == "host") == host * Q


@settings(deadline=None, max_examples=200)
@given(SIZES, SIZES, SHARES, SHARES, SHARES, st.integers(1, 40), st.booleans())
def test_where_updates_take_whole_tensors_no_cut_is_within_one(
    trained, frozen, parameter, state, alpha, most, separate
):
    """No part of the parameters, so no group; states are cut anywhere."""
    shares = {"parameter_ratio": parameter, "optimizer_ratio": state, "alpha": alpha}
    unit = parts(trained, frozen, **shares, most_numel=most * Q, separate=separate, products=Products(1.0, 1, 1))
    ends = {0, *accumulate((*trained, *frozen))}
    assert all({part.start, part.stop} <= ends for part in unit.w.values())
    _partition(list(unit.w.values()), sum(trained) + sum(frozen))
    for group in unit.groups:
        _partition(group.s, group.numel if group.when != "never" else 0)
    late, largest = sum(group.numel for group in unit.trained("late")), max(trained, default=0)
    assert abs(late - alpha * sum(trained)) <= largest  # half of a tensor in each of two zones


@settings(deadline=None)
@given(st.lists(SIZES.filter(bool), min_size=1, max_size=8), SHARES, SHARES, st.booleans())
def test_where_ranks_share_tensors_a_unit_is_updated_at_once(tensors, parameter, alpha, separate):
    """Early or late; of so many units as alpha says."""
    shared = Products(1.0, 1, 1, shared_nbytes=1)
    sizes = [UnitSize(unit, tuple(each), (Q,), 4, 4, 8, False, products=shared) for unit, each in enumerate(tensors)]
    ratios = Ratios(parameter=parameter, optimizer=0.0)
    units = cut_units(sizes, Decision(ratios=(ratios,), alpha=alpha, layer_updates=2), Layout(separate=separate))
    assert all(len(unit.trained()) == 1 and unit.num_trained == unit.trained()[0].numel for unit in units)
    assert sum(bool(unit.trained("late")) for unit in units) == int(len(units) * alpha + 1e-6)


@pytest.mark.parametrize("layer_updates", [1, 4])
def test_a_unit_has_no_more_updates_than_a_program_can_hold(layer_updates):
    """All of an embedding is trained, and of layers the norms."""
    embedding, layer = UnitSize("e", (10**4 * Q,), (), 2, 4, 12, True), UnitSize(0, (2 * Q,), (50 * Q,), 2, 4, 12, True)
    decision = Decision(alpha=0.3, layer_updates=layer_updates)
    units = cut_units((embedding, layer), decision, Layout(separate=True))
    assert [len(unit.trained()) for unit in units] == [MOST_UPDATES + 1, 2]


@settings(deadline=None, max_examples=300)
@given(SIZES, SIZES, SHARES, SHARES, SHARES, st.integers(1, 40), st.booleans())
def test_a_cut_is_a_partition(trained, frozen, parameter_ratio, optimizer_ratio, alpha, most, separate):
    unit = parts(
        trained,
        frozen,
        parameter_ratio=parameter_ratio,
        optimizer_ratio=optimizer_ratio,
        alpha=alpha,
        most_numel=most * Q,
        separate=separate,
    )
    numel, num_trained = sum(trained) + sum(frozen), sum(trained)
    assert (unit.numel, unit.num_trained) == (numel, num_trained)
    _partition([part for group in unit.groups for part in group.w], numel)
    for group in unit.groups:
        _partition(group.s, group.numel if group.when != "never" else 0)
        assert all((part.stop <= num_trained) == (group.when != "never") for part in group.w)
    homes = [part.tier for part in sorted(unit.w.values(), key=lambda part: part.start)]
    assert homes == sorted(homes)  # the host's zone, then that of the SSD
    start, stop = unit.ssd_zone
    assert stop - start == sum(part.numel for part in unit.w.values() if part.tier == "ssd")
    assert len(unit.dw) == len(unit.groups)


@settings(deadline=None, max_examples=200)
@given(SIZES, SHARES, SHARES, SHARES, st.integers(2, 40))
def test_shares_are_kept_to_a_quantum(trained, parameter_ratio, optimizer_ratio, alpha, most):
    unit = parts(
        trained,
        parameter_ratio=parameter_ratio,
        optimizer_ratio=optimizer_ratio,
        alpha=alpha,
        most_numel=most * Q,
    )
    numel = sum(trained)
    host = sum(part.numel for part in unit.w.values() if part.tier == "host")
    assert parameter_ratio * numel - Q < host <= parameter_ratio * numel + 1e-6
    late = sum(group.numel for group in unit.trained("late"))
    assert abs(late - alpha * numel) <= Q  # half a quantum in each zone
    for group in unit.groups:
        resident = sum(part.numel for part in group.s if part.tier == "host")
        assert optimizer_ratio * group.numel - Q < resident <= optimizer_ratio * group.numel + 1e-6
        assert group.numel <= (most + 2) * Q  # each zone's end may be a quantum off


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.25, 0.5, 0.9, 1.0])
def test_late_groups_come_last_and_there_are_none_without_alpha(alpha):
    whens = [group.when for group in parts([50 * Q], [Q], alpha=alpha, most_numel=7 * Q).groups]
    assert whens == sorted(whens, key=["early", "late", "never"].index)
    assert ("late" in whens, "early" in whens) == (alpha > 0, alpha < 1)


def _partition(parts, numel):
    """Parts are not empty, are cut at quanta, do not overlap, and together are everything."""
    parts = sorted(parts, key=lambda part: part.start)
    assert all(part.start < part.stop and part.start % Q == part.stop % Q == 0 for part in parts)
    assert all(a.stop == b.start for a, b in pairwise(parts))
    assert ([parts[0].start, parts[-1].stop] if parts else [0, 0]) == [0, numel]


@given(st.lists(SIZES.filter(bool), min_size=1, max_size=6), st.floats(0, 1))
def test_nothing_is_on_ssd_if_device_and_host_have_it_all(tensors, device):
    """What whole tensors leave of the device's share goes to host memory, and no more than one of them."""
    sizes = tuple(UnitSize(i, tuple(each), (), 2, 4, 12, True) for i, each in enumerate(tensors))
    ratios = Ratios(parameter=1 - device, optimizer=1.0, device_parameter=device)
    units = cut_units(sizes, Decision(ratios=(ratios,), alpha=0.5), Layout(separate=True))
    parts = [part for unit in units for part in unit.w.values()]
    assert {part.tier for part in parts} <= {"device", "host"}
    in_host = sum(part.numel for part in parts if part.tier == "host")
    assert in_host <= (1 - device) * sum(map(sum, tensors)) + max(map(max, tensors)) + Q
