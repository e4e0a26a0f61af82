"""cluster: one rank's share of machines that train one model together.

A ring over all ranks, by which NCCL gathers and scatters, enters and leaves each node once. So it is as fast as the
slower of the link between the GPUs of a node, and the network of a node. Its steps are hops of both kinds.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from gs_compile.errors import PlanError
from gs_compile.machine import parse_bytes
from gs_compile.planner.measure.profile import Profile

NETWORK_HOP_SECONDS = 14e-6  # between nodes; NCCL's own estimate (hwLatencies of its tuning, ring, Simple)


def of_one_rank(machine: Profile, gpus: int, nodes: int, network: str | float | None) -> Profile:
    """One rank's share of `nodes` machines like this one, with `gpus` ranks on each.

    network: bytes a second that a node receives while it sends as many, or text such as "25GB/s".

    Raises `PlanError` if it is not known how fast ranks exchange data.
    """
    between_nodes = None if network is None else _rate(network)
    ranks, rate = gpus * nodes, machine.net_bytes_per_second
    if ranks == 1:
        return share_of(machine, 1)
    if gpus > 1 and rate == inf:
        raise PlanError(
            f"{machine.name} does not have the rate between its GPUs: add net_bytes_per_second to its profile, or "
            "measure it with torchrun --nproc-per-node 2 -m gs_compile probe"
        )
    if nodes > 1 and between_nodes is None:
        raise PlanError(f"{nodes} nodes: give the network between them, such as network 25GB/s")
    hops = (gpus - 1) * nodes * machine.net_hop_seconds
    if between_nodes is not None and nodes > 1:
        rate = min(rate, between_nodes)
        hops += (nodes - 1) * NETWORK_HOP_SECONDS
    return replace(
        share_of(machine, gpus),
        name=f"{nodes} x {gpus} GPUs, each node {machine.name}",
        net_bytes_per_second=rate,
        net_hop_seconds=hops / (ranks - 1),
    )


def share_of(machine: Profile, ranks: int) -> Profile:
    """The share of one of `ranks` ranks of a machine; each has a GPU, with its memory and its link, of its own."""
    part = machine.num_ranks / ranks
    names = ("host", "ssd", "update", *(() if machine.separate else ("memory",)))
    share: dict[str, Any] = {"num_ranks": ranks}
    for name, value in vars(machine).items():
        if name.startswith(names) and not name.endswith("_speed"):
            share[name] = int(value * part) if name.endswith("_nbytes") else value * part
    if not machine.separate:
        rates = machine.matmul_flops_per_second
        share["matmul_flops_per_second"] = {dtype: rate * part for dtype, rate in rates.items()}
    return replace(machine, **share)


def _rate(network: str | float | None) -> float:
    """Bytes a second."""
    if isinstance(network, str):
        return parse_bytes(network.removesuffix("/s"), name="network")
    if not network or network <= 0:
        raise PlanError(f"network is {network}; it must be bytes per second, or text such as 25GB/s")
    return network
