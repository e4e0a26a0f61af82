"""Optimizer rules against torch's own, and the same bits for every cut and number of threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gs_compile.runtime import kernels
from gs_compile.runtime.formats import StateType, joined, moment_types, pair, types_of
from gs_compile.runtime.kernels import ADAM, ADAMW, LION, QUANTUM, SGD, Rule, sum_of_squares

RULES = {rule.name: rule for rule in (ADAMW, ADAM, SGD, LION)}
ADAM_HYPER = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-8, "weight_decay": 0.1}
SGD_HYPER = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "nesterov": False, "weight_decay": 0.1}
HYPER: dict[str, dict[str, Any]] = {
    "AdamW": ADAM_HYPER,
    "Adam": ADAM_HYPER,
    "SGD": SGD_HYPER,
    "Lion": {"lr": 1e-2, "betas": (0.9, 0.98), "weight_decay": 0.1},
}
VARIANTS: list[tuple[Rule, dict[str, Any]]] = [
    (ADAMW, {}),
    (ADAMW, {"weight_decay": 0.0}),
    (ADAMW, {"maximize": True}),
    (ADAM, {}),
    (ADAM, {"betas": (0.5, 0.9), "eps": 1e-3, "maximize": True}),
    (SGD, {}),
    (SGD, {"momentum": 0, "dampening": 0}),
    (SGD, {"nesterov": True, "dampening": 0}),
    (SGD, {"maximize": True, "weight_decay": 0.0}),
]
NAMES = [rule.name + "".join(f" {key}={value}" for key, value in changed.items()) for rule, changed in VARIANTS]


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CHUNK", QUANTUM)


def random(quanta: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(quanta * QUANTUM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def states(rule: Rule, hyper: dict[str, Any], master: Tensor) -> list[Tensor]:
    return [torch.zeros_like(master) for _ in rule.components(hyper)]


def torch_optimizer(rule: Rule, parameter: Tensor, hyper: dict[str, Any], **how: bool) -> torch.optim.Optimizer:
    return getattr(torch.optim, rule.name)([parameter], **hyper, **how)


def both(rule: Rule, hyper: dict[str, Any], steps: int, **how: bool) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Master and state after some steps: ours, torch's."""
    master = random(5)
    parameter = torch.nn.Parameter(master.clone())
    optimizer = torch_optimizer(rule, parameter, hyper, **how)
    state = states(rule, hyper, master)
    for step in range(1, steps + 1):
        gradient = random(5, seed=step)
        parameter.grad = gradient.clone()
        optimizer.step()
        rule.update(master, gradient, state, hyper, step)
    theirs = [optimizer.state[parameter][name] for name in rule.components(hyper)]
    return (master, *state), (parameter.detach(), *theirs)


@pytest.mark.parametrize(("rule", "changed"), VARIANTS, ids=NAMES)
def test_bitwise_torch_fused(rule: Rule, changed: dict[str, Any]):
    ours, theirs = both(rule, HYPER[rule.name] | changed, steps=5, fused=True)
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lion_as_written(dtype: torch.dtype, maximize: bool):
    hyper = HYPER["Lion"] | {"maximize": maximize}
    lr, wd, (b1, b2) = hyper["lr"], hyper["weight_decay"], hyper["betas"]
    master = random(3, dtype)
    momentum = torch.zeros_like(master)
    p, m = master.clone(), momentum.clone()
    for step in range(1, 6):
        gradient = random(3, dtype, seed=step)
        LION.update(master, gradient, [momentum], hyper, step)
        g = -gradient if maximize else gradient
        p *= 1 - lr * wd
        p -= lr * torch.sign(b1 * m + (1 - b1) * g)
        m = b2 * m + (1 - b2) * g
    assert torch.equal(master, p)
    assert torch.equal(momentum, m)


cuts = st.lists(st.integers(1, 6), max_size=4).map(lambda sizes: [*sizes, 7])


@given(
    rule=st.sampled_from(sorted(RULES)),
    cut=cuts,
    threads=st.integers(1, 3),
    chunk=st.sampled_from([1, 3, 64]),
    master_dtype=st.sampled_from([torch.float32, torch.float64]),
    gradient_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    low_dtype=st.sampled_from([None, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([1.0, 0.3]),
)
def test_same_bits_for_every_cut_and_thread_count(
    rule, cut, threads, chunk, master_dtype, gradient_dtype, low_dtype, scale
):
    quanta, hyper = sum(cut), HYPER[rule] | {"scale": scale}

    def run(cut: list[int], threads: int, chunk: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "CHUNK", chunk * QUANTUM)
            master = random(quanta, master_dtype)
            low = None if low_dtype is None else torch.empty_like(master, dtype=low_dtype)
            state = states(RULES[rule], HYPER[rule], master)
            for step in (1, 2, 3):
                gradient = random(quanta, gradient_dtype, seed=step)
                for part in slices(cut):
                    rounded = None if low is None else low[part]
                    cut_state = [each[part] for each in state]
                    RULES[rule].update(master[part], gradient[part], cut_state, hyper, step, rounded)
        return [master, *state, *([] if low is None else [low])]

    for mine, whole in zip(run(cut, threads, chunk), run([quanta], 1, 1024), strict=True):
        assert torch.equal(mine, whole)


@given(
    rule=st.sampled_from(sorted(RULES)),
    cut=cuts,
    threads=st.integers(1, 3),
    chunk=st.sampled_from([1, 3, 64]),
    moments=st.sampled_from([torch.float32, torch.bfloat16, "8bit"]),
    scale=st.sampled_from([1.0, 0.3]),
)
def test_pairs_and_narrow_states_are_the_same_for_every_cut(rule, cut, threads, chunk, moments, scale):
    """And what pairs learn is what whole masters learn."""
    quanta, hyper = sum(cut), HYPER[rule] | {"scale": scale}

    def run(cut: list[int], threads: int, chunk: int, *, pairs: bool) -> list[Tensor]:
        torch.set_num_threads(threads)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "CHUNK", chunk * QUANTUM)
            low, rest = pair(random(quanta))
            stored = rest if pairs else random(quanta)
            state = stored_states(RULES[rule], HYPER[rule], moments, quanta)
            for step in (1, 2, 3):
                gradient = random(quanta, seed=step)
                for part in slices(cut):
                    placed, cut_state = hyper | {"place": (5, part.start)}, cut_states(state, part)
                    RULES[rule].update(stored[part], gradient[part], cut_state, placed, step, low[part])
        master = joined(low, stored, torch.empty(len(low)), torch.empty(len(low))) if pairs else stored
        return [master, low, *state]

    whole = run([quanta], 1, 1024, pairs=False)
    assert (moments == torch.float32) or all(each.count_nonzero() for each in whole[2:])
    for mine, its in zip(run(cut, threads, chunk, pairs=True), whole, strict=True):
        assert torch.equal(mine, its)


def stored_states(rule: Rule, hyper: dict[str, Any], state_type: StateType, quanta: int) -> list[Tensor]:
    """Zeros, as they are stored."""
    types = types_of(torch.float32, moment_types(state_type, rule.components(hyper)), pairs=False)
    nbytes = int(quanta * QUANTUM * types.state_itemsize)
    return types.components(torch.zeros(nbytes, dtype=torch.uint8), 0, quanta * QUANTUM)


def cut_states(state: Sequence[Tensor], part: slice) -> list[Tensor]:
    return [each[part] if each.dim() == 1 else each[part.start // QUANTUM : part.stop // QUANTUM] for each in state]


def slices(cut: list[int]) -> Iterator[slice]:
    start = 0
    for quanta in cut:
        yield slice(start * QUANTUM, (start + quanta) * QUANTUM)
        start += quanta


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_conversions_are_those_done_apart(rule: Rule, dtype: torch.dtype, small_chunks: None):
    gradient, hyper = random(7, dtype, seed=1), HYPER[rule.name]
    kept = gradient.clone()
    together, apart = random(7), random(7)
    state, state_apart = (states(rule, hyper, master) for master in (together, apart))
    low = torch.empty_like(together, dtype=torch.bfloat16)
    rule.update(together, gradient, state, hyper | {"scale": 0.7}, 1, low)
    rule.update(apart, gradient.float().mul(0.7), state_apart, hyper, 1)
    assert torch.equal(gradient, kept)
    for one, other in zip([together, *state, low], [apart, *state_apart, apart.bfloat16()], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("rule", "changed"), [*VARIANTS, (LION, {}), (LION, {"maximize": True})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_stays_zero(rule: Rule, changed: dict[str, Any], dtype: torch.dtype):
    hyper = HYPER[rule.name] | changed | {"scale": 0.5}
    master = torch.zeros(2 * QUANTUM)
    state = states(rule, hyper, master)
    low = torch.empty_like(master, dtype=torch.bfloat16)
    for step in (1, 2, 3):
        rule.update(master, torch.zeros(2 * QUANTUM, dtype=dtype), state, hyper, step, low)
    for flat in (master, *state, low):
        assert not flat.any()


def test_scale_is_clipping():
    ours, theirs = random(4), torch.nn.Parameter(random(4))
    gradient = random(4, seed=1)
    theirs.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_([theirs], 1.0)
    coefficient = float(torch.clamp(1.0 / (norm + 1e-6), max=1.0))
    torch_optimizer(ADAMW, theirs, ADAM_HYPER, fused=True).step()
    ADAMW.update(ours, gradient, states(ADAMW, ADAM_HYPER, ours), ADAM_HYPER | {"scale": coefficient}, 1)
    assert torch.equal(ours, theirs.detach())


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_an_empty_part_is_no_work(rule: Rule):
    empty = torch.empty(0)
    rule.update(empty, empty, states(rule, HYPER[rule.name], empty), HYPER[rule.name], 1, empty.bfloat16())


@pytest.mark.parametrize("rule", [ADAM, ADAMW])
def test_refuses_an_eps_that_would_spoil_the_padding(rule: Rule):
    master = torch.zeros(QUANTUM)
    with pytest.raises(AssertionError, match="0 / 0"):
        rule.update(master, master.clone(), states(rule, ADAM_HYPER, master), ADAM_HYPER | {"eps": 0.0}, 1)


def test_refuses_what_is_not_whole_quanta():
    short = torch.zeros(QUANTUM - 1)
    with pytest.raises(AssertionError, match="multiple of 2048"):
        LION.update(short, short, [short.clone()], HYPER["Lion"], 1)


@given(
    cut=cuts,
    threads=st.integers(1, 3),
    chunk=st.sampled_from([1, 3, 64]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_sum_of_squares_has_the_same_bits_for_every_cut(cut, threads, chunk, dtype):
    flat = random(sum(cut), dtype)
    torch.set_num_threads(1)
    whole = sum_of_squares(flat)
    assert whole == pytest.approx(float(flat.double().square().sum()), rel=1e-6)
    torch.set_num_threads(threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CHUNK", chunk * QUANTUM)
        assert sum_of_squares(*(flat[part] for part in slices(cut))) == whole


def test_sum_of_squares_beyond_float32():
    flat = torch.full((2 * QUANTUM,), 3e38)
    assert sum_of_squares(flat) == pytest.approx(2 * QUANTUM * 9e76, rel=1e-6)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, QUANTUM, 3 * QUANTUM - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sum_of_squares_sees_one_bad_element(value: float, place: int, dtype: torch.dtype):
    flat = random(3, dtype)
    flat[place] = value
    assert sum_of_squares(flat) == math.inf
    assert sum_of_squares(flat[:QUANTUM], flat[QUANTUM:]) == math.inf


def test_sum_of_squares_of_float64_that_overflow():
    assert sum_of_squares(torch.full((QUANTUM,), 4e152, dtype=torch.float64)) == math.inf


def test_nothing_has_no_squares():
    assert sum_of_squares() == sum_of_squares(torch.empty(0)) == 0.0


def test_scratch_is_kept(monkeypatch: pytest.MonkeyPatch, small_chunks: None):
    made: list[Any] = []
    empty: Callable[..., Tensor] = torch.empty
    monkeypatch.setattr(kernels, "_memory", kernels._Scratch())
    monkeypatch.setattr(torch, "empty", lambda *size, **how: made.append(size) or empty(*size, **how))
    master = torch.zeros(9 * QUANTUM)
    for step in (1, 2):
        LION.update(master, random(9, torch.bfloat16), [torch.zeros_like(master)], HYPER["Lion"], step)
    assert len(made) == 3  # gradient, direction, fresh


def test_a_scale_of_one_changes_no_bit():
    """So an update that held is the update that would have waited."""
    for rule in RULES.values():
        flats = [[torch.randn(4096, generator=torch.Generator().manual_seed(n)).abs() for n in range(4)] for _ in "ab"]
        for (master, gradient, *state), scale in zip(flats, ({}, {"scale": 1.0}), strict=True):
            rule.update(master, gradient, state[: len(rule.states)], HYPER[rule.name] | scale, 3)
        assert all(map(torch.equal, *flats))
