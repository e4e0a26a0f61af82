"""wear: what a day of training writes to the drives, and how long they last, by settings; simulated, nothing runs.

    python -m benchmarks.wear --output benchmarks/results/wear.json    # gpt-65b on rtx4090
    python -m benchmarks.wear --model llama-8b --machine laptop

Drives are rated for so many bytes by who makes them; a machine whose drives are not gives no life.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import conditions, parser_of, save, setting_of
from benchmarks.measured import wear_table
from gs_compile.errors import PlanError
from gs_compile.machine import format_bytes
from gs_compile.planner.plan import Planner, planner_of
from gs_compile.planner.reasons import sparing
from gs_compile.planner.request import Request
from gs_compile.planner.step_plan import StepPlan, time_text


def settings(planner: Planner, first: StepPlan) -> Iterator[tuple[str, dict[str, Any]]]:
    """A label and what is asked for, each beside the plan that nothing was asked for; among them what that proposes for
    drives to last twice as long.
    """
    yield "masters whole", {"masters": "whole"}
    yield "states in bf16", {"states": "bf16"}
    yield "states in 8 bits", {"states": "8bit"}
    for asked, _, _ in sparing(first, planner.narrower(first.problem)):
        words = {None: "", "bf16": ", states in bf16", "8bit": ", states in 8 bits"}[asked.get("states")]
        yield f"twice the life{words}", asked
    yield "LoRA of rank 16", {"lora": 16}


def row(label: str, found: StepPlan) -> tuple[str, ...]:
    """The cells of one plan."""
    rated, per_day = found.profile.ssd_rated_nbytes, found.written_per_day
    return (
        label,
        f"{found.num_micro_batches} x {found.problem.workload.micro_batch_size}",
        f"{found.tokens_per_second:.0f}",
        format_bytes(found.written),
        format_bytes(int(per_day)),
        time_text(rated / per_day) if rated and per_day else "",
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="gpt-65b")
    parser.add_argument("--machine", default="rtx4090")
    parser.add_argument("--sequence", type=int, default=2048)
    arguments = parser.parse_args()
    planner = planner_of(arguments.model, Request(machine=arguments.machine, sequence=arguments.sequence))
    first = planner.plan()
    rows = [row("as planned", first)]
    for label, asked in settings(planner, first):
        try:
            rows.append(row(label, planner.asked(**asked).plan()))
        except PlanError as error:
            rows.append((label, str(error), "", "", "", ""))
    found = {**conditions(), "setting": setting_of(arguments), "rows": rows}
    print(wear_table(found))
    save(found, arguments.output)


if __name__ == "__main__":
    main()
