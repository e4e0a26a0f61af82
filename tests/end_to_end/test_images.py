"""LLaVA and Gemma 3 with images, as transformers has them: what they learn, and what they check as they run.

Gemma 3 as its processor has it, too, with the types of tokens: those of an image see each other.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from learner import distance
from tiered import Harness, options

import gs_compile
from benchmarks.zoo.hf_others import IMAGE, images, labels, with_images
from benchmarks.zoo.registry import CASES
from gs_compile.errors import CheckError

NUM_PLACES = {"llava": 16, "gemma3": 4, "gemma3 with types": 4}
NUM_STEPS, SETTINGS = 2, {"lr": 1e-2, "eps": 1e-3}


def built(kind: str, is_frozen: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    name, _, _ = kind.partition(" ")
    case = next(each for key, each in CASES.items() if key.startswith(f"transformers/{name},"))
    model = case.make().model.train()
    with torch.no_grad():
        for parameter in model.parameters():  # a projection of zeros would keep gradients from the tower
            parameter += 0.02 * torch.randn_like(parameter)
    if is_frozen:
        model.model.vision_tower.requires_grad_(False)
    return model


def batch(kind: str, step: int) -> dict[str, torch.Tensor]:
    tokens = with_images(step, NUM_PLACES[kind])
    found = {"input_ids": tokens, "pixel_values": images(step), "labels": labels(tokens)}
    return found | ({"token_type_ids": (tokens == IMAGE).long()} if kind.endswith("types") else {})


def trained(model, optimizer, kind: str) -> dict[str, torch.Tensor]:
    """The losses of some steps, and the values afterwards."""
    found = {}
    for step in range(NUM_STEPS):
        loss = model(**batch(kind, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach().clone()
    return found | {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, of vmap
@pytest.mark.parametrize(
    ("kind", "is_frozen"),
    [
        ("llava", False),
        pytest.param("llava", True, marks=pytest.mark.slow),
        pytest.param("gemma3", False, marks=pytest.mark.slow),
        pytest.param("gemma3", True, marks=pytest.mark.slow),
        pytest.param("gemma3 with types", False, marks=pytest.mark.slow),
    ],
)
def test_images_beside_words_are_learned_as_by_plain_pytorch(tmp_path, kind, is_frozen):
    plain = built(kind, is_frozen)
    wanted = trained(plain, torch.optim.AdamW(plain.parameters(), **SETTINGS), kind)
    harness, found = Harness(partial(built, kind, is_frozen)), {}
    for size, ratio in ((2, 0.0), (2, 1.0), (4, 1.0))[: 2 if is_frozen else 3]:
        ratios = {"parameter": ratio, "checkpoint": ratio, "optimizer": ratio}
        own = options(tmp_path / f"{size}-{ratio}", micro_batch_size=size, ratios=ratios, outputs="loss")
        with harness.fresh(adamw, own) as optimizer:
            found[size, ratio] = trained(harness.model, optimizer, kind)
            assert distance(found[size, ratio], wanted) < 1e-6
            if ratio:
                refuses_a_batch_without_a_place(harness.model, kind)
    assert all(torch.equal(value, found[2, 1.0][name]) for name, value in found[2, 0.0].items())


def adamw(groups):
    return gs_compile.AdamW([parameter for group in groups for parameter in group["params"]], **SETTINGS)


def refuses_a_batch_without_a_place(model: torch.nn.Module, kind: str) -> None:
    """What transformers checks holds for no batch with a place too few; nothing is learned of it."""
    before, wrong = model.state_dict(), batch(kind, 0)
    before = {name: value.clone() for name, value in before.items()}
    wrong["input_ids"][3, 0] = 5
    kind = kind.partition(" ")[0]
    with pytest.raises(
        CheckError, match=rf"does not hold for the batch, at .*import_utils.py:\d+: torch._check.*modeling_{kind}.py"
    ):
        model(**wrong)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
