"""Optimizer rules and the gradient's norm on flat CPU tensors: the same bits for every cut and number of threads.

A unit's parameters, gradient and optimizer state are flat buffers that are cut into parts: some in host memory, some on
SSD, some updated early and some late. No result may depend on the cuts. Therefore:

* Parts are whole quanta from an aligned base, so every element is computed by the vector code of its kernel. The code
  for a remainder (fewer elements than a vector) may round differently; it never runs.
* torch's fused kernels give each thread whole cache lines, for the same reason. Other kernels split anywhere, so those
  used here round once per element, which is the same in vector and scalar code: convert, multiply, add, sign.
* Random rounding takes numbers that follow from the step and the element alone (`noise`).
* Sums are taken quantum by quantum, each by one thread, and the quanta are added without rounding (math.fsum).

Padding is zero in parameter, gradient and state, and stays zero under every rule.

    gradient --convert, scale--> scratch --rule--> master, state       chunk by chunk, in cache
                                                   master --round--> low
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gs_compile.placement.shards import QUANTUM
from gs_compile.runtime.formats import REST, at_random, joined, noise, parted, rounded, widened
from gs_compile.runtime.stream import fused_adam, fused_adamw, fused_sgd, is_in_host_memory

CHUNK = 256 * 1024  # elements per thread, 4 MB with scratch and two states; with fewer, the overhead of calls dominates

Hyper = Mapping[str, Any]  # a param group's options, by torch's names, and "scale"
Apply = Callable[[Tensor, Tensor, Sequence[Tensor], Hyper, int], None]


@dataclass(frozen=True)
class Rule:
    """An optimizer's arithmetic on flat tensors: ADAMW, ADAM, SGD, LION, and the elementwise part of Muon."""

    name: str
    states: tuple[str, ...]  # as torch names them in an optimizer's state
    apply: Apply  # (master, gradient in master's dtype, state, hyper, step): changes master and state alone
    in_cache: bool = False  # it has several kernels, each a pass over memory: chunks are always faster

    def components(self, defaults: Hyper) -> tuple[str, ...]:
        """Names of the state tensors a parameter has; they start at zero, in the master's dtype."""
        return () if defaults.get("momentum") == 0 else self.states

    def update(
        self,
        master: Tensor,
        gradient: Tensor,
        state: Sequence[Tensor],
        hyper: Hyper,
        step: int,
        low: Tensor | None = None,
    ) -> None:
        """One step: `master` and `state` change in place, `low` becomes the rounded master, `gradient` stays.

        All are flat and of one length, a multiple of QUANTUM. `master` and `state` are float32 or float64; `gradient`
        and `low` may be narrower. Where `master` is int16, it and `low` are pairs (`formats`), read and written in the
        one pass; where `state` is bfloat16, or rows of 8 bits, it is rounded at random. `step` counts from 1.
        hyper["scale"], if any, multiplies the gradient, in the master's dtype, before all else: for a gradient of that
        dtype this is bitwise what `clip_grad_norm_` makes. hyper["place"]: a stream of random numbers, and where in it
        the first element is.

        Chunks pay where they save a pass over memory; else one call for the whole is fastest (benchmarks/optimizer.py).
        """
        _check(master, gradient, *(each for each in state if each.dim() == 1), *([] if low is None else [low]))
        scale, is_pair = hyper.get("scale", 1.0), master.dtype == REST
        as_it_is = gradient.dtype == (torch.float32 if is_pair else master.dtype) and scale == 1.0
        is_noisy = any(each.itemsize < torch.float32.itemsize for each in state)
        in_cache = self.in_cache or is_pair or is_noisy or not as_it_is or low is not None
        size = _chunk() if in_cache else max(len(master), 1)
        lows: Sequence[Tensor | None] = [None] * (len(master) // size + 1) if low is None else low.split(size)
        with torch.no_grad():
            parts = zip(master.split(size), gradient.split(size), *(_cut(each, size) for each in state), strict=True)
            for at, (part, raw, *states), narrow in zip(range(0, len(master), size), parts, lows, strict=False):
                wide = _joined(narrow, part) if is_pair and narrow is not None else part
                ready = raw if as_it_is else _prepared(raw, wide.dtype, scale)
                moments = [
                    each if each.dtype == wide.dtype else widened(each, scratch(f"state {number}", wide))
                    for number, each in enumerate(states)
                ]
                self.apply(wide, ready, moments, hyper, step)
                if is_noisy:
                    _round(moments, states, hyper.get("place", (0, 0)), step, at)
                if is_pair and narrow is not None:
                    parted(wide, narrow, part, scratch("half", wide))
                elif narrow is not None:
                    rounded(wide, narrow, scratch("half", wide))


def _cut(stored: Tensor, size: int) -> tuple[Tensor, ...]:
    """A component in chunks of so many elements."""
    found: tuple[Tensor, ...] = stored.split(size if stored.dim() == 1 else size // QUANTUM)
    return found


def _round(wides: Sequence[Tensor], stored: Sequence[Tensor], place: tuple[int, int], step: int, at: int) -> None:
    """Store states that are narrow: each by 16 bits of a random number of its element."""
    stream, first = place
    bits, spare = (scratch(use, wides[0], torch.int32) for use in ("noise", "noise scratch"))
    noise((stream, step), first + at, bits, spare)
    for wide, narrow in zip(wides, stored, strict=True):
        if narrow.dtype != wide.dtype:
            at_random(wide, narrow, bits, spare)
            bits.bitwise_right_shift_(16)


def _joined(narrow: Tensor, rest: Tensor) -> Tensor:
    master = scratch("master", rest, torch.float32)
    return joined(narrow, rest, master, scratch("half", master))


def sum_of_squares(*parts: Tensor) -> float:
    """The sum of the squares of all elements, the same bits however they are cut into parts; inf iff one is not finite.

    The elements of a quantum are summed in float32 (float64 in float64), quanta in float64: as exact as a float32 norm
    can be, for little more than reading memory once, where float64 throughout takes more than twice that. Where a
    quantum leaves float32's range it is summed again in float64. Elements below 1e-19, whose squares vanish in float32,
    may count as zero; float64 elements above 1e150, as infinite.
    """
    try:
        total = math.fsum(square for part in parts for square in _squares(part))
    except OverflowError:  # finite quanta whose sum is not
        return math.inf
    return total if math.isfinite(total) else math.inf


def _squares(flat: Tensor) -> list[float]:
    """The sum of squares of each quantum; [inf] where an element is not finite."""
    _check(flat)
    wide = torch.promote_types(flat.dtype, torch.float32)
    size = max(len(flat), 1) if flat.dtype == wide else _chunk()
    with torch.no_grad():
        norms = [torch.linalg.vector_norm(_prepared(part, wide).view(-1, QUANTUM), dim=1) for part in flat.split(size)]
        squares: list[float] = torch.cat(norms).double().square_().tolist()
        for index, square in enumerate(squares):
            if not math.isfinite(square):
                again = flat[index * QUANTUM : (index + 1) * QUANTUM].double().square_().sum().item()
                if not math.isfinite(again):
                    return [math.inf]  # nothing that follows can change it
                squares[index] = again
    return squares


def _adam(
    kernel: Callable[..., object], master: Tensor, gradient: Tensor, state: Sequence[Tensor], hyper: Hyper, step: int
) -> None:
    beta1, beta2 = hyper["betas"]
    assert hyper["eps"] >= torch.finfo(master.dtype).tiny, "padding, and gradients that are always zero, would be 0 / 0"
    kernel(
        [master],
        [gradient],
        *([each] for each in state),
        [],
        [torch.scalar_tensor(step, dtype=torch.float64)],
        lr=hyper["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=hyper["weight_decay"],
        eps=hyper["eps"],
        amsgrad=False,
        maximize=hyper.get("maximize", False),
    )


def _sgd(master: Tensor, gradient: Tensor, state: Sequence[Tensor], hyper: Hyper, step: int) -> None:
    """As torch's, the momentum of the first step is its gradient, without dampening."""
    momentum = hyper["momentum"]
    fused_sgd(
        [master],
        [gradient],
        [] if momentum == 0 else list(state),
        weight_decay=hyper["weight_decay"],
        momentum=momentum,
        lr=hyper["lr"],
        dampening=hyper["dampening"],
        nesterov=hyper["nesterov"],
        maximize=hyper.get("maximize", False),
        is_first_step=step == 1,
    )


def _lion(master: Tensor, gradient: Tensor, state: Sequence[Tensor], hyper: Hyper, step: int) -> None:
    """Chen et al. 2023, algorithm 2: p -= lr (sign(b1 m + (1 - b1) g) + wd p); m = b2 m + (1 - b2) g.

    Each kernel rounds once: a multiplication and an addition in one would round differently in a vector and alone. (One
    times the learning rate needs no rounding.)
    """
    (momentum,) = state
    beta1, beta2 = hyper["betas"]
    sign = -1.0 if hyper.get("maximize", False) else 1.0
    direction = scratch("direction", master)
    fresh = scratch("fresh", master)

    torch.mul(momentum, beta1, out=direction)
    torch.mul(gradient, sign * (1 - beta1), out=fresh)
    direction.add_(fresh).sign_()
    master.mul_(1 - hyper["lr"] * hyper["weight_decay"]).sub_(direction, alpha=hyper["lr"])
    torch.mul(gradient, sign * (1 - beta2), out=fresh)
    momentum.mul_(beta2).add_(fresh)


ADAMW = Rule("AdamW", ("exp_avg", "exp_avg_sq"), partial(_adam, fused_adamw))
ADAM = Rule("Adam", ("exp_avg", "exp_avg_sq"), partial(_adam, fused_adam))
SGD = Rule("SGD", ("momentum_buffer",), _sgd)
LION = Rule("Lion", ("exp_avg",), _lion, in_cache=True)


def _prepared(gradient: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """The gradient in `dtype` times `scale`: itself where it is that already, else in scratch memory."""
    if gradient.dtype == dtype:
        return gradient if scale == 1.0 else torch.mul(gradient, scale, out=scratch("gradient", gradient))
    wide = scratch("gradient", gradient, dtype).copy_(gradient)
    return wide if scale == 1.0 else wide.mul_(scale)


class _Scratch(threading.local):
    """Memory for what lives no longer than a chunk; each thread has its own, and keeps it."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}


_memory = _Scratch()


def scratch(use: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised memory of this thread, of as many elements as `like`; a later call for the same use reuses it."""
    key = use, dtype or like.dtype
    if key not in _memory.buffers or len(_memory.buffers[key]) < len(like):
        _memory.buffers[key] = torch.empty(max(len(like), _chunk()), dtype=key[1])
    return _memory.buffers[key][: len(like)]


def _chunk() -> int:
    return CHUNK * torch.get_num_threads()


def _check(*flats: Tensor) -> None:
    first = flats[0]
    assert len(first) % QUANTUM == 0, f"{len(first)} elements: not a multiple of {QUANTUM}"
    for flat in flats:
        assert is_in_host_memory(flat), flat.device
        assert flat.dim() == 1, flat.shape
        assert flat.is_contiguous(), flat.stride()
        assert len(flat) == len(first), (len(flat), len(first))
