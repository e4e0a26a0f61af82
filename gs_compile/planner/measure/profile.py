"""profile: the figures of a machine, measured once, or declared in a file with a source for each number.

A profile is a small JSON file that people may write:

    {"format": 1, "name": "workstation", "device": "cuda", "host_nbytes": 68719476736, ...,
     "sources": {"host_nbytes": "4 x 16 GiB DDR4"}}

Two lanes that share a resource have two rates each: alone, and beside the other (`mixed`). What a drive reads while it
writes is neither what it reads alone nor half of that.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from itertools import permutations, product
from pathlib import Path
from typing import Any, Literal

from gs_compile.errors import ProfileError
from gs_compile.program.ir import TIERS

FORMAT = 1  # of the file; a newer one is refused
DTYPES = ("fp32", "bf16", "fp16")  # those with a matrix rate


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One machine as one rank sees it; rates are sustained ones, not peaks of a data sheet.

    device: "cuda", with its own memory, or "cpu", where the device is the host.
    host_nbytes, device_nbytes, ssd_nbytes: what a run may use of each tier; device_nbytes is 0 without device memory.
    matmul_flops_per_second: of large matrix products, by dtype ("fp32", "bf16", "fp16").
    h2d, d2h, ssd_read, ssd_write: bytes per second of each lane alone, and beside the other direction (`mixed`).
    update_elements_per_second: of AdamW in fp32, alone and beside computation (`mixed`).
    compute_mixed_speed: factor of the computation's speed while the optimizer runs; 1.0 if they do not interfere.
    compute_read_speed, compute_write_speed: the same while SSDs are read, or written; on a CPU, transfers need a core.
    update_read_speed, update_write_speed: the same of updates.
    read_compute_speed, write_compute_speed, read_update_speed, write_update_speed: factors of these transfers' speeds
        while the device computes, or while updates run.
    memory_bytes_per_second: of a pass over the memory of the device, by the device.
    op_seconds: the cost of issuing one operation.
    request_seconds: of a request to the SSD beyond its bytes at the lane's rate, where the device computes meanwhile.
    net_bytes_per_second: what a rank receives from other ranks while it sends as much; infinite without other ranks.
    net_hop_seconds: from one rank to the next; a ring takes as many hops as there are other ranks.
    ssd_rated_nbytes: bytes that may be written to the drives in their life (their endurance); 0 if unknown.
    num_ranks: ranks that share host memory and drives; all figures are one rank's share.
    """

    name: str
    device: Literal["cuda", "cpu"]
    host_nbytes: int
    ssd_nbytes: int
    device_nbytes: int = 0
    matmul_flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    ssd_read_bytes_per_second: float
    ssd_write_bytes_per_second: float
    ssd_read_mixed_bytes_per_second: float
    ssd_write_mixed_bytes_per_second: float
    h2d_bytes_per_second: float = math.inf
    d2h_bytes_per_second: float = math.inf
    h2d_mixed_bytes_per_second: float = math.inf
    d2h_mixed_bytes_per_second: float = math.inf
    update_elements_per_second: float
    update_mixed_elements_per_second: float
    compute_mixed_speed: float = 1.0
    compute_read_speed: float = 1.0
    compute_write_speed: float = 1.0
    update_read_speed: float = 1.0
    update_write_speed: float = 1.0
    read_compute_speed: float = 1.0
    write_compute_speed: float = 1.0
    read_update_speed: float = 1.0
    write_update_speed: float = 1.0
    op_seconds: float = 0.0
    request_seconds: float = 0.0
    net_bytes_per_second: float = math.inf
    net_hop_seconds: float = 0.0
    ssd_rated_nbytes: int = 0
    num_ranks: int = 1
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not _is_possible(entry.name, value):
                raise ProfileError(f"{entry.name} is {value!r}, which is not possible")
        for name in ("h2d", "d2h", "h2d_mixed", "d2h_mixed"):
            if self.separate and math.isinf(getattr(self, f"{name}_bytes_per_second")):
                raise ProfileError(f"{name}_bytes_per_second is missing: a cuda device has a link to its host")
        if self.separate and not self.device_nbytes:
            raise ProfileError("device_nbytes is missing: a cuda device has memory of its own")
        for alone, mixed in MIXED.items():
            if getattr(self, mixed) > getattr(self, alone):
                raise ProfileError(
                    f"{mixed} is {getattr(self, mixed):g}, more than {alone}, {getattr(self, alone):g}: a rate cannot "
                    "be higher while another lane works"
                )

    @property
    def separate(self) -> bool:
        """Whether the device has memory of its own."""
        return self.device != "cpu"

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers of a step's data. Without memory of its own, the device's is the host's."""
        return TIERS if self.separate else TIERS[1:]

    def speeds(self) -> dict[tuple[str, str], float]:
        """The speed of the first lane while the second runs, as a fraction of its speed alone; pairs that are missing
        do not disturb each other.
        """
        speeds: dict[tuple[str, str], float] = {}
        for lane, other in (*permutations(("ssd_read", "ssd_write")), *permutations(("h2d", "d2h"))):
            mixed, alone = (getattr(self, f"{lane}{each}_bytes_per_second") for each in ("_mixed", ""))
            speeds[lane, other] = 1.0 if math.isinf(mixed) else mixed / alone
        speeds["cpu", "compute"] = self.update_mixed_elements_per_second / self.update_elements_per_second
        speeds["compute", "cpu"] = self.compute_mixed_speed
        speeds |= {lanes: getattr(self, name) for name, lanes in BESIDE.items()}
        if not self.separate:  # a copy takes bandwidth and a core from the computation
            speeds["compute", "d2h"] = speeds["d2h", "compute"] = 0.5
        return {pair: speed for pair, speed in speeds.items() if speed < 1}

    def transfer_rate(self, lane: str) -> float:
        """Bytes a second of a transfer lane alone; within one memory, a copy reads and writes at the memory's rate."""
        rate: float = getattr(self, f"{lane}_bytes_per_second")
        return self.memory_bytes_per_second / 2 if math.isinf(rate) else rate

    def as_dict(self) -> dict[str, Any]:
        """The profile for JSON; infinite rates are left out."""
        values = {k: v for k, v in asdict(self).items() if not (isinstance(v, float) and math.isinf(v))}
        if "net_bytes_per_second" not in values:
            del values["net_hop_seconds"]
        return {"format": FORMAT, **values}

    @property
    def text(self) -> str:
        """The text of a file, for `load`."""
        return json.dumps(self.as_dict(), indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.text)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """The profile in a file; raises `ProfileError` if it is not a profile, or has a newer format."""
        try:
            values = json.loads(Path(path).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ProfileError(f"{path}: no machine profile can be read there: {error}") from error
        try:
            return cls.of(values)
        except ProfileError as error:
            raise ProfileError(f"{path}: {error.message}") from None

    @classmethod
    def of(cls, given: Any) -> Profile:
        """The profile that a dict describes."""
        if not isinstance(given, Mapping):
            raise ProfileError("a machine profile is a JSON object")
        values = dict(given)
        version = values.pop("format", None)
        if version != FORMAT:
            newer = isinstance(version, int) and version > FORMAT
            hint = "it is newer than this release reads: update greedysnake" if newer else "probe the machine again"
            raise ProfileError(f"format is {version!r}, not {FORMAT}; {hint}")
        known = {entry.name: entry for entry in fields(cls)}
        for key in values:
            if key not in known:
                close = difflib.get_close_matches(str(key), list(known), n=1)
                raise ProfileError(f"unknown entry {key}" + (f"; did you mean {close[0]}?" if close else ""))
        for name, entry in known.items():
            if entry.default is MISSING and entry.default_factory is MISSING and name not in values:
                raise ProfileError(f"{name} is missing")
        return cls(**values)


MIXED = {
    f"{lane}_bytes_per_second": f"{lane}_mixed_bytes_per_second" for lane in ("ssd_read", "ssd_write", "h2d", "d2h")
} | {"update_elements_per_second": "update_mixed_elements_per_second"}

LANE_OF = {"compute": "compute", "update": "cpu", "read": "ssd_read", "write": "ssd_write"}  # by their names in entries
# The entries for work of a processor and transfers at once, by both lanes: the first one's speed beside the second.
BESIDE = {
    f"{name}_{other}_speed": (LANE_OF[name], LANE_OF[other])
    for both in product(("compute", "update"), ("read", "write"))
    for name, other in permutations(both)
}


def _is_possible(name: str, value: Any) -> bool:
    """Whether a machine can have this value."""
    match name:
        case "name":
            return isinstance(value, str) and bool(value)
        case "device":
            return value in ("cuda", "cpu")
        case "sources":
            return isinstance(value, Mapping) and all(isinstance(each, str) for each in value.values())
        case "matmul_flops_per_second":
            is_table = isinstance(value, Mapping) and bool(value) and set(value) <= set(DTYPES)
            return is_table and all(_is_number(each) and 0 < each < math.inf for each in value.values())
        case "host_nbytes" | "ssd_nbytes" | "num_ranks":
            return type(value) is int and value >= 1
        case "device_nbytes" | "ssd_rated_nbytes":
            return type(value) is int and value >= 0
        case _ if name.endswith("_speed"):
            return _is_number(value) and 0 < value <= 1
        case "op_seconds" | "request_seconds" | "net_hop_seconds":
            return _is_number(value) and 0 <= value < 1
    has_bound = not name.startswith(("h2d", "d2h", "net"))
    return _is_number(value) and (0 < value < math.inf or (value == math.inf and not has_bound))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
