"""Plans that save activations beside those that compute all again, on machines that are not here: docs/saved.md.

    python -m benchmarks.saved [MACHINE ...]   # seconds are simulated; prints a table, and writes results/saved.json

Each model has the batch that saturates the machine where everything is computed again, and two and four times that.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from transformers import LlamaConfig

from benchmarks.common import RESULTS, gains, save
from gs_compile.planner.cost.workload import ModelSpec
from gs_compile.planner.plan import plan
from gs_compile.planner.step_plan import StepPlan

OUTPUT = RESULTS / "saved.json"
SEQUENCE = 2048
LLAMA3 = {
    "llama-3 8B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    "llama-3 70B": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "intermediate_size": 28672,
    },
}
CASES = (  # model, machine, samples of a micro-batch
    ("gpt-65b", "a100", 4),
    ("gpt-65b", "a5000", 2),
    ("gpt-175b", "a100", 2),
    ("llama-3 8B", "rtx4090", 2),
    ("llama-3 70B", "rtx4090", 2),
    ("llama-3 8B", "h200", 4),
    ("llama-3 70B", "h200", 4),
)
BOTH = ("seconds_without", "seconds")
TIMES = (1, 2, 4)  # the saturating batch


def config(model: str) -> Any:
    """A name that the planner knows, or the config of a Llama 3."""
    if model not in LLAMA3:
        return model
    return LlamaConfig(vocab_size=128256, num_key_value_heads=8, max_position_embeddings=8192, **LLAMA3[model])


def row(found: StepPlan, without: StepPlan) -> dict[str, Any]:
    """What the table says of a plan."""
    shares: Counter[str] = Counter()
    for share in found.shares:
        shares[f"level {share.level} on {share.tier}"] += round(share.part, 4)
    return {
        "num_micro_batches": found.num_micro_batches,
        "micro_batch_size": found.workload.micro_batch_size,
        "seconds_without": without.seconds,
        "seconds": found.seconds,
        "faster": without.seconds / found.seconds,
        "tokens_per_second": found.tokens_per_second,
        "shares": dict(shares),
        "binds": gains(found),
        "notes": [note for note in found.notes if "activations" in note],
    }


def line(key: str, each: dict[str, Any]) -> str:
    """A row of the table."""
    shares = ", ".join(f"{part:.0%} {what}" for what, part in each["shares"].items()) or "-"
    binds = max(each["binds"], key=lambda what: int(each["binds"][what].split("%")[0]), default="-")
    seconds = " | ".join(f"{each[name]:#,.3g}" if each[name] < 100 else f"{each[name]:,.0f}" for name in BOTH)
    seconds += f" | {each['faster']:.2f} x"
    return f"| {key} | {each['num_micro_batches']} x {each['micro_batch_size']} | {seconds} | {shares} | {binds} |"


def main() -> None:
    rows: dict[str, Any] = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
    for model, machine, size in CASES:
        if sys.argv[1:] and machine not in sys.argv[1:]:
            continue
        rows = {key: each for key, each in rows.items() if not key.startswith(f"{model}, {machine},")}
        spec = ModelSpec.of(config(model), sequence=SEQUENCE, precision="bf16")
        given: dict[str, Any] = {"machine": machine, "micro_batch_size": size}
        workload = spec.levelled(spec.workload(size))
        saturated = plan(workload, **given, recompute="all").num_micro_batches
        for times in TIMES:
            number = times * saturated
            without, found = (plan(workload, **given, num_micro_batches=number, recompute=r) for r in ("all", "auto"))
            key = f"{model}, {machine}"
            rows[f"{key}, {number} micro-batches"] = each = row(found, without)
            print(line(key, each), flush=True)
            save(rows, OUTPUT)


if __name__ == "__main__":
    main()
