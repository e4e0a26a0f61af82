"""limit: Dynamo compiles a frame so many times, for what it is called with; after that it runs as it is written."""

from __future__ import annotations

from typing import Any

from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import get_compilation_metrics
from torch._guards import CompileContext

from gs_compile.capture.frame_settings import compiled_frame


def is_last_compile() -> bool:
    """Whether Dynamo will compile the frame that it compiles now no more: it has reached its limit."""
    if CompileContext.current_compile_id() is None:
        return False
    others: Any = compiled_frame("cache_size")["cache_size"]
    return bool(others.num_cache_entries_with_same_id_matched_objs + 1 >= dynamo_config.recompile_limit)


def note_last_compile(error: BaseException, is_last: bool) -> None:
    """Add to the refusal of a frame that Dynamo compiles no more: the next call would run it as it is."""
    if is_last:
        error.add_note(
            f"Dynamo has compiled this model {dynamo_config.recompile_limit} times, which is its limit: from now on it "
            "runs without greedysnake. Call torch._dynamo.reset() before the next try"
        )


def last_over_limit() -> Any:
    """What Dynamo has kept of the last frame that it did not compile, being over its limit; None: there is none."""
    found = (metrics for metrics in reversed(get_compilation_metrics()) if over_limit(metrics))
    return next(found, None)


def over_limit(metrics: Any) -> str:
    """Words on a frame that Dynamo did not compile for its limit; empty of others."""
    if not str(metrics.fail_reason).startswith("Dynamo recompile limit exceeded"):
        return ""
    guard = str(metrics.recompile_reason).partition(": ")[2].partition(" #")[0].strip()  # "0/7: t == 2.0  # def ..."
    return (
        f"Dynamo has compiled this model's forward {dynamo_config.recompile_limit} times, which is its limit: calls of "
        "other kinds run as they are written from now on, without greedysnake. The last one was of another kind: this "
        f"did not hold any more: {guard or 'unknown'}. A number that changes from step to step is to be a tensor, "
        "or a float that tensors are multiplied by, divided by or added to"
    )
