"""weights: checkpoints of transformers are read to storage and written from it, with a part of their size in memory.

from_pretrained    the model is built without values; each goes from the checkpoint to a file when it is read
save_pretrained    transformers asks for the values of one shard at a time, as for a model that is offloaded to disk
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gs_compile.errors import ABSENT, OptionError
from gs_compile.model.files import directory, trim
from gs_compile.model.materialize import materialize, on_first_rank
from gs_compile.model.replaced import replaced
from gs_compile.model.residency import as_masters, is_offloaded, residency_of
from gs_compile.model.storage_init import CACHE_NBYTES, NewTensorsInFiles, offload
from gs_compile.options import Frozen, Options, absolute
from gs_compile.planner.run import host_budget

if TYPE_CHECKING:
    from gs_compile.hf.encoded import EncodedFolder

_IN_ORDER = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}  # transformers reads one parameter after the other, in this thread
_HUB = {"revision", "code_revision", "trust_remote_code", "cache_dir", "subfolder", "token", "local_files_only"}
_REFUSED = {
    "device_map": "parameters go to storage, and from there to the device that computes: leave it out",
    "distributed_config": "the backend has its place: leave it out",
    "tp_plan": "the backend has its place: leave it out",
    "gguf_file": "give a checkpoint of safetensors",
    "state_dict": "its values are in memory already: build the model with init_on_storage, and load_state_dict",
}


def from_pretrained(
    model_class: Any,
    name_or_path: str | os.PathLike[str],
    *,
    storage: Any = None,
    host_memory: Any = None,
    group: Any = None,
    frozen: Frozen | None = None,
    frozen_skip: Sequence[str] = (),
    **given: Any,
) -> Any:
    """``model_class.from_pretrained(name_or_path, **given)``, with parameters on storage as by `init_on_storage`.

    Each value goes from the checkpoint to a file under the first directory of `storage`, in the model's dtype. Memory
    holds one parameter, and some that were read last. transformers reports missing and unexpected keys.

    model_class: of transformers, such as AutoModelForCausalLM.
    storage, host_memory: as in `Options`; `hf.attach` takes them from the model.
    group: as in `init_on_storage`.
    frozen, frozen_skip: as in `Options`. Matrices of layers are frozen and quantized as they are read. Only the
        quantized form is stored, and the next run finds it there (docs/frozen.md). `keep_encoded` says where: True, the
        default, in the first directory of `storage`; False, nowhere; or a directory.

    A quantization_config of transformers may be given instead of `frozen`. Checkpoints in a format of `frozen` are read
    as they are, with the weights that they have not quantized. Those in GPTQ, AWQ or packed by compressed-tensors are
    dequantized into the model's dtype as they are read, and with `frozen` quantized again. Others are dequantized by
    transformers if a quantization_config says so (`FineGrainedFP8Config(dequantize=True)`), and with `frozen` are
    quantized in the first call.

    Raises OptionError for weights that are quantized otherwise, and for settings that place the model elsewhere;
    InitialisationError and StorageFullError as `init_on_storage` does.
    """
    from gs_compile.hf.encoded import about
    from gs_compile.hf.frozen import FrozenConfig, asked, decodes, ending, finish
    from gs_compile.hf.packed import packed

    own, keep_encoded = {"storage": storage, "host_memory": host_memory}, given.pop("keep_encoded", True)
    Options.of(own)  # refuses what is wrong
    is_decoded = decodes(given.get("quantization_config"))
    if not is_decoded:
        frozen, frozen_skip = asked(frozen, frozen_skip, given.pop("quantization_config", None))
    stored = _check(name_or_path, given)
    form = packed(stored or {}) if not is_decoded else None
    as_stored = stored if form is None and not is_decoded else None
    if as_stored is not None:
        frozen = _as_stored(name_or_path, as_stored, frozen)
    options = Options.of(own | (meant := {"frozen": frozen, "frozen_skip": frozen_skip} if frozen else {}))
    cache_nbytes, folder = min(CACHE_NBYTES, host_budget(options) // 4), directory(options.storage[0])
    is_encoded = frozen and not is_decoded and as_stored is None
    source = about(model_class, name_or_path, given, frozen, frozen_skip) if is_encoded else None
    kept, files = _kept(keep_encoded, folder, source), NewTensorsInFiles(folder, cache_nbytes)
    with kept, files, replaced(os.environ, **_IN_ORDER), ending():
        encoding = FrozenConfig(options, files, form, kept) if (frozen or form) and not is_decoded else None
        if encoding is not None and stored is None:
            given["quantization_config"] = encoding
        elif encoding is not None:
            given["config"] = _config_of(name_or_path, given)
            given["config"].quantization_config = encoding
        model, info = found = model_class.from_pretrained(name_or_path, **{**given, "output_loading_info": True})
    if encoding is not None:
        finish(model, encoding, info["unexpected_keys"])
    offload(model, files, group)
    told = own | meant if as_stored is None else own  # matrices that such a checkpoint does not encode stay so
    model.greedysnake_options = {name: getattr(options, name) for name in told}
    return found if given.get("output_loading_info") else model


def _kept(keep_encoded: bool | str | os.PathLike[str], folder: Path, source: Mapping[str, Any] | None) -> EncodedFolder:
    """The folder of a source's encoded matrices."""
    from gs_compile.hf.encoded import EncodedFolder

    if isinstance(keep_encoded, bool):
        return EncodedFolder(folder, source if keep_encoded else None)
    return EncodedFolder(absolute("keep_encoded", os.fspath(keep_encoded)), source)


def options_of(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a model has from `from_pretrained`, overridden by those given.

    Raises OptionError for a model that transformers or Accelerate has placed: it does not hold its values.
    """
    if any(parameter.is_meta for parameter in model.parameters()) or any(
        hasattr(module, "_hf_hook") for module in model.modules()
    ):
        raise OptionError(ABSENT)
    return {**getattr(model, "greedysnake_options", {}), **given}


def save_pretrained(model: Any, folder: str | os.PathLike[str], *, master: bool = False, **given: Any) -> None:
    """``model.save_pretrained(folder, **given)``, reading values as they are written: memory holds one shard of them.

    A shard has `max_shard_size`, here "5GB" by default. With `master`, parameters that compute in bf16 are written as
    their fp32 masters. Where transformers needs all values first (see `streamed`), they are mapped from files. All
    ranks call this; the first one writes, and the others keep nothing of what they read. Raises OptionError for a file
    in the place of the folder, for which transformers writes nothing.
    """
    if Path(folder).is_file():
        raise OptionError(f"{folder} is a file, and a checkpoint is a folder: name another")
    with on_first_rank(model) as is_first, streamed(model, master=master) as values, ExitStack() as stack:
        if not is_first:
            return
        if values is None and master:
            stack.enter_context(materialize(model, master=True))
        model.save_pretrained(folder, **{"max_shard_size": "5GB", "state_dict": values, **given})


@contextmanager
def streamed(model: nn.Module, *, master: bool = False) -> Iterator[dict[str, torch.Tensor] | None]:
    """A state dict for `model.save_pretrained`, of which transformers reads the values in this block.

    Offloaded parameters are on the meta device in it. None: there are none, or transformers has to have all values
    first, as where only adapters are saved, or where the checkpoint merges parameters, which may be of two shards.
    """
    import transformers

    model = getattr(model, "_orig_mod", model)
    known = isinstance(model, transformers.PreTrainedModel) and not getattr(model, "_hf_peft_config_loaded", False)
    merges = any(len(each.target_patterns) > 1 for each in getattr(model, "_weight_conversions", None) or ())
    if not known or merges or not any(map(is_offloaded, model.parameters())):
        yield None
        return
    shown = dict(model.state_dict(keep_vars=True))
    trim()  # memory that steps have left in the heap: a shard needs memory in addition
    with ExitStack() as stack:
        for parameter in {value for value in shown.values() if master and is_offloaded(value)}:
            stack.enter_context(as_masters(parameter))
        # As a model that is offloaded to disk, whose values Accelerate's hook reads
        hook = SimpleNamespace(weights_map=_Values(shown, master))
        stack.enter_context(replaced(vars(model), hf_device_map={"": "disk"}, _hf_hook=hook))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")
        yield {
            name: torch.empty_like(each, device="meta") if is_offloaded(each) else each.detach()
            for name, each in shown.items()
        }


class _Values:
    """Values by name, each read when it is asked for."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], master: bool) -> None:
        self.parameters = parameters
        self.master = master

    def __getitem__(self, name: str) -> torch.Tensor:
        parameter = self.parameters[name]
        return residency_of(parameter).value(parameter, master=self.master)


def _check(name_or_path: str | os.PathLike[str], given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Raise OptionError for what cannot be on storage, before weights are read. Returns the quantization config."""
    for name, reason in _REFUSED.items():
        if given.get(name) is not None:
            raise OptionError(f"from_pretrained with {name}: {reason}")
    if "config" in given:
        quantization = getattr(given["config"], "quantization_config", None)
    else:
        quantization = _config(name_or_path, given).get("quantization_config")
    return quantization if quantization is None or isinstance(quantization, Mapping) else quantization.to_dict()


def _as_stored(name_or_path: str | os.PathLike[str], stored: Mapping[str, Any], frozen: Frozen | None) -> Frozen:
    """The codec of a quantized checkpoint; OptionError if there is none, or another one is asked for."""
    from gs_compile.hf.frozen import known

    found = known({**stored, "scale_fmt": None})  # scales of any dtype can be read
    if found is None:
        method = stored.get("quant_method")
        raise OptionError(
            f"{name_or_path}: the weights are quantized ({method}) in a form that is not read here: give a checkpoint "
            "that is not, or in nf4, fp4 or int8 of bitsandbytes, in FP8 with blocks of 128 x 128, in MXFP4 (gpt-oss), "
            "GPTQ in 2, 4 or 8 bits, AWQ (gemm, with zeros), or compressed-tensors that are packed in 4 or 8 bits; or "
            "have transformers decode it, as by quantization_config=FineGrainedFP8Config(dequantize=True)"
        )
    if frozen not in (None, found):
        raise OptionError(
            f'{name_or_path} has {found}, and frozen="{frozen}": leave frozen out, the checkpoint is read as it is'
        )
    return found


def _config(name_or_path: str | os.PathLike[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of a model's config.json; {} if there is none, about which transformers will complain."""
    import transformers

    with suppress(OSError):
        found: dict[str, Any] = transformers.PreTrainedConfig.get_config_dict(name_or_path, **given)[0]
        return found
    return {}


def _config_of(name_or_path: str | os.PathLike[str], given: dict[str, Any]) -> Any:
    """The config from which a model is built; a copy if one is given."""
    import transformers

    if (config := given.get("config")) is not None:
        return deepcopy(config)
    return transformers.AutoConfig.from_pretrained(name_or_path, **{name: given[name] for name in _HUB & given.keys()})
