"""probe_network: what ranks give each other, by the collectives of a step: a piece is gathered, a gradient scattered.

All ranks measure together, each with its own memory, on the device that the model computes on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from gs_compile.planner.measure.rates import Figure
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.stream import device_of

WHOLE_NBYTES = 64 << 20  # of all ranks together, as large as a layer's piece
NUM_ROUNDS = 5  # of so many: waiting for time to pass, ranks would not agree on the last one
NUM_HOPS = 20


def network_rates(ranks: Ranks, device: torch.device) -> dict[str, Figure]:
    """The profile's figures of the network between the ranks; all of them call it."""
    numel = max(1, WHOLE_NBYTES // 4 // ranks.number)
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
    rate = received / seconds(both, NUM_ROUNDS)
    empty, one = torch.zeros(ranks.number, device=device), torch.zeros(1, device=device)
    ring = seconds(lambda: ranks.all_gather(empty, one, "the network's measurement"), NUM_HOPS)
    hop, mib = min(ring / (ranks.number - 1), 0.5), WHOLE_NBYTES >> 20
    return {
        "net_bytes_per_second": Figure(rate, f"{ranks.total} ranks gather and scatter {mib} MiB, {NUM_ROUNDS} rounds"),
        "net_hop_seconds": Figure(hop, f"{ranks.total} ranks gather a number of each, {NUM_HOPS} rounds"),
    }
