"""Codecs: what bitsandbytes and transformers make of the same matrices, and what any codec owes its users."""

from __future__ import annotations

from math import copysign, floor, log2
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from gs_compile.options import Frozen
from gs_compile.runtime import codecs
from gs_compile.runtime.codecs import CODECS, Encoded, dense

bnb = pytest.importorskip("bitsandbytes.functional")

SHAPES = [(64, 64), (300, 192), (1000, 512), (300, 200), (33, 7)]
# Of values from a normal distribution: by the quantiles of nf4 (arXiv 2305.14314, table 2 has its effect), by rounding
# to 127 steps of a row's largest, and by the 3 bits of e4m3's fraction.
# fp4 has floats in the place of the quantiles.
NF4, FP4 = (0.08, 0.1), (0.1, 0.13)
ERRORS = dict.fromkeys(("nf4", "nf4_single"), NF4) | dict.fromkeys(("fp4", "fp4_single"), FP4)
ERRORS |= {"int8": (0.002, 0.012), "fp8": (0.02, 0.03), "mxfp4": (0.1, 0.15)}


def values(shape, dtype=torch.float32):
    return (0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))).to(dtype)


def test_the_options_name_them():
    assert set(get_args(Frozen)) == CODECS.keys()


@pytest.fixture
def narrow_default():
    """A default dtype, with no table made so far."""
    tables = (codecs._table, codecs._pairs, codecs._middles, codecs._all_powers, codecs._dynamic)
    for each in tables:
        each.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)
    for each in tables:
        each.cache_clear()


@pytest.mark.parametrize("name", CODECS)
def test_the_default_dtype_is_for_what_the_user_makes(name, request):
    given, codec = values((64, 64)), CODECS[name]
    wanted = codec.encode(given)
    read = codec.decode(wanted, given.shape, given.dtype)
    request.getfixturevalue("narrow_default")
    assert torch.equal(codec.encode(given), wanted)
    assert torch.equal(codec.decode(wanted, given.shape, given.dtype), read)


@pytest.mark.parametrize("name", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_4_bits_are_those_of_bitsandbytes(shape, dtype, name):
    """Its kernel for CPUs takes the second nearest of two scales' codes now and then (of 120,000 it took 191), where
    its own reference takes the nearest, as this does. Reading is the same bit for bit, but for rows that are no whole
    blocks, where its kernel for CPUs takes scales of other blocks than its reference and its kernels for GPUs.
    """
    given, codec = values(shape, dtype), CODECS[name]
    weight, state = bnb.quantize_4bit(given, quant_type=name, compress_statistics=True)
    ours = codec.quantized(given)
    assert torch.equal(ours["weight"], weight.view(-1))
    assert torch.equal(ours["nested_absmax"], state.state2.absmax)
    assert torch.equal(ours["nested_offset"], state.offset)
    apart = (ours["absmax"].int() - state.absmax.int()).abs()
    assert apart.max() <= 1
    assert apart.float().mean() < 0.005
    theirs = {**ours, "absmax": state.absmax, "weight": weight}
    stored = codec.packed(theirs, shape)
    if shape[-1] % codecs.BLOCK == 0:
        assert torch.equal(codec.decode(stored, shape, dtype), bnb.dequantize_4bit(weight, state))


@pytest.mark.parametrize("name", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_single_4_bits_are_those_of_bitsandbytes(shape, name):
    given, codec = values(shape, torch.bfloat16), CODECS[f"{name}_single"]
    weight, state = bnb.quantize_4bit(given, quant_type=name, compress_statistics=False)
    ours = codec.quantized(given)
    assert torch.equal(ours["weight"], weight.view(-1))
    assert torch.equal(ours["absmax"], state.absmax)
    if shape[-1] % codecs.BLOCK == 0:
        assert torch.equal(codec.decode(codec.encode(given), shape, given.dtype), bnb.dequantize_4bit(weight, state))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_is_that_of_bitsandbytes(shape):
    given, codec = values(shape, torch.float16), CODECS["int8"]
    weight, scale, _ = bnb.int8_vectorwise_quant(given)
    ours = codec.quantized(given)
    assert torch.equal(ours["weight"], weight)
    assert torch.equal(ours["SCB"], scale)
    decoded = codec.decode(codec.encode(given), shape, torch.float32)
    assert torch.equal(decoded, bnb.int8_vectorwise_dequant(weight, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (2, 128, 256)], ids=str)
def test_fp8_is_that_of_transformers(shape, dtype):
    given, codec = values(shape, dtype), CODECS["fp8"]
    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    quantizer = SimpleNamespace(quantization_config=config)
    theirs = Fp8Quantize(quantizer).convert({"a.weight": given})
    ours = codec.quantized(given)
    assert torch.equal(ours["weight"].view(shape).float(), theirs["a.weight"].float())
    assert torch.equal(ours["weight_scale_inv"].view(-1), theirs["a.weight_scale_inv"].view(-1))
    decoded = codec.decode(codec.encode(given), shape, dtype)
    read = Fp8Dequantize(quantizer)._dequantize_one(theirs["a.weight"], theirs["a.weight_scale_inv"], dtype)
    assert torch.equal(decoded, read)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_mxfp4_is_read_as_by_transformers(dtype):
    """Each scale with each byte of two elements."""
    codec, shape = CODECS["mxfp4"], (2, 1024, 64)
    codes = torch.arange(256, dtype=torch.uint8)
    blocks = codes.view(2, 1, 8, 16).repeat(1, 64, 4, 1)
    scales = codes.view(2, 4, 1, 32).repeat(1, 1, 16, 1).view(2, 64, 32)
    stored = codec.packed({"blocks": blocks, "scales": scales}, shape)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert theirs.shape == shape
    assert torch.equal(codec.decode(stored, shape, dtype).view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("size", [1.0, 3e-3, 1e-38, 1e37])
def test_mxfp4_is_written_as_its_specification_says(size):
    """OCP Microscaling Formats 1.0, section 6.3, with ties to even: every quarter from -8 to 8 is among the values."""
    given = torch.cat([torch.arange(-32, 32) / 4, torch.randn(448, generator=torch.Generator().manual_seed(0))])
    given = (given * size).view(-1, 32)
    found = CODECS["mxfp4"].quantized(given)
    for block, codes, scale in zip(given.double().tolist(), found["blocks"], found["scales"], strict=True):
        power = max(floor(log2(max(map(abs, block)))) - 2, -127)
        wanted = [
            min(range(8), key=lambda code: (abs(FP4_VALUES[code] - abs(each) / 2.0**power), code % 2))
            + 8 * (copysign(1, each) < 0)
            for each in block
        ]
        assert scale == power + 127
        assert torch.equal(codes.view(-1), torch.tensor(wanted[::2]) + 16 * torch.tensor(wanted[1::2]))


def test_values_of_mxfp4_are_encoded_to_themselves():
    """As of a checkpoint that another library has decoded."""
    codec, shape = CODECS["mxfp4"], (3, 64, 40)
    stored = torch.randint(8, 248, (codec.nbytes(shape),), generator=torch.Generator().manual_seed(0)).byte()
    values = codec.decode(stored, shape, torch.bfloat16)
    assert torch.equal(codec.decode(codec.encode(values), shape, torch.bfloat16), values)


def test_what_is_not_finite_is_not_in_mxfp4():
    for given in (float("inf"), -float("inf"), float("nan")):
        codec = CODECS["mxfp4"]
        values = torch.ones(2, 32).index_put_((torch.tensor(0), torch.tensor(3)), torch.tensor(given))
        found = codec.decode(codec.encode(values), values.shape, torch.float32)
        assert found.isfinite().sum() == 63


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 3), (3, 130, 70), (5000, 300)], ids=str)
def test_a_codec(name, shape):
    """The values are near, the given ones stay as they are, a narrow dtype is one rounding on, and the bytes are as
    many as it says, wherever they stand.
    """
    given, codec = values(shape), CODECS[name]
    before = given.clone()
    stored = codec.encode(given)
    assert torch.equal(given, before)
    assert (stored.dtype, stored.shape) == (torch.uint8, (codec.nbytes(shape),))
    found = codec.decode(stored, shape, torch.float32)
    least, most = ERRORS[name]
    error = float((found - given).norm() / given.norm())
    assert error < most
    assert error > least or given.numel() < 300
    assert torch.equal(codec.decode(stored, shape, torch.bfloat16), found.bfloat16())
    flat = torch.zeros(len(stored) + 128, dtype=torch.uint8)
    flat[64 : 64 + len(stored)] = stored
    assert torch.equal(dense(Encoded(codec, flat[64 : 64 + len(stored)], shape, torch.float32)), found)


@pytest.mark.parametrize("name", CODECS)
def test_zeros(name):
    codec = CODECS[name]
    assert not codec.decode(codec.encode(torch.zeros(64, 32)), (64, 32), torch.float32).any()


@pytest.mark.parametrize("name", CODECS)
def test_pieces_do_not_show(name, monkeypatch):
    given, codec = values((300, 2000)), CODECS[name]
    stored = codec.encode(given)
    whole = codec.decode(stored, given.shape, torch.float32)
    monkeypatch.setattr(codecs, "CHUNK", codecs.BLOCK * codecs.SCALES)
    assert torch.equal(codec.encode(given), stored)
    assert torch.equal(codec.decode(stored, given.shape, torch.float32), whole)


def test_bits_of_an_element():
    """Of a large matrix: 4 + 8/64 + 32/(64 * 256) of nf4."""
    shape = (4096, 11008)
    bits = {name: 8 * codec.nbytes(shape) / (shape[0] * shape[1]) for name, codec in CODECS.items()}
    wanted = {"nf4": 4.127, "nf4_single": 4.5, "fp4": 4.127, "fp4_single": 4.5}
    wanted |= {"int8": 8.003, "fp8": 8.002, "mxfp4": 4.25}
    assert bits == pytest.approx(wanted, abs=5e-4)
