"""measured: the tables of docs/measured.md, and that of wear in docs/planner.md, from their benchmarks' results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common import table
from gs_compile.machine import format_bytes

Found = dict[str, Any]
LOADS = {"read": "read", "write": "write", "mixed": "both at once"}


def step_table(found: Found) -> str:
    """Of `benchmarks.step`: a row for each inner compiler."""
    head = ("inner compiler", "plain, s a step", "GreedySnake, s a step", "ratio", "plain, peak", "GreedySnake, peak")
    rows = []
    for compiler in found["setting"].get("compiler", ("eager", "inductor")):
        row = found[compiler]
        seconds, peaks = row["median_seconds"], row["peak_bytes"]
        times = (f"{seconds['plain']:.2f}", f"{seconds['greedysnake']:.2f}", f"{row['time_ratio']:.2f}")
        rows.append((compiler, *times, *(format_bytes(peaks[name]) for name in ("plain", "greedysnake"))))
    return table(head, rows)


def turns_table(found: Found) -> str:
    """Of `benchmarks.tiers`: two runs in turns, a row for each number of micro-batches."""
    columns: dict[str, list[str]] = {}
    for row in found["rows"]:
        lane, share = max(row["busy_share"].items(), key=lambda each: each[1] * each[0].startswith("ssd"))
        cells = {
            "n": str(row["micro_batches"]),
            **{f"`{name}`, s": f"{seconds:.3g}" for name, seconds in row["median_seconds"].items()},
            "ratio": f"{row['ratio']:.3f} x",
            "by rounds": f"{row['ratio_of_rounds']:.3f} x" if "ratio_of_rounds" in row else "",
            "the busier SSD lane works": f"{share:.0%} (`{lane}`)",
            "a commit takes": f"{row['commit_seconds'] * 1000:.1f} ms" if row.get("commit_seconds") else "",
        }
        for head, cell in cells.items():
            columns.setdefault(head, []).append(cell)
    filled = {head: cells for head, cells in columns.items() if any(cells)}
    return table(list(filled), zip(*filled.values(), strict=True))


def drive_table(found: Found) -> str:
    """Of `benchmarks.ssd`: ours against another in turns, in bytes a second."""
    middle = found["median_bytes_per_second"]
    names = list(next(iter(middle.values())))
    rows = [
        (LOADS.get(load, load), *(f"{rates[name] / 1e9:.2f} GB/s" for name in names), f"{found['ratio'][load]:.2f} x")
        for load, rates in middle.items()
    ]
    labels = {"store": "ours", "huge": "huge pages, as a run asks for", "small": "pages of 4 KiB"}
    labels |= {"beside": "beside computation"}
    return table(("", *(labels.get(name, name) for name in names), "ratio"), rows)


def updates_table(*results: Found) -> str:
    """Of `benchmarks.optimizer`: ours as parts of torch's time, a column for each result."""
    labels = {"bf16 gradient": "bf16 and bf16", "fp32 gradient": "fp32 and bf16", "fp32 only": "fp32 and fp32"}
    ratios = {label: [each["time_ratio"][name] for each in results] for name, label in labels.items()}
    ratios["bf16 and bf16, torch keeps its buffer"] = [each["time_ratio_buffer_kept"] for each in results]
    sleeping = (each["setting"].get("passive") for each in results)
    heads = ("of torch's time" + (", threads sleep while they wait" if each else "") for each in sleeping)
    rows = [(label, *(f"{ratio:.2f} x" for ratio in each)) for label, each in ratios.items()]
    return table(("gradient and parameter", *heads), rows)


def checksums_table(found: Found) -> str:
    """Of `benchmarks.checksums`: seconds with checksums over those without."""
    stores = {"this disk": found["store"]}
    stores |= {f"a simulated drive of {rate} GB/s": each for rate, each in found["simulated"].items()}
    rows = [(name, *(f"{each[load]['seconds_ratio']:.3f} x" for load in LOADS)) for name, each in stores.items()]
    steps = ", ".join(f"{row['seconds_ratio']:.3f} x at n = {number}" for number, row in found["steps"].items())
    whole = f"\n\nA step of training, everything on SSD: {steps}." if steps else ""
    return table(("time with checksums, of that without", *LOADS.values()), rows) + whole


def memory_table(*results: Found) -> str:
    """Of `benchmarks.memory`: a row for each model, the largest first."""
    head = (
        *("parameters", "`host_memory`", "built within", "host tier's peak", "whole process", "before the model"),
        *("on SSD", "s a step", "planned", "in memory, fp32 AdamW"),
    )
    rows = []
    for found in sorted(results, key=lambda each: -each["parameters"]):
        lines = dict(line.split(":", 1) for line in found["tiers"])
        rows.append(
            (
                f"{found['parameters'] / 1e9:.2f} B ({name_of(found['setting'])})",
                found["setting"]["host_memory"],
                format_bytes(found["peak_while_building_bytes"]),
                format_bytes(found["host_tier_peak_bytes"]),
                format_bytes(found["peak_of_later_steps_bytes"]),
                format_bytes(found["idle_bytes"]),
                lines["peaks"].split("ssd ")[1].split(";")[0],
                " and ".join(f"{seconds:.3g}" for seconds in found["step_seconds"][1:]),
                lines.get("planned", "").strip().removesuffix(" a step"),
                format_bytes(found["fp32_adamw_in_memory_bytes"]),
            )
        )
    return table(head, rows)


def name_of(setting: Found) -> str:
    """The model of a result of `benchmarks.memory`, and how it computes."""
    name = str(setting["config"]).rpartition("/")[2].removesuffix(".json") if setting.get("config") else setting["size"]
    return f"{name}, {'fp32' if setting['precision'] == 'model' else setting['precision']}"


def wear_table(found: Found) -> str:
    """Of `benchmarks.wear`."""
    head: Sequence[str] = (
        *("setting", "micro-batches", "tokens/s", "written a step", "written a day"),
        "rated life of the drives",
    )
    return table(head, found["rows"])
