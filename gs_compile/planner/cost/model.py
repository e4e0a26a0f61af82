"""model: the model of a plan, without its weights, and with as few layers as its capture needs.

A name is one of the paper's GPTs, a model type of HuggingFace, a config.json or an id of its hub. A module is copied to
the meta device: only the shapes of its parameters and buffers are used. Of a stack of equal blocks two suffice for the
capture, so that depth costs nothing.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gs_compile.codegen.layout import kept_dtype
from gs_compile.errors import InspectionError, PlanError
from gs_compile.machine import is_there
from gs_compile.options import Options
from gs_compile.planner.cost.known_workloads import config_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SAMPLES = 2  # of the batch that is captured: a dimension of one would be taken for a constant
DEPTH = 2  # blocks of a shortened stack: the fewest that can be compared
PLAIN = (bool, int, float, str, tuple, list, dict, set, frozenset, torch.dtype, torch.device, torch.Size)
OF_HUB = "an id of the hub, such as Qwen/Qwen3-14B"
# The fields of the models that have a name here, where they differ from transformers' default.
GPT: dict[str, Any] = {"model_type": "gpt2", "n_positions": 2048}
GPT |= {"vocab_size": 50304}  # GPT-2's 50257, made a multiple of 128 as Megatron-LM does
GPT |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
LAYERS, HEADS, WIDTH, HIDDEN = "num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size"
KNOWN: dict[str, dict[str, Any]] = {
    # arXiv 2512.17570, section 6.1
    "gpt-30b": GPT | {"n_layer": 48, "n_head": 56, "n_embd": 7168},
    "gpt-65b": GPT | {"n_layer": 80, "n_head": 64, "n_embd": 8192},
    "gpt-175b": GPT | {"n_layer": 96, "n_head": 96, "n_embd": 12288},
    # arXiv 2407.21783, table 3
    "llama-8b": LLAMA | {LAYERS: 32, HEADS: 32, WIDTH: 4096, HIDDEN: 14336},
    "llama-70b": LLAMA | {LAYERS: 80, HEADS: 64, WIDTH: 8192, HIDDEN: 28672},
    "llama-405b": LLAMA | {LAYERS: 126, HEADS: 128, WIDTH: 16384, HIDDEN: 53248},
    # arXiv 2508.10925, table 1
    "gpt-oss-20b": {"model_type": "gpt_oss", LAYERS: 24, "num_local_experts": 32},
    "gpt-oss-120b": {"model_type": "gpt_oss", LAYERS: 36, "num_local_experts": 128},
}


def named_config(model: str, **changes: Any) -> PretrainedConfig:
    """The config of "gpt-65b", of a HuggingFace model type ("llama"), or in a file, directory or model of the hub.

    changes: fields that replace the config's own. A config of the hub is downloaded, if this machine has none yet.
    The paper's models have GPT-2's architecture, with tied embeddings, and without dropout. "llama-70b" and similar
    are Llama 3.1's, "gpt-oss-20b" OpenAI's.
    """
    mapping = _transformers().CONFIG_MAPPING
    fields = {"name_or_path": model, **KNOWN[model]} if model in KNOWN else _read(model)
    model_type = str(fields.pop("model_type", model))
    if model_type not in mapping:
        close = get_close_matches(model_type, [*KNOWN, *mapping.keys()], n=3)
        hint = (
            f"did you mean {' or '.join(close)}, or {OF_HUB}?"
            if close
            else f"known are {', '.join(KNOWN)}, HuggingFace's types, and {OF_HUB}"
        )
        raise PlanError(f"{model_type} is neither the name of a model nor the path of a config.json; {hint}")
    with _refused(model_type):
        return mapping[model_type](**(fields | {"use_cache": False} | changes))


def built(config: PretrainedConfig) -> nn.Module:
    """The causal language model of `config`, on the meta device."""
    with _refused(config.model_type), torch.device("meta"):
        return _transformers().AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def adapted(model: nn.Module, rank: int) -> nn.Module:
    """The model of `built`, frozen, with PEFT's LoRA of a rank on all linear layers of its blocks."""
    try:
        import peft
    except ImportError as error:
        raise PlanError("planning with LoRA needs PEFT: pip install 'greedysnake[hf]'") from error
    config = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):  # that layers of GPT-2 have weights transposed
        return peft.get_peft_model(model, config)  # type: ignore[no-any-return]


def check_length(config: Any, sequence: int) -> None:
    """Raise `PlanError` if samples are longer than the model's number of positions."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and sequence > longest:
        raise PlanError(
            f"{config.model_type} has {longest} positions, fewer than a sequence of {sequence} tokens: ask for a "
            f"sequence of {longest} or less"
        )


def _read(model: str) -> dict[str, Any]:
    """The fields of a config file; none for a model type."""
    path, is_file = config_file(model)
    if not is_file and "/" not in model:
        return {}
    if not is_there(Path(model)) and model.count("/") == 1:
        path = _downloaded(model)
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(
            f"{path}: no config can be read there ({error}): give a config.json, or the folder of a model"
        ) from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise PlanError(
            f"{path}: not a config of transformers, which names its model_type: give the config.json of a model"
        )
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
    """Raise errors of transformers as a `PlanError` that says what it cannot build, and why."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (ArithmeticError, ValueError, StrictDataclassError) as error:
        raise PlanError(f"{model_type}: {shorten(str(error), 300)}") from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise PlanError("named models need transformers: pip install 'greedysnake[hf]'") from error
    transformers.logging.set_verbosity_error()
    return transformers


# Without its weights --------------------------------------------------------------------------------------------------


def meta_copy(model: nn.Module, options: Options) -> nn.Module:
    """The model on the meta device, in the dtype it is trained in; its tensors are neither changed nor read."""
    memo: dict[int, Any] = {}
    attributes = (value for module in model.modules() for value in vars(module).values())
    for value in chain(model.parameters(), model.buffers(), attributes):
        if isinstance(value, nn.Parameter):
            like = torch.empty(value.shape, dtype=kept_dtype(value, options), device="meta")
            memo[id(value)] = nn.Parameter(like, value.requires_grad)
        elif isinstance(value, torch.Tensor):
            memo[id(value)] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return deepcopy(model, memo)


def meta_tokens(model: nn.Module, sequence: int) -> dict[str, Any]:
    """Token ids for what the forward takes, labels too; without a cache for generation."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]
    names += [p.name for p in parameters if p.name in ("input_ids", "labels", "targets") and p.name not in names]
    if not names:
        raise InspectionError(
            f"{type(model).__name__}.forward has no required argument, and none called input_ids: a plan calls it with "
            "token ids"
        )
    forward = base_model(model).forward  # PEFT's hands on what it does not name
    options = {name: False for name in inspect.signature(forward).parameters if name == "use_cache"}
    return options | {name: torch.zeros(SAMPLES, sequence, dtype=torch.long, device="meta") for name in names}


def base_model(model: Any) -> Any:
    """A model without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def repeated(model: nn.Module) -> nn.ModuleList | nn.Sequential | None:
    """The list of more than `DEPTH` equal modules outside any other such list; None: there is not exactly one."""
    stacks = list(_stacks(model))
    return stacks[0] if len(stacks) == 1 else None


def _stacks(module: nn.Module) -> Iterator[nn.ModuleList | nn.Sequential]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > DEPTH and are_alike(list(child)):
            yield child
        else:
            yield from _stacks(child)


def are_alike(blocks: Sequence[nn.Module]) -> bool:
    """Whether blocks differ in nothing that can be seen, except in numbers that count the blocks."""
    modules = [module for block in blocks for module in block.modules()]
    if len(set(modules)) < len(modules):
        return False  # they share some
    rows = [list(_traits(block)) for block in blocks]
    return _are_shared(rows)


def _traits(block: nn.Module) -> Iterator[Any]:
    """What can be seen of a block: each module's place, type and attributes, without the contents of tensors."""
    for path, module in block.named_modules():
        yield path, type(module)
        for name, value in vars(module).items():
            yield name
            if name in ("_parameters", "_buffers"):
                yield [(key, None if t is None else (t.shape, t.dtype, t.requires_grad)) for key, t in value.items()]
            elif name != "_modules":
                yield value


def _is_shared(values: Sequence[Any]) -> bool:
    """Whether a trait is the same in all blocks, or is the block's number, or contains it, as some names of PEFT do."""
    first, kinds = values[0], set(map(type, values))
    if all(value is first or _is_equal(value, first) for value in values):
        return True
    if kinds == {int}:
        return all(value == place + first for place, value in enumerate(values))
    if kinds == {str} and "." in first:
        return _are_shared([[int(each) if each.isdecimal() else each for each in v.split(".")] for v in values])
    if kinds == {dict}:
        return _are_shared(list(map(list, values))) and _are_shared([list(value.values()) for value in values])
    return False


def _are_shared(rows: Sequence[Sequence[Any]]) -> bool:
    """Whether the traits of blocks, each in a row, are shared one by one."""
    return len(set(map(len, rows))) == 1 and all(map(_is_shared, zip(*rows, strict=True)))


def _is_equal(left: Any, right: Any) -> bool:
    with suppress(RuntimeError):  # of tensors in a list, which have no one answer
        return type(left) is type(right) and isinstance(left, PLAIN) and bool(left == right)
    return False
