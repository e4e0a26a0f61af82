"""workload: what the step of one model has to store, move and compute, in numbers: all that planning needs to know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from gs_compile.options import Masters
from gs_compile.placement.boundaries import BoundaryNbytes, scaled
from gs_compile.placement.stacks import Stacks, stacks
from gs_compile.program.ir import StepShape, Unit

ACTIVATIONS = ("x_nbytes", "side_nbytes", "dside_nbytes")  # fields of a workload, and of a captured model
NOISE = 0.02  # the relative difference of two timings of the same code


@dataclass(frozen=True)
class Products:
    """The matrix products of a unit's update: their FLOPs, and the most bytes that those of one tensor take, on the
    device that computes them and in host memory before and after.

    shared_nbytes: what comes from other ranks, for all tensors; 0: each tensor is on this rank as a whole.
    is_priced: the unit's size includes their time (`prices.with_products`).
    """

    flops: float
    device_nbytes: int
    host_nbytes: int
    shared_nbytes: int = 0
    is_priced: bool = False


@dataclass(frozen=True)
class UnitSize:
    """The tensors of a unit, by their numbers of elements (multiples of the quantum), trained ones first.

    state_itemsize: the bytes of all components of an element's state; not a whole number if moments have 8 bits.
    has_master: the parameters are narrow copies of a master in the state.
    conversion_nbytes: the bytes that converting an element moves in an update.
    decoded_nbytes: the bytes of its encoded matrices when they are decoded, as its code uses them.
    products: those of its update, if that takes whole tensors; None: it takes elements.
    device_nbytes: the bytes that the device could move in the time of the products, once that time is known.
    """

    unit: Unit
    trained_numels: tuple[int, ...]
    frozen_numels: tuple[int, ...]
    itemsize: int
    gradient_itemsize: int
    state_itemsize: float
    has_master: bool
    conversion_nbytes: int = 0
    decoded_nbytes: int = 0
    products: Products | None = None
    device_nbytes: int = 0

    @cached_property
    def numel(self) -> int:
        return self.num_trained + sum(self.frozen_numels)

    @cached_property
    def num_trained(self) -> int:
        return sum(self.trained_numels)

    @property
    def may_reside(self) -> bool:
        """Whether its parameters may live on a device with memory of its own: the update makes them from a master in
        host memory, wholly or in part, or nothing does.
        """
        return self.itemsize < self.gradient_itemsize or not self.trained_numels


def beside_slab(sizes: Iterable[UnitSize]) -> int:
    """The bytes of host memory that an update takes for its largest tensor, where it takes whole ones."""
    return max((size.products.host_nbytes for size in sizes if size.products), default=0)


@dataclass(frozen=True, kw_only=True)
class CodeCost:
    """What code costs for one micro-batch.

    The backward includes the recomputation. The head's backward includes its forward: the two run together.
    seconds: of forward and backward, measured on the machine that is planned for; None: they follow from the FLOPs.
    """

    forward_flops: float
    backward_flops: float
    seconds: tuple[float, float] | None = None

    def times(self, factor: float) -> Self:
        """The cost of code that computes `factor` times as much."""
        return replace(
            self,
            forward_flops=self.forward_flops * factor,
            backward_flops=self.backward_flops * factor,
            seconds=self.seconds and (self.seconds[0] * factor, self.seconds[1] * factor),
        )

    def without_recomputation(self) -> Self:
        """The cost of code whose backward does not run the forward again."""
        seconds = self.seconds and (self.seconds[0], max(self.seconds[1] - self.seconds[0], 0.0))
        return replace(self, backward_flops=self.backward_flops - self.forward_flops, seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class LevelCost(CodeCost):
    """The cost of a layer's code where its forward saves more than its input.

    nbytes: of what is saved beside the input; reads_input: the backward reads the input, too.
    """

    nbytes: int
    reads_input: bool


@dataclass(frozen=True, kw_only=True)
class UnitCost(CodeCost):
    """The cost of a unit's code.

    levels: what a layer may save instead of its input alone; () if it can save nothing else, or must not.
    workspace_nbytes: the most bytes that its code uses at a time, beside inputs and results.
    on_all: the operations of a layer in pieces that run on all tokens.
    """

    workspace_nbytes: int = 0
    on_all: tuple[str, ...] = ()
    levels: tuple[LevelCost, ...] = ()

    def at(self, level: int) -> CodeCost:
        """The cost at a level of what is saved, or at the last one that there is below it."""
        return (self, *self.levels)[: level + 1][-1]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model at one micro-batch size.

    world: the ranks that share it: `sizes` are one rank's shares, and each rank has micro-batches of its own.
    costs: by unit: "e", 0 ... num_layers - 1, "h"; layers of one class share one `UnitCost`.
    x_nbytes, side_nbytes, dside_nbytes: the bytes of the checkpoint, of all side inputs and of their gradient, for one
        micro-batch, at each boundary.
    dtype: of its matrix products, for the machine's rate ("fp32", "bf16", "fp16").
    masters: of narrow parameters, "split" or "whole"; None: not known, or there are none.
    """

    name: str
    num_layers: int
    sizes: tuple[UnitSize, ...]
    costs: Mapping[Unit, UnitCost]
    micro_batch_size: int
    sequence: int  # tokens of a sample
    x_nbytes: BoundaryNbytes
    side_nbytes: BoundaryNbytes = (0,)
    dside_nbytes: BoundaryNbytes = (0,)
    dtype: str = "fp32"
    shape: StepShape = field(default_factory=StepShape)
    world: int = 1
    masters: Masters | None = None

    def scaled(self, *, code: float = 1.0, activations: float = 1.0, workspace: float = 1.0) -> Workload:
        """The workload with the costs of its code, its activations and its workspaces multiplied by these factors."""

        def level(cost: LevelCost) -> LevelCost:
            return replace(cost.times(code), nbytes=int(cost.nbytes * activations))

        costs = {
            unit: replace(
                cost.times(code),
                workspace_nbytes=int(cost.workspace_nbytes * workspace),
                levels=tuple(map(level, cost.levels)),
            )
            for unit, cost in self.costs.items()
        }
        sizes: dict[str, Any] = {name: scaled(nbytes, activations) for name, nbytes in self.activations.items()}
        return replace(self, costs=costs, **sizes)

    @property
    def activations(self) -> dict[str, BoundaryNbytes]:
        """The bytes of a micro-batch, by field."""
        return {name: getattr(self, name) for name in ACTIVATIONS}

    @cached_property
    def stacks(self) -> Stacks:
        return stacks(self.num_layers, self.shape.joints)

    def bare(self) -> Workload:
        """The workload with layers that save their inputs alone."""
        if not self.num_levels:
            return self
        return replace(self, costs={unit: replace(cost, levels=()) for unit, cost in self.costs.items()})

    @cached_property
    def num_trained(self) -> int:
        """Trained elements."""
        return sum(size.num_trained for size in self.sizes)

    @cached_property
    def states_nbytes(self) -> int:
        return int(sum(size.num_trained * size.state_itemsize for size in self.sizes))

    @cached_property
    def workspace_nbytes(self) -> int:
        """The most bytes that a unit's code uses beside inputs and results, its decoded matrices included, and an
        update's products at the same time.
        """
        decoded = {size.unit: size.decoded_nbytes for size in self.sizes}
        beside = max((size.products.device_nbytes for size in self.sizes if size.products), default=0)
        found = (cost.workspace_nbytes + decoded.get(unit, 0) for unit, cost in self.costs.items())
        return beside + max(found, default=0)

    @cached_property
    def num_levels(self) -> int:
        """The most levels that a layer has at which it saves more than its input; 0 if there are none."""
        return max(len(self.costs[layer].levels) for layer in range(self.num_layers))

    def savable(self, layers: Sequence[int]) -> float:
        """The part of these layers that have levels."""
        return sum(bool(self.costs[layer].levels) for layer in layers) / len(layers)

    @cached_property
    def computed(self) -> tuple[float, ...]:
        """What all layers compute for one micro-batch, at each level: seconds, or FLOPs if a layer has no seconds."""
        layers = range(self.num_layers)
        levels = [[self.costs[layer].at(level) for layer in layers] for level in range(self.num_levels + 1)]
        seconds = [[sum(each.seconds) for each in costs if each.seconds is not None] for costs in levels]
        if all(len(known) == self.num_layers for known in seconds):
            return tuple(map(sum, seconds))
        return tuple(sum(each.forward_flops + each.backward_flops for each in costs) for costs in levels)

    @cached_property
    def worthwhile(self) -> tuple[int, ...]:
        """The levels at which layers compute less than at any that saves less, by more than timings differ."""
        levels = [0]
        for level, computed in enumerate(self.computed):
            if computed < (1 - NOISE) * self.computed[levels[-1]]:
                levels.append(level)
        return tuple(levels[1:])

    @cached_property
    def tokens(self) -> int:
        """Tokens of one micro-batch of every rank."""
        return self.world * self.micro_batch_size * self.sequence

    @cached_property
    def model_flops(self) -> float:
        """The FLOPs of one micro-batch of every rank, as throughput is usually stated: three times those of a forward,
        nothing for the recomputation.
        """
        return self.world * sum(3 * cost.forward_flops for cost in self.costs.values())
