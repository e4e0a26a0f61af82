"""probe_compute: what the processors and the link between them give: products of matrices, updates, passes and copies.

[1] AdamW on a cpu lane, with the threads a run gives it
[2] the three matrix products of a linear layer, on the thread that asks: forward, and backward for input and weight
[3] copies between pinned memory and the device, each on its lane's stream
"""

from __future__ import annotations

from contextlib import closing

import torch

from gs_compile.planner.measure.rates import Figure, Load, Work, at_once, medians, mixed_pair, new_lane
from gs_compile.runtime.kernels import ADAMW
from gs_compile.runtime.lanes import Lane
from gs_compile.runtime.slab import map_memory
from gs_compile.runtime.stream import Device, device_of, has_own_memory
from gs_compile.runtime.threads import update_threads

NUM_ROUNDS = 3
NUM_ELEMENTS = 16 << 20  # of [1]: 256 MiB, more than caches hold
HOST_SIZES = 256, 1024  # of [2]: tokens of a micro-batch, and a model's hidden size
DEVICE_SIZES = 4096, 4096  # the same on a device with memory of its own
FEW_ROWS = 16
TOO_SLOW = 25  # times slower than fp32: the processor has no instructions for the dtype, and whole pieces take seconds
COPY_NBYTES = 64 << 20  # of [3]: as large as a request to the drives
NUM_OPS = 512
OP_COST = 6  # bare ones: what memory, tickets and bookkeeping make of an operation (benchmarks/prediction.py)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HYPER = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def compute_rates(device: torch.device, seconds: float) -> dict[str, Figure]:
    """The profile's figures of computation and updates, alone and beside one another."""
    rows, width = _sizes(device)
    num_threads = update_threads(beside_compute=not has_own_memory(device))  # as a run has it
    matmul, sizes = _matmul_rates(device, rows, width, seconds / 2)
    products, update = products_on(device), _update(NUM_ELEMENTS)
    with closing(new_lane("cpu", num_threads=num_threads)) as cpu:
        at_once({None: products, cpu: update}, 0.0)  # the first touch of memory
        compute, updates, both, copies = medians(
            [{None: products}, {cpu: update}, {None: products, cpu: update}, {None: _pass(device)}],
            seconds / 2,
            NUM_ROUNDS,
        )
        (ops,) = medians([{None: _handing_over(cpu)}], 0.0, NUM_ROUNDS)
    rounds = f", up to {NUM_ROUNDS} rounds"
    elements = f"{NUM_ELEMENTS >> 20} Mi elements, {num_threads} threads"
    handed = f"{OP_COST} times one of {NUM_OPS} operations that do nothing, handed to a lane and waited for"
    copied = f"copies of {NUM_ELEMENTS >> 18} MiB, bytes read and written"
    mixed_speed = min(1.0, both[None] / compute[None])
    return {
        "matmul_flops_per_second": Figure(matmul, f"{sizes}; {torch.get_num_threads()} threads{rounds}"),
        "memory_bytes_per_second": Figure(copies[None], copied + rounds),
        "update_elements_per_second": Figure(updates[cpu], elements + rounds),
        "update_mixed_elements_per_second": Figure(
            min(both[cpu], updates[cpu]), f"{elements}, beside products{rounds}"
        ),
        "compute_mixed_speed": Figure(mixed_speed, f"fp32 products beside updates and alone{rounds}"),
        "op_seconds": Figure(OP_COST / ops[None], handed + rounds),
    }


def link_rates(device: torch.device, seconds: float) -> dict[str, Figure]:
    """The profile's figures of the link between host memory and a device."""
    own = device_of(device)
    source, into = (map_memory(COPY_NBYTES, own) for _ in range(2))
    lanes = (new_lane(name, device=own, stream=own.new_stream()) for name in ("h2d", "d2h"))
    with closing(next(lanes)) as h2d, closing(next(lanes)) as d2h:
        up, down = (torch.empty(COPY_NBYTES, dtype=torch.uint8, device=device) for _ in range(2))
        works: Load = {h2d: _copy(own, source, up), d2h: _copy(own, down, into)}
        at_once(works, 0.0)
        alone_up, alone_down, both = medians([{h2d: works[h2d]}, {d2h: works[d2h]}, works], seconds, NUM_ROUNDS)
    how = f"copies of {COPY_NBYTES >> 20} MiB of pinned memory, up to {NUM_ROUNDS} rounds"
    return mixed_pair("h2d", alone_up[h2d], both[h2d], how) | mixed_pair("d2h", alone_down[d2h], both[d2h], how)


def products_on(device: torch.device) -> Work:
    """Computation as that of a layer, in fp32."""
    return _products(device, torch.float32, *_sizes(device))


def _sizes(device: torch.device) -> tuple[int, int]:
    return DEVICE_SIZES if has_own_memory(device) else HOST_SIZES


def _update(numel: int) -> Work:  # [1]
    master, gradient, mean, square = (torch.zeros(numel) for _ in range(4))
    master.normal_()
    gradient.normal_()

    def update() -> float:
        ADAMW.update(master, gradient, [mean, square], HYPER, 1)
        return numel

    return update


def _products(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Work:  # [2]
    x_TD = torch.randn(rows, width, device=device).to(dtype)  # T tokens, D hidden, F inner width
    w_DF = torch.randn(width, 4 * width, device=device).to(dtype)
    y_TF = x_TD @ w_DF

    def products() -> float:
        torch.mm(x_TD, w_DF)
        torch.mm(y_TF, w_DF.t())
        torch.mm(x_TD.t(), y_TF)
        device_of(device).synchronize()
        return 3 * 2 * rows * width * 4 * width

    return products


def _matmul_rates(device: torch.device, rows: int, width: int, seconds: float) -> tuple[dict[str, float], str]:
    """The rate of products by dtype, and how large they were: whole, or with few rows where those show a slow dtype."""
    rates: dict[str, float] = {}
    works: dict[str, Work] = {}
    for name, dtype in DTYPES.items():
        few = _products(device, dtype, FEW_ROWS, width)
        rates[name] = at_once({None: few}, 0.0)[None]
        if name == "fp32" or has_own_memory(device) or rates[name] * TOO_SLOW > rates["fp32"]:
            works[name] = _products(device, dtype, rows, width)
            rates[name] = at_once({None: works[name]}, 0.0)[None]
    found = medians([{None: work} for work in works.values()], seconds, NUM_ROUNDS)
    rates |= {name: rate[None] for name, rate in zip(works, found, strict=True)}
    sizes = ", ".join(f"{name} with {rows if name in works else FEW_ROWS} rows" for name in DTYPES)
    return rates, f"products of rows x {width} x {4 * width}, {sizes}"


def _pass(device: torch.device) -> Work:
    """A copy: memory is read and written once."""
    source = torch.zeros(NUM_ELEMENTS, device=device)
    target = torch.zeros_like(source)

    def copy() -> float:
        target.copy_(source)
        device_of(device).synchronize()
        return 2 * source.nbytes

    return copy


def _handing_over(lane: Lane) -> Work:
    """Trivial operations: what a run pays for each, beside its work."""

    def hand_over() -> float:
        tickets = [lane.submit("probe", _nothing) for _ in range(NUM_OPS)]
        for ticket in tickets:
            ticket.wait()
        return NUM_OPS

    return hand_over


def _copy(device: Device, source: torch.Tensor, target: torch.Tensor) -> Work:  # [3]
    def copy() -> float:
        device.copy(target, source)
        if stream := device.current_stream():
            device.record(stream).synchronize()
        return source.nbytes

    return copy


def _nothing() -> None:
    pass
