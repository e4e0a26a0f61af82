"""given: what the options of a run leave to the planner, and what not."""

from __future__ import annotations

from dataclasses import asdict, replace

import torch

from gs_compile.errors import OptionError
from gs_compile.machine import DEFAULT_SHARE, available_memory, parse_bytes, usable_memory
from gs_compile.options import Options
from gs_compile.passes.baselines.registry import SCHEDULES
from gs_compile.placement.cut import DEVICE_CLASSES
from gs_compile.planner.builder import StepBuilder
from gs_compile.planner.lp.limits import ACTIVATION, CLASSES, Fixed, contradiction
from gs_compile.runtime.stream import device_of, has_own_memory
from gs_compile.runtime.threads import update_threads
from gs_compile.schedules import BY_MICRO_BATCH


def classes(options: Options) -> tuple[str, ...]:
    """Those that have a ratio in host memory."""
    return (*CLASSES, "gradient") if options.expert.schedule in BY_MICRO_BATCH else CLASSES


def fixed(options: Options, clip: bool) -> Fixed:
    """What is given; updates are speculative where that was asked for, or where they are not all to be late."""
    expert = options.expert
    names = (*classes(options), *DEVICE_CLASSES, ACTIVATION)
    ratios = {name: ratio for name, ratio in asdict(expert.ratios).items() if ratio is not None and name in names}
    speculates = expert.clip == "speculative" or (expert.clip is None and expert.alpha not in (None, 1.0))
    found = Fixed(
        alpha=expert.alpha,
        ratios=ratios,
        clip=clip,
        speculative=clip and speculates,
        recompute=expert.recompute,
    )
    if found.late and expert.alpha not in (None, 1.0):
        raise OptionError(
            f'expert.alpha is {expert.alpha}, but with max_grad_norm and expert.clip="delayed" all updates wait for '
            'the norm of all gradients, so alpha is 1: leave one of the two out, or choose expert.clip="speculative"'
        )
    if found.late:
        return replace(found, alpha=1.0)
    return replace(found, alpha=expert.alpha or 0.0) if SCHEDULES[expert.schedule].as_published else found


def check(fixed: Fixed, builder: StepBuilder) -> None:
    """Raise `OptionError` where ratios contradict each other or what there is."""
    may_reside = any(size.may_reside for size in builder.sizes)
    if wrong := contradiction(fixed, separate=builder.separate, may_reside=may_reside, prefix="expert.ratios."):
        raise OptionError(wrong)


def host_budget(options: Options, num_here: int = 1) -> int:
    """The bytes of host memory that this process may map. num_here: ranks on this machine, which share what it has."""
    if options.host_memory is None:
        return int(available_memory() * DEFAULT_SHARE / num_here)
    return parse_bytes(options.host_memory, whole=usable_memory() // num_here, name="host_memory")


def num_update_threads(options: Options, device: torch.device, num_here: int = 1) -> int:
    """The threads that updates have in this process, which is one of `num_here` ranks on this machine."""
    return options.expert.threads or update_threads(not has_own_memory(device), num_here)


def device_budget(options: Options, device: torch.device) -> int | None:
    """The bytes of device memory that a run is given; None: nothing is said of it."""
    if options.device_memory is None:
        return None
    whole = device_of(device).memory_nbytes()[1]
    return parse_bytes(options.device_memory, whole=whole, name="device_memory")


def remedies(options: Options, fixed: Fixed) -> str:
    """What of all that makes a step smaller can still be done."""
    found = ["give it more"]
    found += ["lower ratios"] if any(fixed.ratios.values()) else []
    found += ["have activations computed again (expert.recompute)"] if fixed.saves_all else []
    found += ["give a smaller micro_batch_size"] if options.micro_batch_size > 1 else []
    return ", or ".join(found)
