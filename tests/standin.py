"""What takes the place of something real: a plan that is made up, whose print is tested, and a call that fails."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

from gs_compile.placement.levels import Share

GiB = 2**30


def stand_in() -> Any:
    """A plan with the fields that are told, all made up."""
    return SimpleNamespace(
        workload=SimpleNamespace(name="gpt-65b", micro_batch_size=2, sequence=2048, tokens=4096, masters="split"),
        profile=SimpleNamespace(name="a100", separate=True, tiers=("device", "host", "ssd")),
        budgets=SimpleNamespace(device_nbytes=80 * GiB, host_nbytes=400 * GiB, ssd_nbytes=4096 * GiB),
        simulation=SimpleNamespace(bubbles={"ssd_read s": 10.5}),
        schedule="vertical",
        ranks=1,
        masters="split",
        shares=(Share(1, "host", 0.125),),
        saved=0.125,
        layer_tokens=None,
        num_micro_batches=32,
        alpha=0.13,
        ratios={"parameter": 0.5, "checkpoint": 1.0, "optimizer": 0.0},
        device_ratios={"parameter": 0.25, "checkpoint": 0.0},
        seconds=312.456789,
        bound_seconds=300.0,
        tokens_per_second=419.49,
        flops_per_second=1.6421e14,
        traffic={("h2d", "w"): 240 * GiB, ("h2d", "x"): 10 * GiB, ("ssd_write", "s"): 730 * GiB},
        homes={
            ("w", "host"): 60 * GiB,
            ("w", "ssd"): 61 * GiB,
            ("s", "ssd"): 730 * GiB,
            ("x", "host"): 80 * GiB,
            ("dw", "host"): 3 * GiB,
        },
        peaks={"device": 30 * GiB, "host": 398 * GiB, "ssd": 791 * GiB},
        lanes={"ssd_write": (250.0, 0.8), "compute": (300.0, 0.96), "h2d": (31.25, 0.1)},
        binding=("48.0 GiB more host memory: 9% faster", "more device memory: nothing"),
        notes=("the horizontal order is half as fast",),
        alternatives=(SimpleNamespace(label="16 micro-batches", seconds=170.0, tokens_per_second=385.5),),
        wear="35.0 TiB written to SSD in a day",
        history=((1, 100.0, 41.0), (32, 300.0, 437.0)),
    )


def fails(error: Exception) -> Callable[..., NoReturn]:
    """A function that raises, whatever it is called with."""

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    return fail
