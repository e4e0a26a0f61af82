"""Plans for the paper's machine, by the planner and the simulator: the numbers and figures of docs/paper.md.

    python -m benchmarks.figures sweep      # GPT-65B, throughput over the batch size
    python -m benchmarks.figures orders     # the vertical order against the horizontal, three models, three drives
    python -m benchmarks.figures credit     # what one more micro-batch computes and moves
    python -m benchmarks.figures draw       # the figures, from the numbers

Nothing is measured: every second is simulated, on the machine file a100.json. Numbers go to
benchmarks/results/paper.json as they are found, and what is there is not simulated again. Figures go to docs/figures.

The horizontal order is given the largest micro-batch that the device has room for, as the paper gives it to
ZeRO-Infinity.

Several GPUs are seen from one of them (`shared`): it has an n-th of host memory, drives, and the CPU's optimizer, and
keeps and moves an n-th of parameters, gradients and states, over a PCIe link of its own. What the GPUs send each other,
all-gathers and reduce-scatters, is left out, for both orders.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

from benchmarks.common import FIGURES, ON_SSD, RESULTS, save
from gs_compile.cli.report.draw import Point, Roofline, lanes, throughput, traffic_bars
from gs_compile.errors import NoFitError
from gs_compile.placement.boundaries import total
from gs_compile.placement.shards import share
from gs_compile.placement.workload import Workload
from gs_compile.planner.cost.workload import ModelSpec
from gs_compile.planner.measure.machines import profile
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.plan import plan
from gs_compile.planner.simulate.prices import code_seconds
from gs_compile.planner.step_plan import StepPlan

PAPER_RESULTS = RESULTS / "paper.json"

SEQUENCE = 2048
MICRO_BATCH_SIZE = 4  # of the vertical order; 2 plans the same, and takes twice as long to simulate
HORIZONTAL_SIZES = (32, 16, 8, 4, 2)  # the first that fits the device, and is no larger than the batch
HORIZONTAL_DEVICE = "39GiB"  # 1 GiB more than the vertical order may use: 8 samples of 175B take 38.03
SETTINGS: Mapping[str, dict[str, Any]] = {
    "planned": {},
    "alpha 0": {"alpha": 0.0},
    "all on SSD": {"ratios": ON_SSD},
}
HORIZONTAL_SAMPLES = (16, 32, 48, 64, 96)  # whole micro-batches of 16
SAMPLES = (8, 24, 40, 48, 56, 64, 80, 96)
CASES = {"65B, 1 GPU": ("gpt-65b", 1), "65B, 4 GPUs": ("gpt-65b", 4), "175B, 1 GPU": ("gpt-175b", 1)}
PAPER = {"65B, 1 GPU": 1.96, "65B, 4 GPUs": 1.93, "175B, 1 GPU": 2.53}
CREDITED = {"a5000": 1, "a100": 2}  # machines, and samples of a micro-batch that computes 16.4 s there
BANDWIDTHS = (4, 2, 8)  # GB/s of the drives; the first is the machine file's
PICTURED = (24, 48)  # samples of the steps whose lanes are drawn: the drives bind, the computation binds


def sweep() -> None:
    """GPT-65B on one GPU: what alpha brings, and what host memory brings."""
    case = "65B, 1 GPU"
    for samples in SAMPLES:
        chosen = vertical(case, samples, "planned")
        if chosen["alpha"] == 0:  # the same plan
            once(_key(case, "alpha 0", samples, BANDWIDTHS[0]), lambda chosen=chosen: chosen)
        for setting in SETTINGS:
            vertical(case, samples, setting)
    for samples in HORIZONTAL_SAMPLES:
        horizontal(case, samples)


def orders() -> None:
    """The saturated vertical order over the horizontal at the same batch; with the file's drives also at twice it."""
    for bandwidth in BANDWIDTHS:
        for case in CASES:
            samples = saturating(case, bandwidth)
            saturated = vertical(case, samples, "planned", bandwidth)["tokens_per_second"]
            for batch in (samples, 2 * samples) if bandwidth == BANDWIDTHS[0] else (samples,):
                found = horizontal(case, batch, bandwidth)
                ratio = saturated / found["tokens_per_second"]
                after = ratio * apart(case, found, bandwidth) / found["seconds"]
                print(
                    f"{case}, {bandwidth} GB/s, {batch} samples: {ratio:.2f}, with all updates after the last backward "
                    f"{after:.2f} (paper {PAPER[case]})",
                    flush=True,
                )


def apart(case: str, found: Mapping[str, Any], bandwidth: int) -> float:
    """Seconds of a horizontal step with no computation beside its updates: what was hidden of them is added."""
    waits = sum(found["bubbles"].get(cause, 0.0) for cause in ("ssd_read s", "ssd_write s", "cpu"))
    return found["seconds"] + Roofline.of(workload_of(case), machine_of(case, bandwidth)).io_seconds - waits


def credit() -> None:
    """One more micro-batch of GPT-65B: what it computes, and what its checkpoints take on the way."""
    for name, size in CREDITED.items():
        once(f"65B; credit; micro-batch of {size}; {name}", partial(one_more, profile(name), size))


def draw() -> None:
    """Every figure."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    case, title = "65B, 1 GPU", "GPT-65B on one A100, simulated"
    roofline = Roofline.of(workload_of(case), machine_of(case))
    for name, settings in {
        "alpha": {"planned": "part of the update late", "alpha 0": "alpha 0"},
        "all-on-ssd": {"planned": "planned", "all on SSD": "all on SSD"},
        "orders": {"planned": "vertical", "horizontal": "horizontal"},
    }.items():
        series = {label: points(case, setting, notes=name == "alpha") for setting, label in settings.items()}
        throughput(series, FIGURES / f"{name}.svg", roofline=roofline, title=title)
    found = {"vertical": planned(case, 32, "planned"), "horizontal": other_order(case, 32)}
    between = ("h2d", "d2h")
    moved = {name: {key: n for key, n in step.traffic.items() if key[0] in between} for name, step in found.items()}
    traffic_bars(moved, FIGURES / "traffic.svg", title="GPT-65B, 32 samples a step: between host and device")
    for samples in PICTURED:
        simulation = planned(case, samples, "planned").simulation
        turn = 0.3 * simulation.seconds
        lanes(
            simulation,
            FIGURES / f"lanes-{samples}.svg",
            since=turn,
            until=turn + 0.1 * simulation.seconds,
            title=f"GPT-65B, {samples} samples a step, simulated: a tenth of the step",
        )


def points(case: str, setting: str, *, notes: bool = False) -> list[Point]:
    """The results of `sweep`."""
    rows = {
        samples: results().get(_key(case, setting, samples, BANDWIDTHS[0]))
        for samples in sorted({*SAMPLES, *HORIZONTAL_SAMPLES})
    }
    return [
        Point(samples, row["tokens_per_second"], f"{row['alpha']:.0%}" if notes and row["alpha"] else "")
        for samples, row in rows.items()
        if row is not None
    ]


def one_more(machine: Profile, size: int) -> dict[str, Any]:
    """Seconds of a micro-batch of so many samples; `whole`: with a recomputation as long as a forward, without head."""
    workload = workload_of("65B, 1 GPU", size)
    nbytes = total(workload.x_nbytes, workload.num_layers)
    layers = range(workload.num_layers)
    whole = 4 * sum(code_seconds(layer, workload, machine, backward=False) for layer in layers)
    return {
        "compute_seconds": workload.tokens / Roofline.of(workload, machine).compute_tokens_per_second,
        "whole_compute_seconds": whole,
        "checkpoints_nbytes": nbytes,
        "link_seconds": 3 * nbytes / machine.h2d_bytes_per_second + 2 * nbytes / machine.d2h_bytes_per_second,
        "ssd_seconds": nbytes / machine.ssd_read_bytes_per_second + nbytes / machine.ssd_write_bytes_per_second,
    }


# The steps -----------------------------------------------------------------------------------------------------------


def vertical(case: str, samples: int, setting: str, bandwidth: int = BANDWIDTHS[0]) -> dict[str, Any]:
    """A planned step, simulated; `samples` are of all GPUs."""
    return once(_key(case, setting, samples, bandwidth), lambda: row(planned(case, samples, setting, bandwidth)))


def horizontal(case: str, samples: int, bandwidth: int = BANDWIDTHS[0]) -> dict[str, Any]:
    """A step in the other order, simulated."""
    return once(_key(case, "horizontal", samples, bandwidth), lambda: row(other_order(case, samples, bandwidth)))


def row(found: StepPlan) -> dict[str, Any]:
    """For the results."""
    return {
        "alpha": found.alpha,
        "ratios": dict(found.ratios),
        "micro_batch_size": found.workload.micro_batch_size,
        "num_micro_batches": found.num_micro_batches,
        "seconds": found.seconds,
        "tokens_per_second": found.profile.num_ranks * found.tokens_per_second,
        "busy": dict(found.simulation.busy),
        "bubbles": dict(found.simulation.bubbles),
        "peaks": dict(found.simulation.peaks),
    }


def planned(case: str, samples: int, setting: str, bandwidth: int = BANDWIDTHS[0]) -> StepPlan:
    """As the planner has it."""
    return _plan(case, samples, MICRO_BATCH_SIZE, bandwidth, **SETTINGS[setting])


def other_order(case: str, samples: int, bandwidth: int = BANDWIDTHS[0]) -> StepPlan:
    """The horizontal order with the largest micro-batch that the device has room for."""
    for size in HORIZONTAL_SIZES:
        workspace = max(cost.workspace_nbytes for cost in workload_of(case, size).costs.values())
        if size * machine_of(case).num_ranks > samples or workspace > machine_of(case).device_nbytes:
            continue
        try:
            found = _plan(case, samples, size, bandwidth, schedule="horizontal", device_memory=HORIZONTAL_DEVICE)
        except NoFitError:
            continue
        if found.is_solved and found.peaks["device"] + workspace <= found.budgets.device_nbytes:
            return found
    raise SystemExit(f"{case}: no micro-batch fits the device")


def _plan(case: str, samples: int, size: int, bandwidth: int, **settings: Any) -> StepPlan:
    machine = machine_of(case, bandwidth)
    number = -(-samples // (size * machine.num_ranks))
    return plan(workload_of(case), machine=machine, micro_batch_size=size, num_micro_batches=number, **settings)


def saturating(case: str, bandwidth: int) -> int:
    """The smallest batch that saturates the vertical order, by the paper's rule."""
    workload, machine = workload_of(case), machine_of(case, bandwidth)
    found = plan(workload, machine=machine, micro_batch_size=MICRO_BATCH_SIZE, saturation="paper")
    return found.num_micro_batches * MICRO_BATCH_SIZE * machine.num_ranks


# The cases -----------------------------------------------------------------------------------------------------------


@cache
def workload_of(case: str, micro_batch_size: int = MICRO_BATCH_SIZE) -> Workload:
    """The share of one GPU."""
    model, ranks = CASES[case]
    found = ModelSpec.of(model, sequence=SEQUENCE, precision="bf16", masters="whole").workload(micro_batch_size)
    return shared(found, ranks)


def shared(workload: Workload, ranks: int) -> Workload:
    """An n-th of all that is placed; every GPU computes with all of it, on samples of its own."""
    sizes = (
        replace(size, trained_numels=tuple(share(numel, ranks) for numel in size.trained_numels))
        for size in workload.sizes
    )
    return replace(workload, sizes=tuple(sizes)) if ranks > 1 else workload


@cache
def machine_of(case: str, bandwidth: int = BANDWIDTHS[0]) -> Profile:
    """The A100 machine with drives of so many GB/s, in both directions together; one GPU's share of it."""
    found, ranks = profile("a100"), CASES[case][1]
    rate, update = bandwidth * 1e9 / ranks, found.update_elements_per_second / ranks
    return replace(
        found,
        host_nbytes=found.host_nbytes // ranks,
        ssd_nbytes=found.ssd_nbytes // ranks,
        ssd_read_bytes_per_second=rate,
        ssd_write_bytes_per_second=rate,
        ssd_read_mixed_bytes_per_second=rate / 2,
        ssd_write_mixed_bytes_per_second=rate / 2,
        update_elements_per_second=update,
        update_mixed_elements_per_second=update,
        num_ranks=ranks,
    )


# The results ---------------------------------------------------------------------------------------------------------


def _key(case: str, setting: str, samples: int, bandwidth: int) -> str:
    return f"{case}; {setting}; {samples} samples; {bandwidth} GB/s"


def results() -> dict[str, Any]:
    return json.loads(PAPER_RESULTS.read_text()) if PAPER_RESULTS.exists() else {}


def once(key: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row of that key, found now if it has not been."""
    if key not in results():
        row = run()
        save(results() | {key: row}, PAPER_RESULTS)
        print(
            f"{key}: {json.dumps({name: value for name, value in row.items() if isinstance(value, float)})}", flush=True
        )
    return results()[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"sweep": sweep, "orders": orders, "credit": credit, "draw": draw}
    parser.add_argument("command", choices=commands)
    commands[parser.parse_args().command]()


if __name__ == "__main__":
    main()
