"""formats: the types in which parameters and their optimizer state are stored.

A state is several components, one after the other. A parameter that is narrower than float32 has a master: all of it
is the state's first component, or the parameter is its upper half and that component its lower one (a pair):

    bits(master) = (bits(parameter) << 16) + rest         rest: int16, with its sign

so the parameter is its master rounded to nearest, ties away from zero, and nothing of the master is stored twice. What
rounds to infinity in bfloat16 keeps its finite master, and infinities are themselves. A NaN is one of the two that have
no bits in the lower half: with others the sum would leave the range of NaN.

Moments may be bfloat16, or have 8 bits and, every 256 of them, a scale: the largest magnitude of that block. Of a first
moment they are a sign and 7 bits, of a second moment, which has none, 8 bits: the upper bits of a float32,

    code = bits(low + span * magnitude / scale) >> 20, without what all have in common        low + span = 1.875

3 of them its fraction. So codes are as far apart as 8 to 15 of them in each octave of 14 (31 for second moments, as
those are squares), and evenly spaced below that: all bits are 0 for zero alone, and the largest is itself. A quantum is
8 scales, then its 2048 codes.

A unit is a space of elements of one type. A float32 parameter in a unit of 16 bits takes two elements for each of its
own: its values are the bytes of both, and the first of both has its gradient and moments; what the second has of these
is zero, and stays so (`firsts`). Where masters are whole, their component has a copy of it; where they are pairs its
share of the rests is not used. A frozen parameter of any type takes as many elements as its bytes do.

An update rounds narrow moments at random, so that what is too small to change them does so now and then. A second
moment in 8 bits never becomes zero: it divides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from gs_compile.placement.shards import QUANTUM

GOLDEN = 0x9E3779B9  # steps of it, modulo 2**32, are far apart
HALF = 1 << 15  # of the last bit that a bfloat16 has, in those of a float32
REST = torch.int16
BLOCK = 256  # elements with one scale
SCALES_NBYTES = QUANTUM // BLOCK * 4  # of a quantum
ROW_NBYTES = SCALES_NBYTES + QUANTUM
SMALLEST, LARGEST = 2.0**-100, torch.finfo(torch.float32).max  # scales: far from where float32 has fewer bits
LOWEST = {torch.int8: 2.0**-15, torch.uint8: 2.0**-31}  # of first moments, and of second ones: where octaves begin
EIGHT_BITS = LOWEST.keys()
TOP = 1.875  # the largest float32 below 2 with 3 bits in its fraction
LEAST = 2.0**-34 / TOP * (1 + 2.0**-17)  # of a scale: the least second moment above zero, after all roundings
# What converting an element takes in an update, in bytes that it passes over meanwhile: 1.5 and 3 ns of a core
# (benchmarks/optimizer.py), each of which has 4 GB/s of the memory's bandwidth.
CONVERSION_NBYTES = {torch.bfloat16: 6, torch.int8: 12, torch.uint8: 12}

StateType = torch.dtype | Literal["8bit"] | None  # that users give


@dataclass(frozen=True)
class Types:
    """The types of a unit's parameters, and of each component of its state; masters, or their rests, come first."""

    parameter: torch.dtype
    state: tuple[torch.dtype, ...]

    @property
    def wide(self) -> torch.dtype:
        """The type of masters, gradients, and all that updates compute."""
        return wide_of(self.parameter)

    @property
    def has_master(self) -> bool:
        """Whether a trained parameter has a master, in one way or the other."""
        return self.parameter != self.wide

    @property
    def is_pair(self) -> bool:
        """Whether a trained parameter is the upper half of its master."""
        return self.state[:1] == (REST,)

    @property
    def state_itemsize(self) -> float:
        """The bytes of an element's state; with 8 bits its share of the scales is not whole."""
        return state_itemsize(self.state)

    @property
    def conversion_nbytes(self) -> int:
        """What converting an element takes in an update."""
        return sum(CONVERSION_NBYTES.get(dtype, 0) for dtype in self.state)

    def with_one_moment(self) -> Types:
        """The types with the first moment alone."""
        return replace(self, state=self.state[: self.has_master + 1])

    def width(self, dtype: torch.dtype) -> int:
        """The elements of the unit that one of a parameter of this dtype takes."""
        return dtype.itemsize // self.parameter.itemsize

    def nbytes(self, component: int | None, numel: int) -> int:
        """Bytes of the first elements of a component, or of parameters (None); of 8 bits whole quanta."""
        return _nbytes(self.parameter if component is None else self.state[component], numel)

    def offset(self, component: int, numel: int, start: int) -> int:
        """The bytes from the begin of a state of `numel` elements to element `start` of a component."""
        return sum(_nbytes(dtype, numel) for dtype in self.state[:component]) + self.nbytes(component, start)

    def components(self, state: Tensor, start: int, stop: int) -> list[Tensor]:
        """Elements of all components, as views of the bytes of a state; those of 8 bits as rows, a quantum each."""
        numel = int(state.nbytes / self.state_itemsize)
        begins = accumulate((_nbytes(dtype, numel) for dtype in self.state), initial=0)
        return [
            rows_of(state[begin + _nbytes(dtype, start) : begin + _nbytes(dtype, stop)].view(dtype))
            for begin, dtype in zip(begins, self.state, strict=False)
        ]


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """What updates compute parameters of a dtype in; torch promotes those of 8 bits to nothing."""
    return torch.float32 if dtype.itemsize == 1 else torch.promote_types(dtype, torch.float32)


def types_of(parameter: torch.dtype, moments: Sequence[torch.dtype | None], *, pairs: bool) -> Types:
    """The types of such parameters: their moments in these, None is the widest; `pairs`: masters are, if they can.

    A bfloat16 has the exponent of a float32, and can be its upper half.
    """
    wide = wide_of(parameter)
    master = [REST if pairs and parameter == torch.bfloat16 else wide] if parameter != wide else []
    narrow = wide == torch.float32
    return Types(parameter, (*master, *(dtype if dtype and narrow else wide for dtype in moments)))


def moment_types(state_type: StateType, names: Sequence[str]) -> tuple[torch.dtype | None, ...]:
    """What moments of these names are stored in, for what a user gives; None: as wide as masters."""
    if state_type == "8bit":
        return tuple(torch.uint8 if name == "exp_avg_sq" else torch.int8 for name in names)
    return (None if state_type == torch.float32 else state_type,) * len(names)


def state_itemsize(state: Sequence[torch.dtype]) -> float:
    """The bytes of an element of all components together: an int where they are whole."""
    nbytes = sum(_nbytes(dtype, QUANTUM) for dtype in state)
    return nbytes / QUANTUM if nbytes % QUANTUM else nbytes // QUANTUM


def _nbytes(dtype: torch.dtype, numel: int) -> int:
    return -(-numel // QUANTUM) * ROW_NBYTES if dtype in EIGHT_BITS else numel * dtype.itemsize


def firsts(elements: Tensor) -> Tensor:
    """The elements of a wide parameter that have its gradient, its moments, or its whole master."""
    return elements[::2]


def seconds(elements: Tensor) -> Tensor:
    """The others, which are zero."""
    return elements[1::2]


def with_firsts(values: Tensor) -> Tensor:
    """The inverse: all elements, with zeros in the places of the others."""
    elements = values.new_zeros(2 * values.numel())
    firsts(elements).copy_(values.reshape(-1))
    return elements


def rows_of(stored: Tensor) -> Tensor:
    """A stored component as it is; of 8 bits as a matrix with a row for each quantum."""
    return stored.view(-1, ROW_NBYTES) if stored.dtype in EIGHT_BITS else stored


def joined(parameter: Tensor, rest: Tensor, master: Tensor, scratch: Tensor) -> Tensor:
    """The masters of pairs, in `master`. scratch: memory of as many elements of 4 bytes."""
    upper, lower = master.view(torch.int32), scratch.view(torch.int32)
    master.copy_(parameter)
    scratch.view(torch.float32).copy_(rest.view(torch.bfloat16))  # as upper bits: faster than a conversion
    upper.add_(lower.bitwise_right_shift_(16))
    return master


def parted(master: Tensor, parameter: Tensor, rest: Tensor, scratch: Tensor) -> None:
    """The inverse: store masters as pairs."""
    rest.copy_(master.view(torch.int32))  # the lower 16 bits
    rounded(master, parameter, scratch)


def rounded(master: Tensor, parameter: Tensor, scratch: Tensor) -> None:
    """Store masters rounded, to bfloat16 with ties away from zero; to other types as torch does."""
    if parameter.dtype != torch.bfloat16 or master.dtype != torch.float32:
        parameter.copy_(master)
        return
    upper = torch.add(master.view(torch.int32), HALF, out=scratch.view(torch.int32)).bitwise_right_shift_(16)
    parameter.view(REST).copy_(upper)


def narrow(master: Tensor, dtype: torch.dtype) -> Tensor:
    """Masters rounded as updates round them."""
    found = torch.empty(master.shape, dtype=dtype)
    rounded(plain(master), found, torch.empty(master.shape, dtype=torch.float32))
    return found


def pair(master: Tensor) -> tuple[Tensor, Tensor]:
    """A parameter in bfloat16 and the rest of its master in float32."""
    master = plain(master)
    return narrow(master, torch.bfloat16), master.view(torch.int32).to(REST)


def plain(values: Tensor) -> Tensor:
    """The same with every NaN as one that a pair can be."""
    is_nan = values.isnan()
    return torch.where(is_nan, torch.nan, values) if is_nan.any() else values


def widened(stored: Tensor, wide: Tensor) -> Tensor:
    """A stored moment, in `wide`."""
    if stored.dtype not in EIGHT_BITS:
        return wide.copy_(stored)
    (scales, codes), lowest = _planes(stored), LOWEST[stored.dtype]
    upper, first = wide.view(torch.int32), _bits(lowest)
    upper.view(codes.shape).copy_(codes).bitwise_left_shift_(20)  # signed ones fill with their sign
    if stored.dtype == torch.int8:
        upper.bitwise_or_(first).bitwise_and_(~(1 << 30))
        torch.nn.functional.softshrink(wide, lowest, out=wide)  # type: ignore[call-arg]  # which stubs lack
    else:
        upper.add_(first)
        wide.sub_(lowest)
    wide.view(*scales.shape, BLOCK).div_(TOP - lowest).mul_(scales.unsqueeze(-1))
    return wide


def shown(stored: Tensor) -> Tensor:
    """Moments in 8 bits as they are stored, in float32: those of whole quanta."""
    rows = rows_of(stored)
    wide = torch.empty(len(rows) * QUANTUM, dtype=torch.float32)
    return widened(rows, wide)


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Moments as they are stored, rounded to nearest; in 8 bits what is short of a quantum is zeros."""
    if dtype not in EIGHT_BITS:
        return values.to(dtype)
    numel = -(-values.numel() // QUANTUM) * QUANTUM
    wide = torch.zeros(numel, dtype=torch.float32)
    wide[: values.numel()] = values.reshape(-1)
    rows = rows_of(torch.empty(_nbytes(dtype, numel), dtype=dtype))
    at_random(wide, rows, torch.full((numel,), HALF, dtype=torch.int32), torch.empty(numel, dtype=torch.int32))
    return rows


def at_random(wide: Tensor, narrow: Tensor, bits: Tensor, scratch: Tensor) -> None:
    """Store float32 in bfloat16, rounded up in magnitude as often as it is above: by the lower 16 of random bits.

    In blocks of 8 bits, too; `wide` does not outlive that.
    """
    if narrow.dtype in EIGHT_BITS:
        _in_blocks(wide, narrow, bits, scratch)
        return
    torch.bitwise_and(bits, 0xFFFF, out=scratch).add_(wide.view(torch.int32)).bitwise_right_shift_(16)
    narrow.view(torch.int16).copy_(scratch)


def _in_blocks(wide: Tensor, rows: Tensor, bits: Tensor, scratch: Tensor) -> None:
    (scales, codes), has_sign, lowest = _planes(rows), rows.dtype == torch.int8, LOWEST[rows.dtype]
    upper, blocks = wide.view(torch.int32), wide.view(*scales.shape, BLOCK)
    if has_sign:
        codes.copy_(torch.bitwise_right_shift(upper, 24, out=scratch).view(codes.shape)).bitwise_and_(-128)
        wide.abs_()
    torch.clamp(blocks.amax(-1), SMALLEST, LARGEST, out=scales)
    blocks.div_(scales.unsqueeze(-1))
    if not has_sign:  # what is above zero is not below the least that there is
        torch.maximum(wide, torch.sign(wide, out=scratch.view(torch.float32)).mul_(LEAST), out=wide)
    wide.mul_(TOP - lowest).add_(lowest)  # the largest is TOP
    upper.bitwise_right_shift_(4).add_(torch.bitwise_and(bits, 0xFFFF, out=scratch)).bitwise_right_shift_(16)
    if has_sign:
        codes.bitwise_or_(scratch.view(torch.int8)[: len(wide)].copy_(upper).bitwise_and_(127).view(codes.shape))
    else:
        codes.copy_(upper.view(codes.shape))


def _planes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and the codes of quanta."""
    return rows[:, :SCALES_NBYTES].view(torch.float32), rows[:, SCALES_NBYTES:]


@cache
def _bits(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.float32).view(torch.int32))


def noise(key: tuple[int, ...], first: int, bits: Tensor, scratch: Tensor) -> None:
    """32 random bits for each element from `first` on: those of a key and an element are always the same.

    A counter, mixed by two multiplications with the key between them (Wellons' lowbias32).
    """
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
    torch.arange(len(bits), out=bits).mul_(_signed(GOLDEN)).add_(_signed(first * GOLDEN + seed))
    for shift, factor, more in ((16, 0x7FEB352D, seed >> 32), (15, 0x846CA68B, 0)):
        _fold(bits, shift, scratch).mul_(_signed(factor))
        if more:
            bits.bitwise_xor_(_signed(more))
    _fold(bits, 16, scratch)


def _fold(bits: Tensor, shift: int, scratch: Tensor) -> Tensor:
    """The exclusive or with the upper bits, as if there were no sign."""
    torch.bitwise_right_shift(bits, shift, out=scratch).bitwise_and_((1 << 32 - shift) - 1)
    return bits.bitwise_xor_(scratch)


def _signed(number: int) -> int:
    """The 32-bit number with the same lower bits."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def rounds_to(master: Tensor, parameter: Tensor) -> Tensor:
    """Where masters round to these values, with ties either way: others round them to even."""
    return (narrow(master, parameter.dtype) == parameter) | (master.to(parameter.dtype) == parameter)
