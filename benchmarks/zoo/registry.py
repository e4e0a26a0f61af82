"""registry: every case by its name; reading it imports none of the packages."""

from __future__ import annotations

from benchmarks.zoo import (
    hf_language,
    hf_others,
    litgpt_models,
    timm_models,
    torch_models,
    torchtune_models,
    x_transformers_models,
)
from benchmarks.zoo.case import Case

MODULES = (torch_models, hf_language, hf_others, litgpt_models, x_transformers_models, timm_models, torchtune_models)
CASES: dict[str, Case] = {case.key: case for module in MODULES for case in module.CASES}
