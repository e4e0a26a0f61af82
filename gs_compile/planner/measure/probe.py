"""probe: the rates of processors, of their link and of the network: products, updates, passes, copies, collectives.

[1] AdamW on a cpu lane, with the threads a run gives it
[2] the three matrix products of a linear layer, on the thread that asks: forward, and backward for input and weight
[3] copies between pinned memory and the device, each on its lane's stream
[4] the collectives of a step, by all ranks together: a piece is gathered, a gradient scattered
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager

import torch

from gs_compile.planner.measure.rates import Figure, Load, Placed, Work, at_once, medians, new_lane, own_generator, pair
from gs_compile.runtime.formats import Types, moment_types, types_of
from gs_compile.runtime.kernels import ADAMW
from gs_compile.runtime.lanes import Lane
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.slab import map_memory
from gs_compile.runtime.stream import Device, device_of, has_own_memory
from gs_compile.runtime.threads import update_threads

NUM_ROUNDS = 3
ROUNDS = f", up to {NUM_ROUNDS} rounds"
NUM_ELEMENTS = 16 << 20  # of [1]: 256 MiB, more than caches hold
HOST_SIZES = 256, 1024  # of [2]: tokens of a micro-batch, and a model's hidden size
DEVICE_SIZES = 4096, 4096  # the same on a device with memory of its own
FEW_ROWS = 16
TOO_SLOW = 25  # times slower than fp32: the processor has no instructions for the dtype; whole products take seconds
COPY_NBYTES = 64 << 20  # of [3]: as large as a request to the drives
NETWORK_NBYTES = 64 << 20  # of [4], of all ranks together: as large as a layer's piece
NETWORK_ROUNDS = 5  # a fixed number: by elapsed time, ranks would not agree on the last one
NUM_HOPS = 20
NUM_OPS = 512
OP_COST = 24  # bare hand-overs: the cost of an operation with memory, tickets and bookkeeping, by traces
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP32 = Types(torch.float32, (torch.float32,) * len(ADAMW.states))
HYPER = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@contextmanager
def work_of(device: torch.device) -> Iterator[dict[str, Placed]]:
    """What a run with this device does beside transfers, by its name in a profile: a layer's products, and updates."""
    with closing(new_lane("cpu", num_threads=_num_threads(device))) as cpu:
        works: dict[str, Placed] = {"compute": (None, products_on(device)), "update": (cpu, _update(NUM_ELEMENTS))}
        at_once(dict(works.values()), 0.0)  # the first touch of memory
        yield works


def compute_rates(device: torch.device, works: Mapping[str, Placed], seconds: float) -> dict[str, Figure]:
    """The profile's figures of computation and updates (`work_of`), alone and beside one another."""
    matmul = _matmul_rates(device, seconds / 2)
    (_, products), (cpu, update) = works["compute"], works["update"]
    compute, updates, both, copies = medians(
        [{None: products}, {cpu: update}, {None: products, cpu: update}, {None: _pass(device)}],
        seconds / 2,
        NUM_ROUNDS,
    )
    with closing(new_lane("cpu")) as lane:
        (ops,) = medians([{None: _handing_over(lane)}], 0.0, NUM_ROUNDS)
    elements = f"{NUM_ELEMENTS >> 20} Mi elements, {_num_threads(device)} threads, alone or beside products{ROUNDS}"
    handed = f"{OP_COST} times one of {NUM_OPS} operations that do nothing, handed to a lane and waited for{ROUNDS}"
    mixed_speed = min(1.0, both[None] / compute[None])
    return {
        "matmul_flops_per_second": matmul,
        "memory_bytes_per_second": Figure(
            copies[None], f"copies of {NUM_ELEMENTS >> 18} MiB, bytes read and written{ROUNDS}"
        ),
        **pair("update_elements_per_second", updates[cpu], both[cpu], elements),
        "compute_mixed_speed": Figure(mixed_speed, f"fp32 products beside updates and alone{ROUNDS}"),
        "op_seconds": Figure(OP_COST / ops[None], handed),
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
    how = f"copies of {COPY_NBYTES >> 20} MiB of pinned memory{ROUNDS}"
    up_pair = pair("h2d_bytes_per_second", alone_up[h2d], both[h2d], how)
    return up_pair | pair("d2h_bytes_per_second", alone_down[d2h], both[d2h], how)


def network_rates(ranks: Ranks, device: torch.device) -> dict[str, Figure]:  # [4]
    """The profile's figures of the network between ranks. All of them call this, each with memory on `device`."""
    numel = max(1, NETWORK_NBYTES // 4 // ranks.number)
    shard, whole = (torch.zeros(times * numel, device=device) for times in (1, ranks.number))
    own = device_of(device)

    def seconds(work: Callable[[], object], times: int) -> float:
        found = []
        for _ in range(times + 1):  # the first makes connections
            begin = time.perf_counter()
            work()
            own.synchronize()
            found.append(time.perf_counter() - begin)
        return statistics.median(found[1:])

    def both() -> None:
        ranks.all_gather(whole, shard, "the network's measurement")
        ranks.reduce_scatter(shard, whole, "the network's measurement")

    received = 2 * (ranks.number - 1) * shard.nbytes
    rate = received / seconds(both, NETWORK_ROUNDS)
    empty, one = torch.zeros(ranks.number, device=device), torch.zeros(1, device=device)
    ring = seconds(lambda: ranks.all_gather(empty, one, "the network's measurement"), NUM_HOPS)
    hop, size = min(ring / (ranks.number - 1), 0.5), f"{NETWORK_NBYTES >> 20} MiB, {NETWORK_ROUNDS} rounds"
    return {
        "net_bytes_per_second": Figure(rate, f"{ranks.total} ranks gather and scatter {size}"),
        "net_hop_seconds": Figure(hop, f"{ranks.total} ranks gather a number of each, {NUM_HOPS} rounds"),
    }


def products_on(device: torch.device, dtype: torch.dtype = torch.float32, rows: int | None = None) -> Work:  # [2]
    """The computation of a layer, with a row for each token, or with fewer rows."""
    tokens, width = _sizes(device)
    rows = rows or tokens
    generator = own_generator(device)
    x_TD = torch.randn(rows, width, device=device, generator=generator).to(dtype)  # T tokens, D hidden, F inner width
    w_DF = torch.randn(width, 4 * width, device=device, generator=generator).to(dtype)
    y_TF = x_TD @ w_DF

    def products() -> float:
        torch.mm(x_TD, w_DF)
        torch.mm(y_TF, w_DF.t())
        torch.mm(x_TD.t(), y_TF)
        device_of(device).synchronize()
        return 3 * 2 * rows * width * 4 * width

    return products


def _num_threads(device: torch.device) -> int:
    """Of the lane of updates, as a run has it."""
    return update_threads(beside_compute=not has_own_memory(device))


def _sizes(device: torch.device) -> tuple[int, int]:
    return DEVICE_SIZES if has_own_memory(device) else HOST_SIZES


def _matmul_rates(device: torch.device, seconds: float) -> Figure:
    """The rate of products by dtype; if a few rows show that a dtype is slow, by these."""
    rates: dict[str, float] = {}
    works: dict[str, Work] = {}
    for name, dtype in DTYPES.items():
        rates[name] = at_once({None: products_on(device, dtype, FEW_ROWS)}, 0.0)[None]
        if name == "fp32" or has_own_memory(device) or rates[name] * TOO_SLOW > rates["fp32"]:
            works[name] = products_on(device, dtype)
            rates[name] = at_once({None: works[name]}, 0.0)[None]
    found = medians([{None: work} for work in works.values()], seconds, NUM_ROUNDS)
    rates |= {name: rate[None] for name, rate in zip(works, found, strict=True)}
    rows, width = _sizes(device)
    sizes = ", ".join(f"{name} with {rows if name in works else FEW_ROWS} rows" for name in DTYPES)
    threads = f"{torch.get_num_threads()} threads"
    return Figure(rates, f"products of rows x {width} x {4 * width}, {sizes}; {threads}{ROUNDS}")


def conversion_nbytes(num_threads: int, update_bytes_per_second: float) -> float:
    """The bytes that an update could move in the time in which it converts an element's two moments of bfloat16."""
    numel, moments = NUM_ELEMENTS // 8, moment_types(torch.bfloat16, ADAMW.states)
    with closing(new_lane("cpu", num_threads=num_threads)) as cpu:
        work: Load = {cpu: _update(numel, types_of(torch.float32, moments, pairs=False))}
        at_once(work, 0.0)  # the first touch of memory
        (found,) = medians([work], 0.0, NUM_ROUNDS)
    passed = 2 * 4 + 4 + 2 * 2 * 2  # master and gradient, and both moments, read and written
    return max(update_bytes_per_second / found[cpu] - passed, 0.0)


def _update(numel: int, types: Types = FP32) -> Work:  # [1]
    """AdamW in memory that is mapped as in a run: with small pages an update takes twice as long."""
    generator = own_generator()
    master, gradient = (map_memory(4 * numel).view(torch.float32).normal_(generator=generator) for _ in range(2))
    state = types.components(map_memory(int(numel * types.state_itemsize)).zero_(), 0, numel)

    def update() -> float:
        ADAMW.update(master, gradient, state, HYPER, 1)
        return numel

    return update


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
    """Trivial operations: the overhead of an operation."""

    def hand_over() -> float:
        for ticket in [lane.submit("probe", int) for _ in range(NUM_OPS)]:
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
