"""A better machine never makes a plan slower."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planned import A100, gpt

from gs_compile.planner.plan import plan

TINY = gpt(4, 512, sequence=256, vocabulary=5000)
LANES = {
    "ssd": [f"ssd_{way}{mixed}_bytes_per_second" for way in ("read", "write") for mixed in ("", "_mixed")],
    "link": [f"{way}{mixed}_bytes_per_second" for way in ("h2d", "d2h") for mixed in ("", "_mixed")],
    "optimizer": ["update_elements_per_second", "update_mixed_elements_per_second"],
}
FAST = [0, 1, 2, 3]


@pytest.mark.parametrize("seed", [*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 200))])
def test_a_better_machine_is_never_slower(seed):
    """By more than 1 %: 200 changes of memory, bandwidth and rates, of machines with and without a device."""
    numbers = np.random.default_rng(seed)
    machine = replace(A100, device_nbytes=int(numbers.uniform(0.1, 0.4) * 10**9))
    if numbers.integers(2):
        machine = replace(A100, device="cpu", device_nbytes=0, matmul_flops_per_second={"bf16": 2e12})
    host_nbytes = int(numbers.uniform(150, 400) * 2**20)
    more = float(numbers.uniform(1.05, 3.0))
    resource = str(numbers.choice(["host", "device", "compute", *LANES]))
    better = replace(machine, **{name: more * getattr(machine, name) for name in LANES.get(resource, ())})
    if resource == "device":
        better = replace(better, device_nbytes=int(more * better.device_nbytes))
    if resource == "compute":
        rates = {name: more * rate for name, rate in better.matmul_flops_per_second.items()}
        better = replace(better, matmul_flops_per_second=rates)
    given = {"micro_batch_size": 1, "num_micro_batches": int(numbers.integers(2, 6))}
    before = plan(TINY, machine=machine, host_memory=host_nbytes, **given)
    after = plan(TINY, machine=better, host_memory=int(host_nbytes * (more if resource == "host" else 1)), **given)
    assert after.seconds <= 1.01 * before.seconds
