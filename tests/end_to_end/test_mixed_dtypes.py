"""Parameters of different dtypes in a layer: float32 ones beside those of 16 bits, and frozen ones of any dtype.

That they learn the same bits wherever they are, test_same_bits.py has; here it is what plain PyTorch learns.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
from learner import same_tensors
from tiered import BATCH, GPT2, Harness, Output, adamw, loss_of, options, sgd, step, tokens
from torch import nn
from torch.nn import functional

from gs_compile.errors import CaptureError

KEEPS_CAPTURES = True


class Experts(nn.Module):
    """A router in float32 before two experts in bfloat16; an adapter in float32 beside a frozen matrix in float16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width).bfloat16() for _ in range(2))
        self.frozen = nn.Parameter(torch.randn(width, width, dtype=torch.float16), requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(width, 3) / 9), nn.Parameter(torch.randn(3, width) / 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x.float()).softmax(-1).bfloat16()
        for number, expert in enumerate(self.experts):
            x = x + shares[..., number, None] * functional.gelu(expert(x))
        wide = x.float()
        return x + (wide @ self.down @ self.up + (wide @ self.frozen.float()) / 99).bfloat16()


class Mixed(GPT2):
    """With a head in float32 behind a norm in bfloat16, which is read apart from the layers."""

    def __init__(self) -> None:
        super().__init__(0, 32, 70, 0.0, tied=False)
        self.bfloat16()
        self.transformer.h = nn.ModuleList(Experts(32) for _ in range(2))
        self.lm_head.float()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None):
        x = self.transformer.wte(input_ids) + self.transformer.wpe.weight
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x).float())
        return Output(functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


@pytest.fixture(scope="module")
def harness() -> Harness:
    return Harness(mixed)


def sgd_of(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1.0)


def compare(model: nn.Module, plain: nn.Module, rounding: float = 0.0) -> None:
    """What is wide is the same to `rounding`; a parameter of 16 bits follows a master here, in plain PyTorch none."""
    for name, wanted in plain.state_dict().items():
        found = model.state_dict()[name]
        most = 2.0**-8 if wanted.dtype == torch.bfloat16 else rounding
        torch.testing.assert_close(found, wanted, rtol=most, atol=most, msg=name)


@pytest.mark.parametrize("masters", ["split", "whole"])
def test_one_micro_batch_learns_what_plain_pytorch_does(harness, tmp_path, masters):
    """One update, by the gradient itself: bit for bit where parameters are as wide as it."""
    plain = mixed()
    with harness.fresh(sgd, options(tmp_path, micro_batch_size=BATCH, masters=masters)) as optimizer:
        assert step(harness.model, optimizer, tokens(0)) == step(plain, sgd_of(plain), tokens(0))
        compare(harness.model, plain)


def test_gradients_from_outside_are_added(harness, tmp_path):
    """To sums of several micro-batches and backwards; rounding is that of sums in another order."""
    plain = mixed()

    def learn(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number in range(2):
            loss_of(model, tokens(number)).backward()
        sum(each.square().sum() for each in model.parameters() if each.dtype == torch.float32).backward()
        optimizer.step()

    learn(plain, sgd_of(plain))
    with harness.fresh(sgd, options(tmp_path, accumulate=True, ratios={"gradient": 0.5})) as optimizer:
        learn(harness.model, optimizer)
        compare(harness.model, plain, 1e-2 / 2**8)  # of a forward in bfloat16, batches of another size


@pytest.mark.parametrize(
    ("masters", "state_dtype"),
    [
        ("split", "8bit"),
        ("whole", None),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("split", None), ("whole", "8bit"))),
    ],
)
def test_states_are_shown_and_come_back(harness, tmp_path, masters, state_dtype):
    """A wide parameter has moments, and no master; those of a narrow one are beside it."""
    given = options(tmp_path, masters=masters, alpha=0.5)
    with harness.fresh(partial(adamw, state_dtype=state_dtype), given) as optimizer:
        step(harness.model, optimizer, tokens(0))
        before = deepcopy(optimizer.state_dict())
        dtypes = {p.dtype: {*optimizer.stored_state(p)} for p in harness.model.parameters() if p.requires_grad}
        assert dtypes[torch.bfloat16] - dtypes[torch.float32] == {"master"}
        kept = {name: value.clone() for name, value in harness.model.state_dict().items()}
        step(harness.model, optimizer, tokens(1))
        harness.model.load_state_dict(kept)
        optimizer.load_state_dict(before)
        for number, state in optimizer.state_dict()["state"].items():
            same_tensors(state, before["state"][number])
        same_tensors(dict(harness.model.state_dict()), kept)


@pytest.mark.parametrize(
    ("dtype", "trained"),
    [pytest.param(torch.float64, True, marks=pytest.mark.slow), (torch.float16, True), (torch.float8_e4m3fn, False)],
    ids=str,
)
def test_what_does_not_go_together_is_refused(tmp_path, dtype, trained):
    model = mixed()
    for block in model.transformer.h:
        block.frozen = nn.Parameter(block.frozen.to(dtype), requires_grad=trained)
    model.compile(backend="greedysnake", options=options(tmp_path))
    optimizer = adamw(list(model.parameters()))
    told = r"unit 0 has parameters of .*, which do not go together: .*\.to\(dtype\); one that is quantized comes from"
    with pytest.raises(CaptureError, match=told):
        step(model, optimizer, tokens(0))
