"""The optimizer step on flat buffers against torch's fused AdamW with the conversions done apart, side by side.

Three settings, all with float32 master and state in host memory: a bfloat16 gradient and a bfloat16 parameter written
(torch: the gradient converted before, the parameter copied after), a float32 gradient and a bfloat16 parameter written,
and float32 alone. Torch's converted gradient is once a new tensor every step, as `gradient.to(float32)` makes it, and
once a tensor that is kept, which takes 4 bytes a parameter for good. Then float32 alone with moments in bfloat16 and in
8 bits, which torch does not have, and the cost of the gradient's sum of squares, beside torch's norm. Times are medians
over rounds in which all run one after the other, so that what else the machine does meets all alike.

    python -m benchmarks.optimizer --output benchmarks/results/optimizer.json
    python -m benchmarks.optimizer --passive --output benchmarks/results/optimizer-passive.json
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import conditions, medians, parser_of, save, setting_of
from gs_compile.runtime import kernels
from gs_compile.runtime.formats import StateType, moment_types, types_of
from gs_compile.runtime.kernels import ADAMW, QUANTUM, sum_of_squares

POLICY = "OMP_WAIT_POLICY"
HYPER = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
BOUND = {"bf16 gradient": 1.0, "fp32 gradient": 1.0, "fp32 only": 1.02}  # of torch's time; 1.02: within noise


def fused(master: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> None:
    """torch.optim.AdamW(fused=True) on one parameter, without its bookkeeping."""
    beta1, beta2 = HYPER["betas"]
    torch._fused_adamw_(
        [master],
        [gradient],
        [mean],
        [square],
        [],
        [torch.tensor(1.0)],
        lr=HYPER["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=HYPER["weight_decay"],
        eps=HYPER["eps"],
        amsgrad=False,
        maximize=False,
    )


def variants(num_elements: int) -> dict[str, Callable[[], Any]]:
    """The functions that are timed, by name; all work on the same buffers."""
    master, mean, square = torch.randn(num_elements), torch.zeros(num_elements), torch.zeros(num_elements)
    fp32, kept = torch.randn(num_elements), torch.empty(num_elements)
    bf16, low = fp32.bfloat16(), master.bfloat16()

    narrow = dict[StateType, list[Tensor]]()
    for state_type in (torch.bfloat16, "8bit"):
        types = types_of(torch.float32, moment_types(state_type, ADAMW.states), pairs=False)
        stored = torch.zeros(int(num_elements * types.state_itemsize), dtype=torch.uint8)
        narrow[state_type] = types.components(stored, 0, num_elements)

    def torch_bf16_kept() -> None:
        fused(master, kept.copy_(bf16), mean, square)
        low.copy_(master)

    def torch_bf16() -> None:
        fused(master, bf16.to(torch.float32), mean, square)
        low.copy_(master)

    def torch_fp32() -> None:
        fused(master, fp32, mean, square)
        low.copy_(master)

    return {
        "bf16 gradient, torch": torch_bf16,
        "bf16 gradient, torch, buffer kept": torch_bf16_kept,
        "bf16 gradient, ours": lambda: ADAMW.update(master, bf16, [mean, square], HYPER, 1, low),
        "fp32 gradient, torch": torch_fp32,
        "fp32 gradient, ours": lambda: ADAMW.update(master, fp32, [mean, square], HYPER, 1, low),
        "fp32 only, torch": lambda: fused(master, fp32, mean, square),
        "fp32 only, ours": lambda: ADAMW.update(master, fp32, [mean, square], HYPER, 1),
        "fp32, states in bf16": lambda: ADAMW.update(master, fp32, narrow[torch.bfloat16], HYPER, 1),
        "fp32, states in 8 bits": lambda: ADAMW.update(master, fp32, narrow["8bit"], HYPER, 1),
        "norm of fp32, torch": lambda: torch.linalg.vector_norm(fp32),
        "norm of fp32, ours": lambda: sum_of_squares(fp32),
        "norm of bf16, ours": lambda: sum_of_squares(bf16),
        "fp32 read once": lambda: torch.dot(fp32, fp32),
    }


def measure(timed: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round. The order is drawn anew every round, so that nothing always runs after the same."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    order = random.Random(0)
    for _ in range(rounds + 1):
        for name in order.sample(list(timed), len(timed)):
            start = time.perf_counter()
            timed[name]()
            seconds[name].append(round(time.perf_counter() - start, 6))
    return {name: each[1:] for name, each in seconds.items()}  # the first round touches memory for the first time


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--passive", action="store_true", help="threads sleep while they wait")
    arguments = parser.parse_args()
    if arguments.passive and os.environ.get(POLICY) != "passive":  # OpenMP reads it when it is loaded
        os.execve(sys.executable, [sys.executable, "-m", *sys.orig_argv[2:]], {**os.environ, POLICY: "passive"})
    torch.set_num_threads(arguments.threads)
    num_elements = arguments.elements // QUANTUM * QUANTUM

    before = conditions()
    seconds = measure(variants(num_elements), arguments.rounds)
    middle = medians(seconds)
    ratios = {name: middle[f"{name}, ours"] / middle[f"{name}, torch"] for name in BOUND}
    kept = middle["bf16 gradient, ours"] / middle["bf16 gradient, torch, buffer kept"]

    for name, median in middle.items():
        print(f"{name:34} {median * 1e3:7.1f} ms   least {min(seconds[name]) * 1e3:7.1f} ms")
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3f} of torch's time (bound {BOUND[name]})")
    print(f"bf16 gradient: {kept:.3f} of torch's time with the converted gradient's buffer kept")

    result = {
        **before,
        "setting": {**setting_of(arguments), "elements": num_elements, "chunk_elements": kernels.CHUNK},
        "seconds": seconds,
        "median_seconds": middle,
        "time_ratio": ratios,
        "time_ratio_buffer_kept": kept,
        "bound": BOUND,
    }
    save(result, arguments.output)


if __name__ == "__main__":
    main()
