"""Plans that save what a test says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from gs_compile.codegen.compiled import levels_of
from gs_compile.placement.levels import Share, Shares
from gs_compile.placement.placement import Placement
from gs_compile.planner.run import Planned, Run
from gs_compile.program.ir import Unit


@contextmanager
def saving(*shares: Share, carried: tuple[Unit, ...] = ()) -> Iterator[list[Placement]]:
    """Have plans save these activations, and keep these units' parameters from step to step; gives such plans."""
    usual, made = Run._decided, list[Placement]()

    def decided(run: Run) -> Planned:
        found = usual(run)
        ratios = replace(found.placement.decision.ratios, checkpoint=0.0, device_checkpoint=0.0)
        plain = found.placement.laid_out(levels=levels_of(run.model.layouts))
        made.append(plain.decided(ratios=ratios, shares=Shares(shares), carried=carried))
        return replace(found, placement=made[-1])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Run, "_decided", decided)
        yield made
