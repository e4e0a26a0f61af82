"""A workload's sums are those of its units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gs_compile.placement.workload import UnitCost, UnitSize, Workload

UNITS = ("t", "e", 0, 1, "h")
numels = st.lists(st.integers(0, 10**9), max_size=3).map(tuple)
sizes = st.tuples(
    *(
        st.builds(
            UnitSize,
            st.just(unit),
            numels,
            numels,
            itemsize=st.sampled_from([2, 4]),
            gradient_itemsize=st.just(4),
            state_itemsize=st.sampled_from([0, 8, 12]),
            has_master=st.booleans(),
        )
        for unit in UNITS
    )
)


def workload(found: tuple[UnitSize, ...] = (), forward_flops: float = 1.0) -> Workload:
    cost = UnitCost(forward_flops=forward_flops, backward_flops=3 * forward_flops)
    return Workload(
        name="model",
        num_layers=2,
        sizes=found,
        costs=dict.fromkeys(("e", 0, 1, "h"), cost),
        micro_batch_size=3,
        sequence=5,
        x_nbytes=7,
    )


@given(sizes)
def test_bytes_are_those_of_all_tensors(found):
    whole = workload(found)
    trained = [(unit, numel) for unit in found for numel in unit.trained]
    frozen = [(unit, numel) for unit in found for numel in unit.frozen]
    assert whole.num_trained == sum(numel for _, numel in trained)
    assert whole.parameters_nbytes == sum(numel * unit.itemsize for unit, numel in trained + frozen)
    assert whole.states_nbytes == sum(numel * unit.state_itemsize for unit, numel in trained)
    for unit in found:
        assert (unit.numel, unit.num_trained) == (sum(unit.trained + unit.frozen), sum(unit.trained))


def test_tokens_are_of_one_micro_batch():
    assert workload().tokens == 15


def test_what_is_recomputed_is_no_work_of_the_model():
    assert workload(forward_flops=2.0).model_flops == pytest.approx(4 * 2.0 * 3)
