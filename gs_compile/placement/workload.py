"""workload: what the step of one model has to place, move and compute, in numbers: all that planning needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from gs_compile.program.ir import StepShape, Unit


@dataclass(frozen=True)
class UnitSize:
    """What a unit has to place: elements of its tensors (multiples of the quantum), trained ones first."""

    unit: Unit
    trained: tuple[int, ...]
    frozen: tuple[int, ...]
    itemsize: int
    gradient_itemsize: int
    state_itemsize: int
    has_master: bool

    @property
    def numel(self) -> int:
        return self.num_trained + sum(self.frozen)

    @property
    def num_trained(self) -> int:
        return sum(self.trained)

    @property
    def may_reside(self) -> bool:
        """Whether its parameters may live on a device with memory of its own: the update makes them from a master in
        host memory, or nothing does.
        """
        return self.has_master or not self.trained


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """What a unit's code costs for one micro-batch.

    backward counts the recomputation too; the head's is all of it, for its forward runs together with its backward.
    seconds: measured on the machine that is planned for; None: to be derived from the FLOPs.
    workspace_nbytes: the most bytes that its code has alive inside, beside inputs and results.
    """

    forward_flops: float
    backward_flops: float
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    workspace_nbytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model at one micro-batch size.

    world: the ranks that share it: `sizes` are one rank's shares, and each rank has micro-batches of its own.
    costs: by unit: "e", 0 ... num_layers - 1, "h"; layers of one class share one `UnitCost`.
    x_nbytes, side_nbytes: of the checkpoint, and of all side inputs, of one micro-batch.
    dtype: the matrix rate that its code is held against ("fp32", "bf16", "fp16").
    """

    name: str
    num_layers: int
    sizes: tuple[UnitSize, ...]
    costs: Mapping[Unit, UnitCost]
    micro_batch_size: int
    sequence: int  # tokens of a sample
    x_nbytes: int
    side_nbytes: int = 0
    dtype: str = "fp32"
    shape: StepShape = field(default_factory=StepShape)
    world: int = 1

    @cached_property
    def num_trained(self) -> int:
        """Trained elements."""
        return sum(size.num_trained for size in self.sizes)

    @cached_property
    def parameters_nbytes(self) -> int:
        return sum(size.numel * size.itemsize for size in self.sizes)

    @cached_property
    def states_nbytes(self) -> int:
        return sum(size.num_trained * size.state_itemsize for size in self.sizes)

    @cached_property
    def workspace_nbytes(self) -> int:
        """The most bytes that a unit's code computes with, beside inputs and results."""
        return max((cost.workspace_nbytes for cost in self.costs.values()), default=0)

    @cached_property
    def tokens(self) -> int:
        """Of one micro-batch of every rank."""
        return self.world * self.micro_batch_size * self.sequence

    @cached_property
    def model_flops(self) -> float:
        """Of one micro-batch of every rank, as throughput is usually stated: one forward and a backward of twice that,
        without what is recomputed.
        """
        return self.world * sum(3 * cost.forward_flops for cost in self.costs.values())
