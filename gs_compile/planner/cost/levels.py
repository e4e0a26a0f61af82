"""levels: what the layers of a model at hand may save: traced and timed when a plan asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from gs_compile.codegen.compiled import SpecializedModel, levels_of
from gs_compile.placement.levels import Level, Levels, aligned
from gs_compile.placement.workload import UnitCost, Workload
from gs_compile.planner.cost.timing import timed_levels
from gs_compile.planner.cost.workload import levelled
from gs_compile.program.ir import Unit
from gs_compile.progress import stage


class LayerLevels:
    """What the layers of a model at hand may save beside their inputs (`problem.Saving`).

    workload: the model's, timed. compiled: its code is.
    """

    def __init__(
        self, layouts: Sequence[SpecializedModel], workload: Callable[[], Workload], *, compiled: bool
    ) -> None:
        self.layouts, self.timed, self.compiled = layouts, workload, compiled
        self._asked = False
        self._costs = cache(self._cost)

    def levels(self, x_nbytes: Sequence[int]) -> Levels:
        """Of each layer; of a batch that another rank has, in proportion to the inputs. () where none may."""
        self._asked = True
        own = levels_of(self.layouts)
        if not any(own):
            return ()
        first = self.layouts[0].x_nbytes
        if tuple(x_nbytes) == tuple(each.x_nbytes for each in self.layouts):
            return own

        def like(level: Level) -> Level:
            return replace(level, nbytes=tuple(aligned(level.nbytes[0] * nbytes // first) for nbytes in x_nbytes))

        return tuple(tuple(map(like, levels)) for levels in own)

    def refusals(self) -> Iterator[str]:
        """In a sentence for each reason, the layers that can save nothing else, where that was asked for."""
        if self._asked:
            found: dict[str, list[str]] = {}
            for layer in range(self.layouts[0].split.num_layers):
                if not (code := self.layouts[0].codes[layer]).levels:
                    found.setdefault(code.no_levels_reason, []).append(str(layer))
            for reason, layers in found.items():
                yield f"layer{'s' * (len(layers) > 1)} {', '.join(layers)} can save the input alone: {reason}"

    def reasons(self) -> str:
        """Why layers can save nothing."""
        return "; ".join(sorted({code.no_levels_reason for code in self.layouts[0].codes.values()} - {""}))

    def workload(self, workload: Workload, *, last: bool) -> Workload:
        """`workload` with what the levels of its layers cost, as their code runs; with `last` the last level alone."""
        return replace(workload, costs=self._costs(last))

    def _cost(self, last: bool) -> Mapping[Unit, UnitCost]:
        found = levelled(self.timed(), self.layouts[0])
        if most := found.num_levels:
            with stage("compiling and timing the code of saved activations"):
                levels = [most] if last else [each for each in range(1, most + 1) if self._may_pay(found, each)]
                found = timed_levels(found, self.layouts[0], levels)
        return found.costs

    def _may_pay(self, workload: Workload, level: int) -> bool:
        """Whether a level is worth compiling: a compiler fuses what is no product with what reads it, so that where no
        product less is computed than at the level below, code that saves more is not faster.
        """
        layers = [workload.costs[layer] for layer in range(workload.num_layers)]
        pairs = [(cost, *cost.levels)[level - 1 : level + 1] for cost in layers if len(cost.levels) >= level]
        return not self.compiled or any(one.backward_flops > other.backward_flops for one, other in pairs)
