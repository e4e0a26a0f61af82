"""weights: checkpoints of transformers, read to storage and written from it, within a part of their size in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from gs_compile.errors import OptionError
from gs_compile.model.mapped import directory
from gs_compile.model.storage_init import CACHE_NBYTES, NewTensorsInFiles, offload
from gs_compile.options import Options
from gs_compile.planner.planner import host_budget

_IN_ORDER = "HF_DEACTIVATE_ASYNC_LOAD"  # a switch of transformers
_REFUSED = {
    "device_map": "parameters go to storage, and from there to the device that computes: leave it out",
    "quantization_config": "quantized weights cannot be trained here: leave it out",
    "distributed_config": "one device only so far: leave it out",
    "tp_plan": "one device only so far: leave it out",
    "gguf_file": "give a checkpoint of safetensors",
    "state_dict": "its values are in memory already: build the model with init_on_storage, and load_state_dict",
}


def from_pretrained(
    model_class: Any, name_or_path: str | os.PathLike[str], *, storage: Any = None, host_memory: Any = None, **given: Any
) -> Any:
    """``model_class.from_pretrained(name_or_path, **given)``, its parameters offloaded as by `init_on_storage`.

    model_class: of transformers, such as AutoModelForCausalLM. storage, host_memory: as in `Options`; `hf.attach` takes
    them from the model. Each value goes from the checkpoint to a file under the first directory of `storage`, in the
    model's dtype; memory holds one parameter and some that were read last. What the checkpoint misses or has beside is
    reported by transformers.

    Raises OptionError for weights that are quantized, and for settings that place the model elsewhere;
    InitialisationError and StorageFullError as `init_on_storage` does.
    """
    options = Options.of({"storage": storage, "host_memory": host_memory})  # refuses what is wrong
    _check(name_or_path, given)
    cache_nbytes = min(CACHE_NBYTES, host_budget(options) // 4)
    with NewTensorsInFiles(directory(options.storage[0]), cache_nbytes) as files, _read_in_order():
        found = model_class.from_pretrained(name_or_path, **given)
    model = found[0] if isinstance(found, tuple) else found  # with output_loading_info
    offload(model, files)
    model.greedysnake_options = {"storage": options.storage, "host_memory": options.host_memory}
    return found


def _check(name_or_path: str | os.PathLike[str], given: Mapping[str, Any]) -> None:
    """Refuse what cannot be kept on storage, before weights are read."""
    for name, reason in _REFUSED.items():
        if given.get(name) is not None:
            raise OptionError(f"from_pretrained with {name}: {reason}")
    if "config" in given:
        quantization = getattr(given["config"], "quantization_config", None)
    else:
        quantization = _config(name_or_path, given).get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization.quant_method
        raise OptionError(
            f"{name_or_path}: the weights are quantized ({method}), and such cannot be trained here: give a checkpoint "
            "that is not, or save a dequantized one first"
        )


def _config(name_or_path: str | os.PathLike[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's config.json says; nothing where there is none, of which transformers will say more."""
    import transformers

    with suppress(OSError):
        found: dict[str, Any] = transformers.PreTrainedConfig.get_config_dict(name_or_path, **given)[0]
        return found
    return {}


@contextmanager
def _read_in_order() -> Iterator[None]:
    """transformers reads a parameter after the other, in this thread, and not several in threads of its own."""
    before = os.environ.get(_IN_ORDER)
    os.environ[_IN_ORDER] = "1"
    try:
        yield
    finally:
        del os.environ[_IN_ORDER]
        if before is not None:
            os.environ[_IN_ORDER] = before
