"""zero_breakdown: where the seconds of a ZeRO-Infinity step go, by timing DeepSpeed's own calls.

computed    forward and backward without their waits; DeepSpeed's hooks in Python are in there
waited      for its asynchronous reads and writes, by what was moved
adam        DeepSpeedCPUAdam, which runs by itself: nothing is computed beside it
python      the rest of `engine.step`: copies between buffers, bookkeeping
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

WAIT, STEP, ADAM = "wait ", "step", "adam"


@contextmanager
def spent(engine: Any) -> Iterator[Counter[str]]:
    """Seconds of all calls inside the block: "step", "adam", and "wait " with what was waited for.

    Waits inside the engine's step count twice, as "wait ..." and in "step wait".
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper as Parameters

    found: Counter[str] = Counter()
    doing = ["others"]
    states = type(engine.optimizer.optimizer_swapper)

    def named(label: str) -> Callable[[Any], Any]:
        def wrap(function: Any) -> Any:
            @wraps(function)
            def call(*arguments: Any, **named: Any) -> Any:
                doing.append(label)
                try:
                    return function(*arguments, **named)
                finally:
                    doing.pop()

            return call

        return wrap

    def timed(key: str) -> Callable[[Any], Any]:
        def wrap(function: Any) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                start = time.perf_counter()
                try:
                    return function(*arguments, **named)
                finally:
                    seconds = time.perf_counter() - start
                    found[WAIT + doing[-1] if key == WAIT else key] += seconds
                    found["step wait"] += seconds * (key == WAIT and STEP in doing)

            return call

        return wrap

    handle = AsyncIOBuilder().load(verbose=False).aio_handle
    wraps_of = [
        (handle, "wait", timed(WAIT)),
        (Parameters, "swap_in", named("parameters read")),
        (Parameters, "synchronize_reads", named("parameters read")),
        (Parameters, "synchronize_writes", named("parameters written")),
        (Parameters, "swap_out_and_release", named("parameters written")),
        (states, "swap_in_optimizer_state", named("states read")),
        (states, "swap_out_optimizer_state", named("states written")),
        (states, "swap_out_gradients", named("gradients written")),
        (type(engine.optimizer.optimizer), "step", timed(ADAM)),
    ]
    with ExitStack() as stack:
        for owner, name, wrap in wraps_of:
            stack.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))
        stack.enter_context(patch.object(engine, "step", named(STEP)(timed(STEP)(engine.step))))
        yield found


def parts(seconds: float, found: Counter[str], count: int) -> dict[str, Any]:
    """Of one of `count` steps that took `seconds` together, as `breakdown` shows them."""
    waits = {key.removeprefix(WAIT): value / count for key, value in found.most_common() if key.startswith(WAIT)}
    outside = seconds - found[STEP] - (sum(waits.values()) * count - found["step wait"])
    return {
        "seconds": seconds / count,
        "compute": (outside + found[ADAM]) / count,
        "waits": waits,
        "python": (found[STEP] - found["step wait"] - found[ADAM]) / count,
        "busy": {"adam": found[ADAM] / count},
        "bytes": {},
    }
