"""A pair of 16 + 16 bits is its master, whatever that is."""

from __future__ import annotations

import pytest
import torch

from gs_compile.placement.shards import QUANTUM
from gs_compile.runtime.formats import (
    BLOCK,
    EIGHT_BITS,
    Types,
    at_random,
    joined,
    moment_types,
    narrow,
    narrowed,
    noise,
    pair,
    rounds_to,
    shown,
    types_of,
)
from gs_compile.runtime.kernels import ADAMW

# Every upper half, with the lower halves where rounding turns: signs, zeros, subnormals, the largest, infinities, NaN.
UPPER = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
LOWER = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
MASTERS = (UPPER[:, None] + LOWER).flatten().view(torch.float32)


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize]).int()


def test_a_pair_gives_its_master_back():
    parameter, rest = pair(MASTERS)
    assert (parameter.dtype, rest.dtype) == (torch.bfloat16, torch.int16)
    found = joined(parameter, rest, torch.empty_like(MASTERS), torch.empty_like(MASTERS))
    is_nan = MASTERS.isnan()
    assert torch.equal(bits(found)[~is_nan], bits(MASTERS)[~is_nan])
    assert found[is_nan].isnan().all()
    assert torch.equal(bits(found), (bits(parameter) << 16) + rest.int())


def test_the_parameter_is_the_nearest_with_ties_away_from_zero():
    parameter, rest = pair(MASTERS)
    assert parameter[MASTERS.isnan()].isnan().all()
    finite = MASTERS.isfinite()
    usual, is_tie = MASTERS.bfloat16(), rest == -(1 << 15)
    assert torch.equal(bits(parameter)[finite & ~is_tie], bits(usual)[finite & ~is_tie])
    assert torch.equal(parameter[MASTERS.isinf()].float(), MASTERS[MASTERS.isinf()])
    away = finite & is_tie
    assert (parameter[away].abs() >= MASTERS[away].bfloat16().abs()).all()
    assert (parameter[away].float().abs() > MASTERS[away].abs()).all()
    beyond = torch.tensor([3.4e38, -3.4e38])  # the largest that bfloat16 has is 3.39e38
    assert torch.equal(pair(beyond)[0].float(), beyond.sign() * torch.inf)
    assert rounds_to(MASTERS[finite], usual[finite]).all()
    assert rounds_to(MASTERS[finite], parameter[finite]).all()
    double = MASTERS[finite].double()
    assert torch.equal(narrow(double, torch.bfloat16), double.bfloat16())


@pytest.mark.parametrize(
    ("parameter", "pairs", "state"),
    [
        (torch.bfloat16, True, (torch.int16, torch.float32)),
        (torch.bfloat16, False, (torch.float32, torch.float32)),
        (torch.float16, True, (torch.float32, torch.float32)),
        (torch.float32, True, (torch.float32,)),
        (torch.float64, True, (torch.float64,)),
    ],
)
def test_what_can_be_half_of_its_master_is(parameter, pairs, state):
    assert types_of(parameter, [None], pairs=pairs) == Types(parameter, state)


def drawn(key, first, numel):
    bits = torch.empty(numel, dtype=torch.int32)
    noise(key, first, bits, torch.empty_like(bits))
    return bits


def test_random_bits_are_those_of_the_element_and_the_step():
    whole = drawn((5, 1), 0, 1 << 18)
    assert torch.equal(whole[3000:7000], drawn((5, 1), 3000, 4000))
    for other in (drawn((5, 2), 0, 1 << 18), drawn((6, 1), 0, 1 << 18), whole.roll(1)):
        ones = (whole ^ other).view(torch.uint8).unsqueeze(1).bitwise_right_shift(torch.arange(8)).bitwise_and(1)
        assert ones.double().mean() == pytest.approx(0.5, abs=1e-3)  # 2**23 bits: a deviation of 2e-4
    per_bit = whole.unsqueeze(1).bitwise_right_shift(torch.arange(32)).bitwise_and(1).double().mean(0)
    assert per_bit == pytest.approx(torch.full((32,), 0.5), abs=6e-3)  # of 2**18: 1e-3


@pytest.mark.parametrize("value", [1.0, -1.0009765625, 3.1e-20, 0.0, torch.inf])
def test_what_is_rounded_at_random_is_right_on_average(value):
    wide = torch.full((1 << 20,), value)
    narrow = torch.empty_like(wide, dtype=torch.bfloat16)
    at_random(wide, narrow, drawn((1,), 0, 1 << 20), torch.empty_like(wide, dtype=torch.int32))
    assert narrow.double().mean() == pytest.approx(float(wide[0]), rel=3e-5, abs=0.0)
    assert len(narrow.unique()) == 1 + (value not in (0.0, 1.0, torch.inf))


def test_what_moments_have_8_bits():
    """Float64 has all of its bits."""
    moments = moment_types("8bit", ("exp_avg", "exp_avg_sq"))
    eight = types_of(torch.bfloat16, moments, pairs=True)
    assert eight == Types(torch.bfloat16, (torch.int16, torch.int8, torch.uint8))
    assert eight.state_itemsize * 256 == 2 * 256 + 2 * (256 + 4)
    assert types_of(torch.float64, moments, pairs=True).state == (torch.float64,) * 2


SCALES = torch.tensor([0.0, 1e-38, 3e-30, 7e-5, 1.0, 3.3, 2e17, torch.finfo(torch.float32).max])


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_what_has_8_bits_already_stays_as_it_is(dtype):
    """Each code of every scale: rounded to nearest, and at random."""
    relative = torch.rand(len(SCALES), QUANTUM, generator=torch.Generator().manual_seed(0)).double() ** 40
    relative.view(-1, BLOCK)[:, 0] = 1.0
    wide = (relative * SCALES[:, None]).float().flatten()
    if dtype == torch.int8:
        wide[1::2] *= -1
    once = shown(narrowed(wide, dtype))
    again = narrowed(once, dtype)
    assert torch.equal(shown(again), once)
    at_random(once.clone(), again, drawn((1,), 0, len(once)), torch.empty(len(once), dtype=torch.int32))
    assert torch.equal(shown(again), once)
    largest = wide.view(-1, BLOCK)[:, 0]
    kept = largest.abs() >= 2.0**-100
    assert torch.equal(once.view(-1, BLOCK)[kept, 0], largest[kept])
    assert not once[:QUANTUM].any(), "zeros are zeros"
    least = 2.1e-6 if dtype == torch.int8 else 3.2e-11  # of a scale
    steps = wide.abs() / 15.5 + least * SCALES.repeat_interleave(QUANTUM).clamp(min=2.0**-100)
    assert ((once - wide).abs() <= steps).all()
    assert len(once[-QUANTUM:].unique()) > 100


@pytest.mark.parametrize("value", [1.0, 0.77, -0.3, 1.234e-3, 2e-5, -1e-7, 3e-9])
def test_8_bits_are_right_on_average_and_what_divides_is_never_zero(value):
    """The mean of a second moment is above what is too small beside its block's largest."""
    wide = torch.full((1 << 20,), value)
    wide[::BLOCK] = 1.0
    for dtype in EIGHT_BITS if value > 0 else (torch.int8,):
        rows = narrowed(wide, dtype)
        at_random(wide.clone(), rows, drawn((1,), 0, 1 << 20), torch.empty(1 << 20, dtype=torch.int32))
        found = shown(rows).view(-1, BLOCK)
        assert (found[:, 0] == 1.0).all()
        rest = found[:, 1:].double()
        if dtype == torch.uint8:
            assert rest.min() > 0
        probability = max(1e-3, min(1.0, abs(value) / 2e-6))
        assert float(rest.mean()) == pytest.approx(value, rel=6 * (probability * len(wide)) ** -0.5 + 2e-4)


def test_in_8_bits_what_is_small_beside_its_block_is_trained_as_in_float32():
    """And nowhere is a step much larger."""
    numbers, numel, lr = torch.Generator().manual_seed(0), 8 * QUANTUM, 1e-2
    sizes = 10 ** (-4 * torch.rand(numel, generator=numbers))
    hyper = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "place": (5, 0)}
    masters, states, moved = [torch.zeros(numel) for _ in range(2)], [], []
    for each in (None, "8bit"):
        types = types_of(torch.float32, moment_types(each, ADAMW.states), pairs=False)
        states.append(types.components(torch.zeros(int(numel * types.state_itemsize), dtype=torch.uint8), 0, numel))
    for step in range(1, 61):
        gradient = sizes * (1 + 0.5 * torch.randn(numel, generator=numbers))
        before = masters[1].clone()
        for master, state in zip(masters, states, strict=True):
            ADAMW.update(master, gradient, state, hyper, step)
        moved.append((masters[1] - before).abs().max())
    assert max(moved) < 3 * lr
    for small in (sizes > 0.1, (sizes < 1e-2) & (sizes > 1e-3), sizes < 2e-4):
        usual, found = (float(master[small].double().mean()) for master in masters)
        assert found == pytest.approx(usual, rel=0.05)
