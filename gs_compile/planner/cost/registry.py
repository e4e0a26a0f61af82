"""The model registry: configs by name: the paper's GPTs, types of HuggingFace, a config.json, an id of its hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from gs_compile.errors import PlanError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

# Layers, heads and width of arXiv 2512.17570, section 6.1.
GPTS = {"gpt-30b": (48, 56, 7168), "gpt-65b": (80, 64, 8192), "gpt-175b": (96, 96, 12288)}
POSITIONS = 2048
VOCABULARY = 50304  # GPT-2's 50257, made a multiple of 128 as Megatron-LM does


def named_config(model: str, **changes: Any) -> PretrainedConfig:
    """The config of "gpt-65b", of a HuggingFace model type ("llama"), or in a file, directory or model of the hub.

    changes: fields in the place of the config's own. A config of the hub is downloaded, if this machine has none yet.
    The paper's models are of GPT-2's architecture, with tied embeddings, and without dropout.
    """
    mapping = _transformers().CONFIG_MAPPING
    if model in GPTS:
        num_layers, num_heads, width = GPTS[model]
        sizes = {"n_layer": num_layers, "n_head": num_heads, "n_embd": width, "n_positions": POSITIONS}
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return mapping["gpt2"](vocab_size=VOCABULARY, use_cache=False, name_or_path=model, **(sizes | rates | changes))
    fields = _read(model)
    model_type = str(fields.pop("model_type", model))
    if model_type not in mapping:
        close = get_close_matches(model_type, [*GPTS, *mapping.keys()], n=3)
        hint = (
            f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(GPTS)} and HuggingFace's types"
        )
        raise PlanError(f"{model_type} is neither the name of a model nor the path of a config.json; {hint}")
    with _refused(model_type):
        return mapping[model_type](**(fields | {"use_cache": False} | changes))


def built(config: PretrainedConfig) -> nn.Module:
    """The causal language model of `config`, on the meta device."""
    import torch

    with _refused(config.model_type), torch.device("meta"):
        return _transformers().AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def check_length(config: Any, sequence: int) -> None:
    """Raise `PlanError` where samples are longer than the model has positions for."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and sequence > longest:
        raise PlanError(f"{config.model_type} has {longest} positions, fewer than a sequence of {sequence} tokens")


def _read(model: str) -> dict[str, Any]:
    """The fields of a config file; none for a model type."""
    given = Path(model)
    path = given / "config.json" if given.is_dir() else given
    if not path.is_file() and "/" not in model:
        return {}
    if not given.exists() and model.count("/") == 1:
        path = _downloaded(model)
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: no config can be read there: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise PlanError(f"{path}: not a config of transformers, which names its model_type")
    return fields


def _downloaded(model: str) -> Path:
    """The config of a model of the hub, from its cache or the network."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        try:
            return Path(hf_hub_download(model, "config.json", local_files_only=True))
        except LocalEntryNotFoundError:
            return Path(hf_hub_download(model, "config.json"))
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{model} is not a path here, and no config of that name could be had from HuggingFace's hub: "
            f"{shorten(str(error), 200)} Give a model type (llama), or a config.json that you have downloaded"
        ) from error


@contextmanager
def _refused(model_type: str) -> Iterator[None]:
    """Say in a line what transformers cannot build, and why."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (ValueError, StrictDataclassError) as error:
        raise PlanError(f"{model_type}: {shorten(str(error), 300)}") from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise PlanError("named models need transformers: pip install 'greedysnake[hf]'") from error
    transformers.logging.set_verbosity_error()
    return transformers
