"""Muon's arithmetic against torch.optim.Muon, and what a parameter's matrices are.

Newton-Schulz is computed in bfloat16. So what rounds otherwise before it, by the last bit of a float32, is another
bfloat16 now and then; in float64 it hardly ever is, and all that follows is the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gs_compile.runtime.muon import COEFFICIENTS, STATES, Matrices, Orthogonalizer, matrices_of, update_whole
from gs_compile.runtime.stream import Device

HYPER: dict[str, Any] = {
    "lr": 0.02,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": COEFFICIENTS,
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": None,
}
SHAPES = [(24, 24), (8, 40), (40, 8), (1, 5), (33, 7)]
NUM_STEPS = 4


def gradient(shape: tuple[int, ...], number: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64).to(dtype)


def ours(matrices: Matrices, hyper: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A parameter and its momentum after some steps."""
    values, momentum = gradient(matrices.shape, 99, dtype).view(-1), torch.zeros(matrices.shape, dtype=dtype).view(-1)
    for number in range(NUM_STEPS):
        step = gradient(matrices.shape, number, dtype).view(-1)
        update_whole(values, step, [momentum], hyper, number + 1, matrices=matrices)
    return values.view(matrices.shape), momentum.view(matrices.shape)


def theirs(matrices: Matrices, hyper: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of torch's, which is given each matrix as a parameter of its own."""
    whole = gradient(matrices.shape, 99, dtype)
    parameters = [torch.nn.Parameter(each.clone()) for each in matrices.of(whole)]
    optimizer = torch.optim.Muon(parameters, **hyper)
    for number in range(NUM_STEPS):
        for parameter, each in zip(parameters, matrices.of(gradient(matrices.shape, number, dtype)), strict=True):
            parameter.grad = each.clone()
        optimizer.step()
    momentum = torch.empty_like(whole)
    for parameter, value, buffer in zip(parameters, matrices.of(whole), matrices.of(momentum), strict=True):
        value.copy_(parameter.detach())
        buffer.copy_(optimizer.state[parameter][STATES[0]])
    return whole, momentum


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"nesterov": False},
        {"momentum": 0.3},
        {"momentum": 0.0, "weight_decay": 0.0},
        {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
        {"ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
    ],
    ids=str,
)
def test_as_torch_computes_it(shape, changed):
    """The distances in float64 are those of a few roundings."""
    for mine, its in zip(*(of(Matrices(shape), HYPER | changed, torch.float64) for of in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-14)


def test_in_float32():
    """Momentum to two roundings a step; a step of a parameter, as its elements are at most the learning rate, to what
    bfloat16 tells apart of that.
    """
    values, momentum = ours(Matrices((24, 24)), HYPER, torch.float32)
    its_values, its_momentum = theirs(Matrices((24, 24)), HYPER, torch.float32)
    torch.testing.assert_close(momentum, its_momentum, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(values, its_values, rtol=0, atol=NUM_STEPS * HYPER["lr"] * 2**-7)


@pytest.mark.parametrize(
    "matrices",
    [
        Matrices((24, 8), 0, (8, 8, 8)),
        Matrices((8, 24), 1, (8, 8, 8)),
        Matrices((32, 8), 0, (16, 8, 8)),
        Matrices((3, 8, 5)),
        Matrices((2, 8, 12), 1, (4, 8)),
    ],
    ids=str,
)
def test_several_matrices_are_each_its_own(matrices):
    for mine, its in zip(*(of(matrices, HYPER, torch.float64) for of in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("path", "shape", "wanted"),
    [
        ("h.0.mlp.c_fc.weight", (32, 128), ()),
        ("h.0.attn.c_attn.weight", (32, 96), (1, 32, 32, 32)),
        ("h.0.attn.c_attn.weight", (96, 32), (0, 32, 32, 32)),
        ("layers.0.self_attn.qkv_proj.weight", (64, 32), ()),  # grouped queries: a group says how
        ("layers.0.attn.in_proj_weight", (96, 32), (0, 32, 32, 32)),
        ("layers.0.mlp.experts.down_proj", (4, 32, 8), ()),
        ("layers.0.conv.weight", (32, 1, 4), None),
        ("layers.0.norm.weight", (32,), None),
        ("layers.0.patch.weight", (32, 3, 4, 4), None),
    ],
)
def test_what_names_say(path, shape, wanted):
    found = matrices_of(path, shape, (), 5)
    assert (None if found is None else (found.dim, *found.sizes) if found.sizes else ()) == wanted


def test_what_a_step_costs():
    """Three products an iteration: of the longer side twice, of the shorter one once."""
    square, stack = Matrices((8, 8)), Matrices((3, 4, 16), num_steps=2)
    assert square.flops == 5 * 3 * 2 * 8**3
    assert stack.flops == 3 * 2 * (2 * 2 * 4 * 4 * 16 + 2 * 4**3)
    assert stack.scratch_nbytes == 2 * (3 * 4 * 16 + 2 * 4 * 4)


class Busy(Device):
    """Its copies are over when it has been asked three times."""

    has_own_memory = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.asked = self.asked_before = 0

    def record(self, stream: Any) -> Any:
        return self

    def query(self) -> bool:
        self.asked += 1
        return self.asked >= 3

    def unpin(self, address: int) -> None:
        self.asked_before = self.asked


def test_memory_that_is_copied_of_stays_until_the_copies_are_over() -> None:
    """An update that is given up does not wait for them."""
    muon = Orthogonalizer(device := Busy(), 8192)
    muon._stream = device
    muon.close()
    assert device.asked_before == 3
