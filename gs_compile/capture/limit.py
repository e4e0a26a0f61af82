"""limit: Dynamo compiles a frame so many times, for what it is called with; after that it runs as it is written."""

from __future__ import annotations

from typing import Any

from torch._dynamo import config as dynamo_config
from torch._guards import CompileContext

from gs_compile.capture.frame_settings import compiled_frame


def is_last_compile() -> bool:
    """Whether Dynamo will compile the frame that it compiles now no more: it has reached its limit."""
    if CompileContext.current_compile_id() is None:
        return False
    others: Any = compiled_frame("cache_size")["cache_size"]
    return bool(others.num_cache_entries_with_same_id_matched_objs + 1 >= dynamo_config.recompile_limit)


def last_reason() -> str:
    """The guard that has Dynamo compile the frame that it compiles now once more; empty for the first time."""
    return (
        ""
        if CompileContext.current_compile_id() is None
        else _guard(compiled_frame("cache_size").get("recompile_reason"))
    )


def note_last_compile(error: BaseException, is_last: bool) -> None:
    """Add to the refusal of a frame that Dynamo compiles no more: the next call would run it as it is."""
    if is_last:
        error.add_note(
            f"Dynamo has compiled this model {dynamo_config.recompile_limit} times, which is its limit: from now on it "
            "runs without greedysnake. Call torch._dynamo.reset() before the next try"
        )


def over_limit(reason: str) -> str:
    """Words on a frame that Dynamo compiles no more, the last time because the guard `reason` failed."""
    return (
        f"Dynamo has compiled this model's forward {dynamo_config.recompile_limit} times, which is its limit: from now "
        "on calls of other kinds run as they are written, without greedysnake. What made it compile again is that this "
        f"did not hold any more: {reason or 'unknown'}. A number that changes from step to step is to be a tensor, or "
        "a float that tensors are multiplied by, divided by or added to"
    )


def over_limit_of(metrics: Any) -> str:
    """The same of a compilation of which Dynamo has kept `metrics`; empty where that had no limit."""
    is_over = str(metrics.fail_reason).startswith("Dynamo recompile limit exceeded")
    return over_limit(_guard(metrics.recompile_reason)) if is_over else ""


def _guard(reason: Any) -> str:
    """The guard in what Dynamo gives as the reason to compile again: "0/7: temp == 2.0   # def forward(...)"."""
    return str(reason or "").partition(": ")[2].partition(" #")[0].strip()
