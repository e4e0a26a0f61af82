"""probe: what ``greedysnake probe`` shows: every figure of a profile in units for people, with its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gs_compile.machine import format_bytes
from gs_compile.planner.measure.profile import Profile


def rows(profile: Profile) -> Iterator[tuple[str, str, str]]:
    """Name, figure with its unit, and source."""
    for name, value in profile.as_dict().items():
        source = profile.sources.get(name, "")
        if isinstance(value, Mapping) and name != "sources":
            yield from (
                (f"{name.removesuffix('_per_second')} {key}", figure(name, each), source) for key, each in value.items()
            )
        elif name not in ("format", "sources"):
            yield name.removesuffix("_per_second"), figure(name, value), source


def figure(name: str, value: object) -> str:
    """A value with the unit that the end of its name tells."""
    if not isinstance(value, int | float):
        return str(value)
    if name.endswith("_nbytes"):
        return format_bytes(int(value)) if value else "-"  # none, or unknown
    if name.endswith("bytes_per_second"):
        return f"{value / 1e9:.3g} GB/s"
    if name.endswith("flops_per_second"):
        return f"{value / 1e12:.3g} TFLOP/s"
    if name.endswith("elements_per_second"):
        return f"{value / 1e9:.3g} billion/s"
    if name.endswith("_seconds"):
        return f"{value * 1e6:.3g} µs"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
