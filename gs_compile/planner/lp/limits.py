"""limits: what the linear program has to keep: budgets, and what is not for it to choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gs_compile.options import Recompute
from gs_compile.placement.cut import DEVICE_CLASSES
from gs_compile.placement.levels import Share

CLASSES = ("parameter", "checkpoint", "optimizer")  # of data that have a ratio in host memory
ACTIVATION = "activation"  # the ratio of the items that save activations, in host memory

TOGETHER = (("parameter", "device_parameter"), ("checkpoint", "device_checkpoint", ACTIVATION))  # parts of the same


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """What a run may use. Without wear_bytes_per_second SSDs are written as fast as they take it."""

    host_nbytes: int
    device_nbytes: int = 0
    ssd_nbytes: int
    wear_bytes_per_second: float | None = None

    def of(self, tier: str) -> int:
        """Bytes of a tier."""
        nbytes: int = getattr(self, f"{tier}_nbytes")
        return max(nbytes, 1)

    def values_nbytes(self, workspace_nbytes: int) -> int | None:
        """Of the device, without what code computes with; None: it has no memory of its own."""
        return max(self.device_nbytes - workspace_nbytes, 0) if self.device_nbytes else None


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What is not for the planner to choose.

    alpha: the late part of updates. clip: all updates are late, or early ones are speculative.
    ratios: of "parameter", "checkpoint", "optimizer", and those in device memory, "device_parameter" and
        "device_checkpoint": none where only the one in host memory is given, as what is left is on SSD then.
    recompute: "auto": what saving brings is compared with none; "all": layers save their inputs alone; "none": all that
        their backwards read. shares: of items that save, as an earlier plan has chosen.
    device: whether spare memory of a device that has its own may be a home too.
    """

    alpha: float | None = None
    ratios: Mapping[str, float] = field(default_factory=dict)
    clip: bool = False
    speculative: bool = False
    device: bool = False
    recompute: Recompute = "auto"
    shares: tuple[Share, ...] | None = None

    @property
    def saves_all(self) -> bool:
        """Whether nothing is to be computed again."""
        return self.recompute == "none"

    @property
    def saves(self) -> bool:
        """Whether activations are to be saved, whether that is faster or not."""
        return self.saves_all or bool(self.ratios.get(ACTIVATION))

    def recomputing(self) -> Fixed:
        """The same with nothing saved but layers' inputs."""
        ratios = {name: ratio for name, ratio in self.ratios.items() if name != ACTIVATION}
        return replace(self, recompute="all", ratios=ratios)

    @property
    def late(self) -> bool:
        """Whether clipping makes all updates wait for the norm of all gradients."""
        return self.clip and not self.speculative


def contradiction(fixed: Fixed, *, separate: bool, may_reside: bool, prefix: str = "the ratio ") -> str | None:
    """In a sentence, why ratios contradict each other or what there is; `prefix` makes a ratio's name the user's."""
    for name in DEVICE_CLASSES:
        ratio = fixed.ratios.get(name)
        if ratio and not separate:
            host = name.removeprefix("device_")
            return (
                f"{prefix}{name} is {ratio:g}, but this device has no memory of its own: it reads the host's, so give "
                f"{prefix.removeprefix('the ratio ')}{host}"
            )
    if (ratio := fixed.ratios.get("device_parameter")) and not may_reside:
        return (
            f"{prefix}device_parameter is {ratio:g}, but parameters that are updated in the type they are computed in "
            'go to host memory for that: leave it out, or choose precision="bf16"'
        )
    for names in TOGETHER:
        given = {name: ratio for name in names if (ratio := fixed.ratios.get(name))}
        if sum(given.values()) > 1:
            words = " and ".join(f"{name} {ratio:g}" for name, ratio in given.items())
            return f"the ratios {words} are more than there is: lower one"
    return None
