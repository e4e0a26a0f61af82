"""What units' code costs at a batch size, known from the graphs of two others: the same as counted on its own graph."""

from __future__ import annotations

import pytest
import zoo

from gs_compile.codegen import codes
from gs_compile.codegen.costs import Counts, extended
from gs_compile.planner.cost.workload import ModelSpec

pytestmark = zoo.WARNINGS
SIZES = (2, 3, 7)
PIECE = 8  # tokens


def counted(name, sizes, **settings):
    """Of one model the costs of its units at the last of sizes asked for in turn, whole and in pieces; and its units."""
    model = zoo.GPT() if name == "plain" else zoo.configuration(name)
    spec = ModelSpec.of(model, sequence=zoo.TOKENS, precision="bf16", **settings)
    found = [[spec.workload(size, layer_tokens=piece).costs for piece in (None, PIECE)] for size in sizes]
    return found[-1], spec.specialized(sizes[-1])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("plain", {}),
        pytest.param(
            *("llama", {"lora": 2}),
            marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")],  # in PEFT
        ),
        pytest.param("gpt2", {"schedule": "single"}, marks=pytest.mark.slow),
        *(
            pytest.param(each, {}, marks=pytest.mark.slow)
            for each in ("gpt2", "bloom", "gemma3_text", "gpt_oss", "mamba", "mixtral")
        ),
    ],
)
def test_costs_are_those_of_each_sizes_own_graphs(name, settings, monkeypatch):
    monkeypatch.setattr(codes, "_codes", codes.Codes())
    found, units = counted(name, SIZES, **settings)
    graphs = [code.graphs for each in (units, units.in_pieces(PIECE)) for code in each.counted.values()]
    assert not any(graphs), "none was traced"
    monkeypatch.setattr(codes, "_codes", codes.Codes())
    assert found == counted(name, SIZES[-1:], **settings)[0]


def test_a_third_size_follows_from_two_where_numbers_stay_or_are_in_proportion():
    two = {2: Counts(("mm",), (6, 5)), 4: Counts(("mm",), (12, 5))}
    assert extended(two, 7) == Counts(("mm",), (21, 5))


@pytest.mark.parametrize(
    ("two", "samples"),
    [
        ({1: Counts(("mm",), (6,)), 2: Counts(("mm", "view"), (12,))}, 4),  # another code
        ({1: Counts(("mm",), (6,)), 2: Counts(("mm",), (13,))}, 4),  # not in proportion
        ({2: Counts(("mm",), (3,)), 4: Counts(("mm",), (6,))}, 5),  # half of something
    ],
)
def test_nothing_follows_otherwise(two, samples):
    assert extended(two, samples) is None
