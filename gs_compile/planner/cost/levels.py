"""levels: what the layers of a model at hand may save: traced and timed when a plan asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from gs_compile.codegen.compiled import SpecializedModel, levels_of
from gs_compile.errors import OptionError
from gs_compile.placement.levels import Level, aligned
from gs_compile.placement.workload import Workload
from gs_compile.planner.cost.timing import timed_levels
from gs_compile.planner.cost.workload import levelled
from gs_compile.progress import stage


class Levels:
    """Of a model's layers, for micro-batches whose inputs have so many bytes. compiled: their code is."""

    def __init__(self, layouts: Sequence[SpecializedModel], x_nbytes: Sequence[int], *, compiled: bool) -> None:
        self.layouts, self.compiled = layouts, compiled
        self.x_nbytes = tuple(x_nbytes)
        self._workload: Workload | None = None

    @cached_property
    def by_micro_batch(self) -> tuple[tuple[Level, ...], ...]:
        """Of each layer and level; of a batch that another rank has, in proportion to the inputs. () where none may."""
        own = levels_of(self.layouts)
        if not any(own):
            return ()
        first = self.layouts[0].x_nbytes
        if self.x_nbytes == tuple(each.x_nbytes for each in self.layouts):
            return own

        def like(level: Level) -> Level:
            return replace(level, nbytes=tuple(aligned(level.nbytes[0] * nbytes // first) for nbytes in self.x_nbytes))

        return tuple(tuple(map(like, levels)) for levels in own)

    def refusals(self) -> Iterator[str]:
        """In a sentence for each reason, the layers that can save nothing else, where that was asked for."""
        if "by_micro_batch" in vars(self):
            reasons: dict[str, list[str]] = {}
            for layer in range(self.layouts[0].split.num_layers):
                if not (code := self.layouts[0].codes[layer]).levels:
                    reasons.setdefault(code.no_levels_reason, []).append(str(layer))
            for reason, layers in reasons.items():
                yield f"layer{'s' * (len(layers) > 1)} {', '.join(layers)} can save the input alone: {reason}"

    @property
    def most(self) -> int:
        """The level that saves all that a backward reads."""
        return max(map(len, self.by_micro_batch), default=0)

    def checked(self) -> tuple[tuple[Level, ...], ...]:
        """`by_micro_batch`; raises `OptionError` where no layer can save anything."""
        if not self.by_micro_batch:
            reasons = {code.no_levels_reason for code in self.layouts[0].codes.values() if code.no_levels_reason}
            raise OptionError(
                "activations are to be saved (expert.recompute, expert.ratios.activation), but no layer can save any "
                f"beside its input ({'; '.join(sorted(reasons))}): leave that out"
            )
        return self.by_micro_batch

    def of(self, workload: Workload, *, last: bool = False) -> Workload:
        """`workload` with the levels of its layers, timed once as their code runs; with `last` the last level alone."""
        if self._workload is None:
            self._workload = levelled(workload, self.layouts[0])
            if most := self._workload.num_levels:
                with stage("compiling and timing the code of saved activations"):
                    levels = [most] if last else [each for each in range(1, most + 1) if self._may_pay(each)]
                    self._workload = timed_levels(self._workload, self.layouts[0], levels)
        return self._workload

    def _may_pay(self, level: int) -> bool:
        """Whether a level is worth compiling: a compiler fuses what is no product with what reads it, so that where no
        product less is computed than at the level below, code that saves more is not faster.
        """
        assert self._workload is not None
        layers = [self._workload.costs[layer] for layer in range(self._workload.num_layers)]
        pairs = [(cost, *cost.levels)[level - 1 : level + 1] for cost in layers if len(cost.levels) >= level]
        return not self.compiled or any(one.backward_flops > other.backward_flops for one, other in pairs)
