"""codecs: frozen matrices are stored and moved in fewer bytes, and decoded on the device.

    nf4     4 bits of a table of 16 quantiles of the normal distribution, a scale for every 64 elements, 8 bits with a
            scale of their own for every 256 of them: 4.127 bits an element (QLoRA, arXiv 2305.14314, section 3)
            nf4_single: the scales of 64 in 32 bits instead (without double quantization): 4.5 bits an element
    fp4     the same with a table of floats of a sign, two bits of exponent and one of fraction; fp4_single
    int8    8 bits, and a scale for each row (LLM.int8(), arXiv 2208.07339, section 3.1)
    fp8     e4m3, and a scale for each block of 128 x 128 (DeepSeek-V3, arXiv 2412.19437, section 3.3)
    mxfp4   4 bits, a float of a sign, two bits of exponent and one of fraction, and a power of two in 8 bits for every
            32 inputs: 4.25 bits an element (OCP Microscaling Formats 1.0, section 5)

Tensors, their order and their values are those of bitsandbytes (nf4, fp4, int8) and of transformers' block-scaled FP8
and MXFP4, bit for bit, which `tests/runtime/test_codecs.py` checks. A stored matrix is the bytes of these tensors, one
after the other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from gs_compile.runtime.stream import has_own_memory

ALIGNMENT = 64  # of each stored tensor, in bytes
BLOCK = 64  # elements of 4 bits with one scale
SCALES = 256  # of these with one scale of their own
TILE = 128  # rows and columns with one scale of fp8
MX = 32  # elements with one scale of mxfp4
CHUNK = 1 << 18  # elements that are encoded or decoded at a time, a multiple of BLOCK * SCALES: they stay in a cache
LAUNCHED = 16  # chunks at a time on an asynchronous device: for fewer, launching takes longer than computing
FP8 = torch.float8_e4m3fn
TINY = 1e-38  # the least scale that is divided by: the scale of zeros is zero

NF4 = """
    -1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453
    -0.28444138169288635 -0.18477343022823334 -0.09105003625154495 0.0
    0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
    0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0
"""
FP4 = """
    0.0 0.005208333333333333 0.6666666666666666 1.0
    0.3333333333333333 0.5 0.16666666666666666 0.25
    -0.0 -0.005208333333333333 -0.6666666666666666 -1.0
    -0.3333333333333333 -0.5 -0.16666666666666666 -0.25
"""
E2M1 = """
    0.0 1.0 2.0 3.0 4.0 6.0 8.0 12.0
    -0.0 -1.0 -2.0 -3.0 -4.0 -6.0 -8.0 -12.0
"""
BIAS = 128  # of mxfp4's scales: 127, and 1 as the entries above are twice its values, so that no scale overflows

Shape = Sequence[int]


class Codec(ABC):
    """A format of a frozen matrix, or of several matrices of one shape: [..., rows, columns]."""

    name: str

    @abstractmethod
    def specs(self, shape: Shape) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each stored tensor, by name, in their order."""

    @abstractmethod
    def quantized(self, values: Tensor) -> Mapping[str, Tensor]:
        """The tensors that store some values."""

    @abstractmethod
    def dequantized(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        """Write the values to `out`, dense, computed in float32 and rounded to its dtype."""

    def nbytes(self, shape: Shape) -> int:
        """Bytes of a stored matrix."""
        return sum(_aligned(dtype.itemsize * math.prod(dims)) for dtype, dims in self.specs(shape).values())

    def tensors(self, stored: Tensor, shape: Shape) -> dict[str, Tensor]:
        """Views of the stored tensors in their bytes."""
        views, at = {}, 0
        for name, (dtype, dims) in self.specs(shape).items():
            nbytes = dtype.itemsize * math.prod(dims)
            views[name] = stored[at : at + nbytes].view(dtype).view(dims)
            at += _aligned(nbytes)
        return views

    def encode(self, values: Tensor) -> Tensor:
        """The bytes of a stored matrix, uint8."""
        return self.packed(self.quantized(values), values.shape)

    def packed(self, tensors: Mapping[str, Tensor], shape: Shape) -> Tensor:
        """The same from its tensors, which another library may have made."""
        device = next(iter(tensors.values())).device
        stored = torch.zeros(self.nbytes(shape), dtype=torch.uint8, device=device)
        for name, view in self.tensors(stored, shape).items():
            view.copy_(tensors[name].reshape(view.shape))
        return stored

    def decode(self, stored: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The values of a stored matrix, on the device that has its bytes."""
        out = torch.empty(tuple(shape), dtype=dtype, device=stored.device)
        self.dequantized(self.tensors(stored, shape), out)
        return out


@dataclass(frozen=True)
class FourBits(Codec):
    """Entries of a table of 16, in units of their block's largest magnitude."""

    name: str
    table: str  # the entry of each code, in units of the largest
    nested: bool  # whether the scales of blocks are stored in 8 bits, with scales of their own

    def specs(self, shape: Shape) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        numel = math.prod(shape)
        blocks = _ceil(numel, BLOCK)
        weight = {"weight": (torch.uint8, (_ceil(numel, 2),))}
        if not self.nested:
            return weight | {"absmax": (torch.float32, (blocks,))}
        return weight | {
            "absmax": (torch.uint8, (blocks,)),
            "nested_absmax": (torch.float32, (_ceil(blocks, SCALES),)),
            "nested_offset": (torch.float32, ()),
        }

    def quantized(self, values: Tensor) -> Mapping[str, Tensor]:
        table = _table(self.table, values.device)
        codes, absmax = _in_blocks(values, table, BLOCK)
        codes = torch.cat([codes, (table == 0).nonzero()[0].to(torch.uint8)[: len(codes) % 2]])
        weight = codes[::2].bitwise_left_shift(4).bitwise_or_(codes[1::2])  # the upper half's first
        if not self.nested:
            return {"weight": weight, "absmax": absmax}
        offset = absmax.mean()
        scales, nested = _in_blocks(absmax - offset, _dynamic(values.device), SCALES)
        return {"weight": weight, "absmax": scales, "nested_absmax": nested, "nested_offset": offset}

    def dequantized(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        absmax = self.scales(tensors)
        flat, pairs = out.view(-1), _pairs(self.table, out.device)
        step = _at_a_time(out.device)
        for start in range(0, len(flat), step):
            stop = min(start + step, len(flat))
            codes = tensors["weight"][start // 2 : _ceil(stop, 2)]
            values = pairs.index_select(0, codes.int()).view(torch.float32)[: stop - start]
            _scaled(values, absmax[start // BLOCK : _ceil(stop, BLOCK)], flat[start:stop])

    def scales(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The scale of each block, in float32."""
        if not self.nested:
            return tensors["absmax"]
        values = _dynamic(tensors["absmax"].device).index_select(0, tensors["absmax"].int())
        _scaled(values, tensors["nested_absmax"], values, SCALES)
        return values.add_(tensors["nested_offset"])


class Int8(Codec):
    name = "int8"

    def specs(self, shape: Shape) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"weight": (torch.int8, tuple(shape)), "SCB": (torch.float32, tuple(shape[:-1]))}

    def quantized(self, values: Tensor) -> Mapping[str, Tensor]:
        codes, scales = [], []
        for rows in values.detach().flatten(0, -2).split(max(1, CHUNK // values.shape[-1])):
            scale = rows.float().abs().amax(-1)
            of = torch.where(scale > 0, 127.0 / scale, 0.0).unsqueeze(-1)
            codes.append(rows.float().mul(of).round_().to(torch.int8))
            scales.append(scale)
        return {"weight": torch.cat(codes), "SCB": torch.cat(scales)}

    def dequantized(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        rows, scale = tensors["weight"].flatten(0, -2), tensors["SCB"].view(-1, 1)
        step = max(1, _at_a_time(out.device) // rows.shape[-1])
        for to, codes, of in zip(*(each.split(step) for each in (out.flatten(0, -2), rows, scale)), strict=True):
            to.copy_(codes.float().mul_(of).mul_(1 / 127))


class Fp8(Codec):
    name = "fp8"

    def specs(self, shape: Shape) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        *several, rows, columns = shape
        return {
            "weight": (FP8, tuple(shape)),
            "weight_scale_inv": (torch.float32, (*several, _ceil(rows, TILE), _ceil(columns, TILE))),
        }

    def quantized(self, values: Tensor) -> Mapping[str, Tensor]:
        codes, scales, largest = [], [], torch.finfo(FP8).max
        for matrix in values.detach().reshape(-1, *values.shape[-2:]):
            for rows in matrix.split(TILE):
                tiles = torch.nn.functional.pad(rows.float(), (0, -rows.shape[-1] % TILE)).unflatten(-1, (-1, TILE))
                most = tiles.abs().amax((0, 2), keepdim=True)
                scale = torch.where(most > 0, largest / most, 1.0)
                found = tiles.mul(scale).clamp_(-largest, largest).to(FP8)
                codes.append(found.flatten(-2)[:, : rows.shape[-1]])
                scales.append((1.0 / scale).view(-1))
        return {"weight": torch.cat(codes), "weight_scale_inv": torch.stack(scales)}

    def dequantized(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        rows, columns = out.shape[-2:]
        weight, to = (each.reshape(-1, rows, columns) for each in (tensors["weight"], out))
        scales = tensors["weight_scale_inv"].reshape(len(weight), -1, _ceil(columns, TILE))
        for matrix, place, of in zip(weight, to, scales.repeat_interleave(TILE, -1)[..., :columns], strict=True):
            for codes, there, scale in zip(matrix.split(TILE), place.split(TILE), of, strict=True):
                there.copy_(codes.float().mul_(scale))


class Mxfp4(Codec):
    """Blocks of inputs: along the rows of a matrix [outputs, inputs], as of `nn.Linear`, and along the columns of
    matrices [experts, inputs, outputs], as gpt-oss has them.
    """

    name = "mxfp4"

    def specs(self, shape: Shape) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        *several, rows, columns = (*shape[:-2], shape[-1], shape[-2]) if len(shape) > 2 else shape
        blocks = (*several, rows, _ceil(columns, MX))
        return {"blocks": (torch.uint8, (*blocks, MX // 2)), "scales": (torch.uint8, blocks)}

    def quantized(self, values: Tensor) -> Mapping[str, Tensor]:
        """The scale is the power of two below the largest, by the 4 in the largest entry; elements are rounded to the
        nearest entry, of two to the one with an even code, and to 6 beyond it (the specification's section 6.3).
        """
        blocks, scales, middles = [], [], _middles(E2M1, values.device)
        for matrix in _by_inputs(values.detach()):
            for rows in matrix.split(max(1, CHUNK // matrix.shape[-1])):
                scaled = torch.nn.functional.pad(rows.contiguous().float(), (0, -rows.shape[-1] % MX))
                scaled = scaled.unflatten(-1, (-1, MX))
                most = scaled.abs().amax(-1)
                scale = (most.frexp().exponent + BIAS - 4).clamp_(0, 254)  # at least 8 of its halves, less than 16
                scale = torch.where(most.isfinite(), scale, 255).to(torch.uint8)
                scaled = scaled.div(_powers(scale).unsqueeze(-1))
                codes = torch.bucketize(scaled.abs(), middles, out_int32=True).to(torch.uint8)
                codes = codes.bitwise_or_(scaled.signbit().to(torch.uint8).bitwise_left_shift_(3))
                blocks.append(codes[..., 1::2].bitwise_left_shift(4).bitwise_or_(codes[..., ::2]))  # lower half first
                scales.append(scale)
        return {"blocks": torch.cat(blocks), "scales": torch.cat(scales)}

    def dequantized(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        pairs, places = _pairs(E2M1, out.device, upper_first=False), _by_inputs(out)
        step = max(1, _at_a_time(out.device) // places.shape[-1])
        blocks, scales = (tensors[name].view(*places.shape[:2], -1) for name in ("blocks", "scales"))
        for place, codes, of in zip(places, blocks, scales, strict=True):
            for rows, some, scale in zip(place.split(step), codes.split(step), of.split(step), strict=True):
                values = pairs.index_select(0, some.reshape(-1).int()).view(torch.float32).view(-1, MX)
                values.mul_(_powers(scale).view(-1, 1))
                rows.copy_(values.view(len(rows), -1)[:, : rows.shape[-1]])


CODECS: Mapping[str, Codec] = {
    codec.name: codec
    for codec in (
        FourBits("nf4", NF4, nested=True),
        FourBits("nf4_single", NF4, nested=False),
        FourBits("fp4", FP4, nested=True),
        FourBits("fp4_single", FP4, nested=False),
        Int8(),
        Fp8(),
        Mxfp4(),
    )
}


@dataclass(frozen=True)
class Encoded:
    """A stored matrix: its bytes, and the codec, shape and dtype of its values."""

    codec: Codec
    stored: Tensor  # uint8
    shape: tuple[int, ...]
    dtype: torch.dtype

    def decoded(self) -> Tensor:
        """The values, on the device that has the bytes."""
        return self.codec.decode(self.stored, self.shape, self.dtype)


def dense(values: Tensor | Encoded) -> Tensor:
    """The values, decoded if they are encoded."""
    return values.decoded() if isinstance(values, Encoded) else values


def _at_a_time(device: torch.device) -> int:
    """Elements that are decoded at a time."""
    return LAUNCHED * CHUNK if has_own_memory(device) else CHUNK


# Blocks of one dimension ----------------------------------------------------------------------------------------------


def _in_blocks(values: Tensor, table: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """For every element the nearest entry of a table, in units of its block's largest magnitude; and these."""
    codes, scales = [], []
    entries, order = table.sort(stable=True)
    middles, order = (entries[:-1] + entries[1:]) / 2, order.to(torch.uint8)
    for flat in values.detach().reshape(-1).split(CHUNK):
        rows = torch.nn.functional.pad(flat.float(), (0, -len(flat) % block)).view(-1, block)
        absmax = rows.abs().amax(-1)
        rows = rows.mul((1.0 / absmax.clamp(min=TINY)).unsqueeze(-1)).clamp_(-1, 1)
        nearest = order.index_select(0, torch.bucketize(rows, middles, out_int32=True).view(-1))
        codes.append(nearest[: len(flat)])
        scales.append(absmax)
    return torch.cat(codes), torch.cat(scales)


def _scaled(values: Tensor, scales: Tensor, out: Tensor, block: int = BLOCK) -> None:
    """Values times the scale of their block, in `out`; the last block may be short."""
    whole = len(values) // block * block
    for some in (slice(0, whole), slice(whole, len(values))):
        of = scales[some.start // block : _ceil(some.stop, block)].unsqueeze(-1)
        if len(of):
            out[some].view(len(of), -1).copy_(values[some].view(len(of), -1).mul_(of))


def _by_inputs(values: Tensor) -> Tensor:
    """Matrices [number, outputs, inputs], where those of one dimension more have inputs before outputs."""
    return values.reshape(-1, *values.shape[-2:]).mT if values.ndim > 2 else values.unsqueeze(0)


def _ceil(numel: int, block: int) -> int:
    return -(-numel // block)


def _aligned(nbytes: int) -> int:
    return _ceil(nbytes, ALIGNMENT) * ALIGNMENT


# Tables ---------------------------------------------------------------------------------------------------------------


@cache
def _table(entries: str, device: torch.device) -> Tensor:
    """The entry of each code: of nf4 quantiles of the normal distribution, and zero, as published (arXiv 2305.14314,
    appendix E).
    """
    return torch.tensor([float(each) for each in entries.split()], dtype=torch.float32, device=device)


@cache
def _pairs(entries: str, device: torch.device, *, upper_first: bool = True) -> Tensor:
    """Both values of every byte, the upper or the lower half's first, as one element of 8 bytes."""
    codes, table = torch.arange(256, device=device), _table(entries, device)
    halves = (codes >> 4, codes & 15) if upper_first else (codes & 15, codes >> 4)
    return torch.stack([table[half] for half in halves], -1).view(torch.int64).view(-1)


@cache
def _middles(entries: str, device: torch.device) -> Tensor:
    """Between the entries that are not negative: up to which a value has the lower code of the two."""
    table = _table(entries, device)[:8]
    middles = (table[:-1] + table[1:]) / 2
    middles[1::2] = middles[1::2].nextafter(table[0])  # what is in the middle has the even code
    return middles


def _powers(codes: Tensor) -> Tensor:
    """2 to the power of each code less the bias."""
    return _all_powers(codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)


@cache
def _all_powers(device: torch.device) -> Tensor:
    exponents = torch.arange(256, device="cpu") - BIAS
    return torch.ldexp(torch.ones(256, dtype=torch.float32, device="cpu"), exponents).to(device)


@cache
def _dynamic(device: torch.device) -> Tensor:
    """256 numbers from -1 to 1: in each of 7 decades twice as many, evenly spaced, as in the one below (arXiv
    1511.04561).
    """
    numbers = [torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu")]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32, device="cpu")
        means = 10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        numbers += [means, -means]
    return torch.cat(numbers).sort().values.to(device)
