"""Plans that save what a test says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from gs_compile.codegen.compiled import levels_of
from gs_compile.placement.levels import Share
from gs_compile.placement.placement import Placement
from gs_compile.planner.planner import Planner
from gs_compile.program.ir import Unit


@contextmanager
def saving(*shares: Share, kept: tuple[Unit, ...] = ()) -> Iterator[list[Placement]]:
    """Have plans save these activations, and keep these units' parameters from step to step; gives such plans."""
    usual, made = Planner.placement, list[Placement]()

    def placement(planner: Planner) -> Placement:
        plain = replace(usual(planner), checkpoint_ratio=0.0, device_checkpoint_ratio=0.0)
        made.append(replace(plain, levels=levels_of(planner.layouts), shares=shares, kept=kept))
        return made[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Planner, "placement", placement)
        yield made
