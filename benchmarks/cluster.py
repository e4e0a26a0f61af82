"""Plans for several GPUs of the paper's machine, and for nodes of eight of them: the table of docs/ranks.md.

    python -m benchmarks.cluster            # seconds are simulated; prints rows, and writes results/cluster.json

Each GPU has micro-batches of its own. "planned" is the batch that the planner chooses for that many; in "weak" each GPU
has as many micro-batches as the planner gives one of a single node.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.common import RESULTS, gains, save
from gs_compile.planner.cost.workload import ModelSpec
from gs_compile.planner.plan import plan
from gs_compile.planner.step_plan import StepPlan

OUTPUT = RESULTS / "cluster.json"
SEQUENCE = 2048
MACHINE, NETWORK = "a100", "25GB/s"
CASES = (  # model, samples of a micro-batch, GPUs of a node, numbers of nodes
    ("gpt-65b", 4, 1, (1,)),
    ("gpt-65b", 4, 2, (1,)),
    ("gpt-65b", 4, 4, (1,)),
    ("gpt-175b", 2, 4, (1,)),
    ("gpt-175b", 2, 8, (1, 2, 4, 8, 16, 32, 64)),
)


def row(found: StepPlan) -> dict[str, Any]:
    """What the table says of a plan."""
    return {
        "samples": found.ranks * found.num_micro_batches * found.workload.micro_batch_size,
        "num_micro_batches": found.num_micro_batches,
        "alpha": found.alpha,
        "seconds": found.seconds,
        "bound_seconds": found.bound_seconds,
        "tokens_per_second": found.tokens_per_second,
        "tokens_per_second_per_gpu": found.tokens_per_second / found.ranks,
        "flops_per_second_per_gpu": found.flops_per_second / found.ranks,
        "busy": {lane: share for lane, (_, share) in found.lanes.items()},
        "binds": gains(found),
    }


def main() -> None:
    rows: dict[str, Any] = {}
    for model, size, gpus, numbers in CASES:
        workload = ModelSpec.of(model, sequence=SEQUENCE, precision="bf16", masters="whole").workload(size)
        first: StepPlan | None = None
        for nodes in numbers:
            given: dict[str, Any] = {"machine": MACHINE, "gpus": gpus, "nodes": nodes, "network": NETWORK}
            found = plan(workload, **given, micro_batch_size=size)
            first = first or found
            key = f"{model}; {nodes} x {gpus} GPUs"
            rows[key] = row(found)
            if len(numbers) > 1:
                weak = plan(workload, **given, micro_batch_size=size, num_micro_batches=first.num_micro_batches)
                efficiency = weak.tokens_per_second / weak.ranks / first.tokens_per_second * first.ranks
                rows[f"{key}; weak"] = {**row(weak), "efficiency": efficiency}
            print(key, json.dumps(rows[key]), flush=True)
            save(rows, OUTPUT)


if __name__ == "__main__":
    main()
