"""Figures: what they show is what they were given, and a missing matplotlib is said in words."""

from __future__ import annotations

import sys
from dataclasses import replace

import matplotlib
import pytest
import zoo
from planned import A100, gpt
from test_timeline import simulated

from gs_compile.cli.report import draw
from gs_compile.cli.report.draw import Point, Roofline, lanes, throughput, traffic_bars
from gs_compile.errors import PlanError
from gs_compile.placement.workload import LevelCost, Products, UnitCost, UnitSize, Workload
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.measure.shipped import SHIPPED
from gs_compile.planner.plan import plan

GIB = 2**30


@pytest.fixture
def svg(tmp_path):
    """A path, and its text once drawn: with text as text."""
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        yield tmp_path / "figure.svg"


def profile(**numbers):
    rates = {"ssd_read": 4e9, "ssd_write": 2e9, "ssd_read_mixed": 2e9, "ssd_write_mixed": 1e9} | numbers
    a100 = Profile.load(SHIPPED / "a100.json")
    changes = {f"{name}_bytes_per_second": rate for name, rate in rates.items()}
    return replace(
        a100, name="machine", matmul_flops_per_second={"bf16": 1e12}, memory_bytes_per_second=1e11, **changes
    )


def workload():
    cost = UnitCost(forward_flops=1e12, backward_flops=3e12)
    units = ("e", 0, 1, "h")
    return Workload(
        name="model",
        num_layers=2,
        sizes=tuple(UnitSize(unit, (10**9,), (), 2, 4, 12, True) for unit in units),
        costs={"e": UnitCost(forward_flops=0, backward_flops=0), 0: cost, 1: cost, "h": cost},
        micro_batch_size=2,
        sequence=1000,
        x_nbytes=(1,),
        dtype="bf16",
    )


def test_throughput_names_its_series_notes_and_rooflines(svg):
    roofline = Roofline(io_seconds=10.0, compute_tokens_per_second=900.0, tokens=1000)
    series = {"late updates": [Point(2, 200.0, "30%"), Point(4, 800.0, "7%")], "everything on SSD": [Point(2, 100.0)]}
    throughput(series, svg, roofline=roofline, title="a model")
    wanted = [*series, "30%", "7%", "computation roofline", "I/O roofline", "a model", "throughput (tokens/s)"]
    assert [word for word in wanted if word not in svg.read_text()] == []


def test_traffic_says_totals_and_pieces(svg):
    vertical = {("h2d", "w"): 20 * GIB, ("h2d", "x"): 30 * GIB, ("ssd_read", "s"): 77 * GIB}
    horizontal = {("h2d", "w"): 2000 * GIB, ("d2h", "dw"): 1300 * GIB}
    traffic_bars({"vertical": vertical, "horizontal": horizontal}, svg)
    text = svg.read_text()
    wanted = "load, vertical", "50 GiB", "2,000 GiB", "1,300", "checkpoints", "SSD read, vertical", "77"
    assert [word for word in wanted if word not in text] == []
    assert "SSD write" not in text, "a lane where nothing moves"
    assert text.count(">parameters</text>") == 1, "named once, for both lanes"


def test_traffic_of_small_models_is_not_rounded_to_nothing(svg):
    traffic_bars({"vertical": {("h2d", "w"): GIB // 4}}, svg)
    assert "0.25 GiB" in svg.read_text()


def test_traffic_of_a_step_that_moves_nothing(svg):
    traffic_bars({"vertical": {}}, svg)  # without a warning of matplotlib's
    assert "GiB a step" in svg.read_text()


def test_notes_that_would_overlap_are_left_out(svg):
    throughput({"vertical": [Point(1, 1.0, "1%"), Point(2, 2.0, "2%"), Point(64, 9.0, "9%")]}, svg)
    assert [note in svg.read_text() for note in (">1%<", ">2%<", ">9%<")] == [True, False, True]


def test_lanes_are_rows(svg):
    _, simulation = simulated(bytes_per_second=2e6)
    lanes(simulation, svg, title="a step")
    wanted = [*simulation.busy, "optimizer states", "forward", "waits", "a step"]
    assert [word for word in wanted if f">{word}<" not in svg.read_text()] == []


def test_where_memory_holds_all_states_io_bounds_nothing(svg):
    assert Roofline.of(workload(), profile(), host_nbytes=10**12).io_seconds == 0
    throughput({"one": [Point(1, 1.0)]}, svg, roofline=Roofline(io_seconds=0, compute_tokens_per_second=9.0, tokens=1))
    assert "I/O" not in svg.read_text()


def test_the_suffix_says_what_is_written(tmp_path):
    throughput({"one": [Point(1, 1.0)]}, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG\r")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlanError, match=r"figures need matplotlib: pip install 'greedysnake\[plot\]'"):
        throughput({"one": [Point(1, 1.0)]}, tmp_path / "figure.svg")


def test_rooflines():
    """e: nothing; two layers: 1 s and 3 s; the head: its backward is all of it, 3 s.

    48 GB of states: 24 s to read beside the writes, in which 24 GB are written; the other 24 GB alone take 12 s.
    """
    roofline = Roofline.of(workload(), profile())
    assert (roofline.compute_tokens_per_second, roofline.io_seconds) == pytest.approx((2000 / 11, 36))
    half = Roofline.of(workload(), profile(), host_nbytes=24 * 10**9)
    assert half.io_seconds == pytest.approx(18), "what memory can hold need not move"
    drive = profile(ssd_read=2e9, ssd_read_mixed=1e9, ssd_write=4e9, ssd_write_mixed=2e9)
    assert Roofline.of(workload(), drive).io_seconds == pytest.approx(36)
    assert Roofline.of(workload(), replace(drive, ssd_read_mixed_bytes_per_second=2e9)).io_seconds == pytest.approx(24)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"clip": True}, marks=pytest.mark.slow),
        pytest.param({"alpha": 1.0}, marks=pytest.mark.slow),
        {"ratios": {"optimizer": 0.0, "parameter": 0.0}, "alpha": 0.5},
        pytest.param({"recompute": "none"}, marks=pytest.mark.slow),
        {"durability": "step", "alpha": 0.0},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_the_step_that_figures_are_titled_by_is_on_its_curve(tmp_path, monkeypatch, settings):
    """So its bars of traffic are its own, too: the curve is planned with all that the step was planned with."""
    curves, bars = [], []
    monkeypatch.setattr(draw, "throughput", lambda series, *_, **__: curves.append(series))
    monkeypatch.setattr(draw, "traffic_bars", lambda schedules, *_, **__: bars.append(schedules))
    monkeypatch.setattr(draw, "COMPARED", ("vertical",))
    monkeypatch.setattr(draw, "lanes", lambda *_, **__: None)
    given = {"machine": A100, "micro_batch_size": 1, "num_micro_batches": 2, "host_memory": "160MiB"}
    model = gpt(4, 512, sequence=256, vocabulary=5000)
    layer = model.costs[0]
    level = LevelCost(
        nbytes=17 * 2 * 512 * 256,
        reads_input=False,
        forward_flops=layer.forward_flops,
        backward_flops=layer.backward_flops - layer.forward_flops,
    )  # saves all that a backward reads
    costs = model.costs | {unit: replace(layer, levels=(level,)) for unit in range(model.num_layers)}
    titled = plan(replace(model, costs=costs), **given, **settings)
    draw.save(titled, trace=None, page=None, figures=tmp_path)
    ((series,), (schedules,)) = curves, bars
    assert series["vertical"][-1].samples == 2
    assert series["vertical"][-1].tokens_per_second == pytest.approx(titled.tokens_per_second, rel=1e-9)
    assert schedules["vertical"] == titled.traffic


def test_figures_are_planned_in_the_memory_that_the_step_has():
    """What the products of updates take beside that was left out of it twice: with Muon a figure was of another plan."""
    model = gpt(2, 256, sequence=64, vocabulary=1000)
    products = Products(1e9, 0, 50 << 20)
    sizes = tuple(replace(size, products=products) if isinstance(size.unit, int) else size for size in model.sizes)
    given = {"micro_batch_size": 1, "num_micro_batches": 1, "host_memory": "160MiB"}
    titled = plan(replace(model, sizes=sizes), machine=A100, **given)
    (drawn,) = draw._plans(titled, "vertical", [1])
    assert drawn.budgets == titled.budgets


def test_figures_of_several_ranks_are_of_one_of_them():
    """Its share of the machine is what it has, and no share of all ranks' again."""
    given = {"micro_batch_size": 1, "num_micro_batches": 2, "host_memory": "80MiB", "gpus": 2}
    machine = replace(A100, net_bytes_per_second=20e9)
    titled = plan(gpt(2, 256, sequence=64, vocabulary=1000), machine=machine, **given)
    (drawn,) = draw._plans(titled, "vertical", [2])
    assert drawn.budgets == titled.budgets
    assert drawn.profile.ssd_read_bytes_per_second == titled.profile.ssd_read_bytes_per_second


def test_figures_of_a_step_of_several_backwards_have_the_order_that_it_has():
    """`simulate --accumulate --figures` was refused: other orders have no such step."""
    given = {"micro_batch_size": 1, "num_micro_batches": 2, "host_memory": "160MiB", "ratios": {"gradient": 0.5}}
    titled = plan(gpt(2, 256, sequence=64, vocabulary=1000), machine=A100, accumulate=True, **given)
    assert list(draw._plans(titled, "horizontal", [2])) == []
    (drawn,) = draw._plans(titled, "vertical", [2])
    assert drawn.ratios["gradient"] == 0.5
    assert drawn.tokens_per_second == pytest.approx(titled.tokens_per_second, rel=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # in PEFT
def test_figures_of_adapters_over_frozen_matrices(tmp_path):
    """A workload says itself what is trained and how matrices are stored."""
    given = {"micro_batch_size": 1, "num_micro_batches": 2, "sequence": zoo.TOKENS, "lora": 2, "frozen": "nf4"}
    titled = plan(zoo.configuration("gpt2"), machine=A100, **given)
    draw.save(titled, trace=None, page=None, figures=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"lanes.svg", "throughput.svg", "traffic.svg"}
