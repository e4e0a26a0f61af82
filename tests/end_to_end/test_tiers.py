"""Where data lives, and when it is updated, does not change one bit of what is learned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiered import Harness, Outcome, adamw, gpt2, options

import gs_compile

KEEPS_CAPTURES = True
OPTIMIZERS = {
    "adamw": adamw,
    "sgd": partial(gs_compile.SGD, lr=0.05, momentum=0.9),
    "lion": partial(gs_compile.Lion, lr=1e-3),
}
DROPOUT = {"model": 0.1, "bf16": 0.0}  # by precision
MAX_NORM = 0.3  # less than the norms there are: every step is clipped
RATIOS = tuple(itertools.product((0.0, 0.3, 1.0), repeat=3))
ALPHAS = (0.0, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Setting:
    """What the result depends on."""

    precision: str
    optimizer: str
    clip: bool
    schedule: str = "vertical"


@dataclass(frozen=True)
class Variant:
    """What it does not depend on."""

    alpha: float
    ratios: tuple[float, float, float]
    num_directories: int
    separate_device: bool
    on_device: float  # of parameters and checkpoints that are not in host memory
    threads: int
    gradient: float = 1.0  # of gradient sums, in the horizontal order
    masters: str | None = None


RESIDENT = Variant(0.0, (1.0, 1.0, 1.0), 1, False, 0.0, 1, masters="whole")
SETTINGS = [Setting(*each) for each in itertools.product(DROPOUT, OPTIMIZERS, (False, True))]


def variants(alpha: float) -> Iterator[Variant]:
    found = itertools.starmap(Variant, itertools.product([alpha], RATIOS, (1, 2), (False, True), (0.0, 0.6), (1, 2)))
    return (variant for variant in found if variant.separate_device or not variant.on_device)


class Laboratory:
    """One capture for each precision, and one reference for each setting."""

    def __init__(self, folder: Path) -> None:
        self.directories = [folder / "a", folder / "b"]
        self.harness = cache(lambda precision: Harness(partial(gpt2, dropout=DROPOUT[precision]), precision))
        self.reference = cache(lambda setting: self.train(setting, RESIDENT))

    def train(self, setting: Setting, variant: Variant) -> Outcome:
        make: Any = OPTIMIZERS[setting.optimizer]
        parameter, checkpoint, _ = (variant.on_device * (1 - ratio) for ratio in variant.ratios)
        others = {"device_checkpoint": checkpoint}
        if setting.schedule == "horizontal":
            others["gradient"] = variant.gradient
        if setting.precision == "bf16":  # without masters parameters go to the host to be updated
            others["device_parameter"] = parameter
        clip = {"max_grad_norm": MAX_NORM} if setting.clip else {}
        chosen = options(
            self.directories[: variant.num_directories],
            alpha=1.0 if setting.clip else variant.alpha,
            ratios=dict(zip(("parameter", "checkpoint", "optimizer"), variant.ratios, strict=True)) | others,
            separate_device=variant.separate_device,
            threads=variant.threads,
            schedule=setting.schedule,
            masters=variant.masters,
        )
        return self.harness(setting.precision).train(partial(make, **clip), chosen, num_steps=4)

    def check(self, setting: Setting, variant: Variant) -> None:
        assert not self.train(setting, variant).differences(self.reference(setting))


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory):
    return Laboratory(tmp_path_factory.mktemp("storage"))


@settings(deadline=None, max_examples=16)
@given(
    setting=st.sampled_from(SETTINGS),
    variant=st.sampled_from([v for alpha in ALPHAS for v in variants(alpha)]),
    schedule=st.sampled_from(("vertical", "horizontal")),
    gradient=st.sampled_from((0.0, 0.4, 1.0)),
)
def test_any_placement_learns_the_same(laboratory, setting, variant, schedule, gradient):
    laboratory.check(replace(setting, schedule=schedule), replace(variant, gradient=gradient))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_reference_learns(laboratory, setting):
    reference = laboratory.reference(setting)
    harness = laboratory.harness(setting.precision)
    initial = dict(zip(dict(harness.model.named_parameters()), harness.initial, strict=True))
    assert all(not torch.equal(reference.values[name], values) for name, values in initial.items())
    assert all(value.isfinite().all() for value in reference.values.values())
    assert all(norm > MAX_NORM for norm in reference.norms)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_placement_learns_the_same(laboratory, setting, alpha):
    if setting.clip and alpha != 1.0:
        pytest.skip("with clipping alpha is 1")
    for variant in variants(alpha):
        laboratory.check(setting, variant)
