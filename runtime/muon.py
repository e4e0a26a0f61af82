"""muon: matrices are updated by their momentum, orthogonalized, as torch.optim.Muon does.

    momentum, elementwise      m += (1 - mu) (g - m), and what is orthogonalized: g + mu (m - g), or m     host memory
    Newton-Schulz              each whole matrix, in bfloat16                                              the device
    descent, elementwise       w = (1 - lr decay) w - lr ratio o                                           host memory

Elementwise parts are rules of `kernels`, the same bits for every cut. Newton-Schulz needs the whole matrix: its
elements are updated together (`UnitSize.products`). If the device has memory of its own, the matrix goes there and back
in bfloat16, in which the iterations compute, on a stream of its own: 2 + 2 bytes of an element move, and no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gs_compile.runtime.kernels import Hyper, Rule, scratch
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.slab import map_memory
from gs_compile.runtime.stream import Device, settle, wait_for

STATES = ("momentum_buffer",)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5  # iterations, as of torch.optim.Muon


@dataclass(frozen=True)
class Matrices:
    """The matrices that a parameter consists of: itself, or each of a stack, cut along a dimension into these sizes.

    shape: of the parameter, which has two or three dimensions. dim: 0 or 1, of a matrix; sizes: (): it is not cut.
    num_steps: of Newton-Schulz, for the cost.
    """

    shape: tuple[int, ...]
    dim: int = 0
    sizes: tuple[int, ...] = ()
    num_steps: int = NS_STEPS

    def of(self, parameter: Tensor) -> list[Tensor]:
        """The matrices, as views of a tensor of this shape."""
        stack = parameter.unbind(0) if parameter.dim() == 3 else (parameter,)
        return [part for each in stack for part in (each.split(self.sizes, self.dim) if self.sizes else (each,))]

    @property
    def flops(self) -> float:
        """Operations of a step's matrix products."""
        return float(sum(self.num_steps * 2 * low * low * (low + 2 * high) for low, high in self._sizes))

    @property
    def scratch_nbytes(self) -> int:
        """The most that one matrix takes on the device: itself before and after an iteration, and at first, and two
        products of it with itself, all in bfloat16.
        """
        return max(2 * low * (3 * high + 2 * low) for low, high in self._sizes)

    @property
    def _sizes(self) -> list[tuple[int, int]]:
        """The shorter and the longer side of each matrix."""
        found = (tuple(sorted(each.shape)) for each in self.of(torch.empty(self.shape, device="meta")))
        return [(low, high) for low, high in found]


def matrices_of(path: str, shape: Sequence[int], cut: Sequence[int], num_steps: int) -> Matrices | None:
    """The matrices of a layer's parameter of this name; None: it has none, and is updated by AdamW.

    cut: the dimension, and the sizes along it, that a param group gives; (): it gives none. Then a matrix whose name
    has "qkv", "c_attn" or "in_proj", and of which one side is three times the other, is cut into three equal ones
    (queries, keys and values). A tensor of three dimensions is a stack of matrices if its name has "expert" or "moe".
    """
    shape, words = tuple(shape), path.lower()
    if len(shape) == 3 and not cut:
        return Matrices(shape, num_steps=num_steps) if "expert" in words or "moe" in words else None
    if len(shape) not in (2, 3):
        return None
    if cut:
        return Matrices(shape, cut[0], tuple(cut[1:]), num_steps)
    is_fused = any(word in words for word in ("qkv", "c_attn", "in_proj"))
    for dim in (0, 1) if is_fused else ():
        if shape[dim] == 3 * shape[1 - dim]:
            return Matrices(shape, dim, (shape[1 - dim],) * 3, num_steps)
    return Matrices(shape, num_steps=num_steps)


def _blend(mixed: Tensor, gradient: Tensor, state: Sequence[Tensor], hyper: Hyper, step: int) -> None:
    """Update the momentum, and write what is orthogonalized to `mixed`. Each kernel rounds once, as in Lion."""
    (momentum,), mu = state, hyper["momentum"]
    _interpolate(momentum, momentum, gradient, 1 - mu)
    if hyper["nesterov"]:
        _interpolate(mixed, gradient, momentum, mu)
    else:
        mixed.copy_(momentum)


def _interpolate(out: Tensor, start: Tensor, end: Tensor, weight: float) -> None:
    """torch's lerp, which starts from the nearer end."""
    way = torch.sub(end, start, out=scratch("way", start))
    if abs(weight) < 0.5:
        torch.add(start, way.mul_(weight), out=out)
    else:
        torch.sub(end, way.mul_(1 - weight), out=out)


def _descend(master: Tensor, direction: Tensor, state: Sequence[Tensor], hyper: Hyper, step: int) -> None:
    """Decoupled decay, and a step that is multiplied by the learning rate already."""
    master.mul_(1 - hyper["lr"] * hyper["weight_decay"]).sub_(direction)


BLEND = Rule("Muon's momentum", STATES, _blend, in_cache=True)
DESCEND = Rule("Muon's descent", (), _descend, in_cache=True)


class Orthogonalizer:
    """Newton-Schulz iterations of matrices that are in host memory, on a device.

    nbytes: of the largest parameter, in the dtype of its master. ranks: those that share each parameter.
    """

    def __init__(self, device: Device, nbytes: int = 0, ranks: Ranks | None = None) -> None:
        self._device = device
        self._stream: Any = None
        self._empty = map_memory(0)
        self._mixed = map_memory(nbytes)
        self._staged = map_memory(nbytes // 2 if device.has_own_memory else 0, device)  # a bfloat16 is at most half
        self._gathered = map_memory(nbytes // 2 if ranks else 0)
        self._ranks = ranks

    def close(self) -> None:
        """Release all memory, also if the step that used it was given up.

        This may run as garbage collection within a capture, which records operations of torch: none is called here.
        """
        settle(self._device, self._stream)
        self._mixed = self._staged = self._gathered = self._empty

    def mixed(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for what is orthogonalized next."""
        return self._mixed[: numel * dtype.itemsize].view(dtype)

    def gather(self, mixed: Tensor, shares: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Bring all ranks' elements to this one, in bfloat16. shares: the ranges of elements that each rank has."""
        assert self._ranks is not None
        gathered = self._gathered[: 2 * len(mixed)].view(torch.bfloat16)
        for rank, own in enumerate(shares):
            for start, stop in own:
                part = gathered[start:stop]
                if rank == self._ranks.rank:
                    part.copy_(mixed[start:stop])
                self._ranks.spread(part, rank)
                mixed[start:stop].copy_(part)

    @torch.no_grad()
    def step(self, parameter: Tensor, matrices: Matrices, hyper: Hyper) -> None:
        """Replace what is orthogonalized by the step that follows from it, multiplied by the learning rate."""
        for matrix in matrices.of(parameter):
            is_apart = self._device.has_own_memory
            found = self._on_device(matrix, hyper) if is_apart else orthogonal(matrix.bfloat16(), hyper)
            matrix.copy_(found).mul_(_rate(hyper, matrix.shape))

    def _on_device(self, matrix: Tensor, hyper: Hyper) -> Tensor:
        """The orthogonal factor, computed on the device in parallel to the step's computations."""
        device = self._device
        self._stream = self._stream or device.new_stream()
        staged = self._staged[: 2 * matrix.numel()].view(torch.bfloat16).view(matrix.shape).copy_(matrix)
        with device.on(self._stream):
            there = device.empty(matrix.shape, torch.bfloat16)
            device.copy(there, staged)
            device.copy(staged, orthogonal(there, hyper).contiguous())
            event = device.record(self._stream)
        wait_for(event, device.check)
        return staged


def orthogonal(matrix: Tensor, hyper: Hyper) -> Tensor:
    """The orthogonal factor of a matrix in bfloat16, approximately: its singular values come close to 1. `matrix` is
    changed.

    The operations are those of torch.optim.Muon.
    """
    a, b, c = hyper["ns_coefficients"]
    is_high = matrix.size(0) > matrix.size(1)
    iterate = matrix.T if is_high else matrix
    iterate.div_(iterate.norm().clamp(min=hyper["eps"]))
    for _ in range(hyper["ns_steps"]):
        gram = iterate @ iterate.T
        iterate = torch.addmm(iterate, torch.addmm(gram, gram, gram, beta=b, alpha=c), iterate, beta=a)
    return iterate.T if is_high else iterate


def _rate(hyper: Hyper, shape: Sequence[int]) -> float:
    """The learning rate of a matrix of this shape."""
    rows, columns = shape
    if hyper["adjust_lr_fn"] == "match_rms_adamw":
        return float(hyper["lr"] * (0.2 * math.sqrt(max(rows, columns))))
    return float(hyper["lr"] * math.sqrt(max(1, rows / columns)))


def update_whole(
    values: Tensor, gradient: Tensor, state: Sequence[Tensor], hyper: Hyper, step: int, *, matrices: Matrices
) -> None:
    """One step of a parameter that is in memory: its values and its momentum, flat, change in place."""
    mixed = torch.empty_like(values)
    BLEND.apply(mixed, gradient, state, hyper, step)
    Orthogonalizer(Device(values.device)).step(mixed.view(matrices.shape), matrices, hyper)
    DESCEND.apply(values, mixed, (), hyper, step)
