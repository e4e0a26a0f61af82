"""fitting: changes of a model of transformers, and of an Accelerator, that the backend needs."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Mapping
from functools import partial, wraps
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from gs_compile.capture.internals import backward_hooks
from gs_compile.errors import OptionError, ReleasedParameterError
from gs_compile.hf.weights import options_of
from gs_compile.model.loss_scale import LossScaler
from gs_compile.model.materialize import streaming, whole_states
from gs_compile.model.residency import is_offloaded, residency_of
from gs_compile.model.tiered_optimizer import TieredOptimizer
from gs_compile.options import Options
from gs_compile.planner.cost.model import base_model
from gs_compile.runtime.groups import num_processes


def fit(accelerator: Any, model: nn.Module, size: int, given: Mapping[str, Any]) -> tuple[dict[str, Any], Options]:
    """Change an Accelerator and a model, before it is compiled, so that they fit the backend.

    Returns the model's options, as a dict and checked: those of `from_pretrained`, overridden by those given, and
    micro-batches of `size` samples if neither says. Raises OptionError for settings that are not supported.
    """
    chosen = {"micro_batch_size": size, "outputs": "loss", **options_of(model, given)}
    checked = Options.of(chosen)
    if "bitsandbytes" in sys.modules:
        from gs_compile.hf.loaded import take_over

        take_over(model, checked)
    _fit_for_capture(model)
    _share_among_ranks(accelerator, model, chosen)
    _leave_states(accelerator)
    if isinstance(accelerator.scaler, torch.amp.GradScaler):  # of fp16: this package's scale takes its place
        accelerator.scaler = LossScaler.like(accelerator.scaler)
    return chosen, checked


def _fit_for_capture(model: nn.Module) -> None:
    """Turn off activation checkpointing, and let `generate` read from the tiers.

    Raises OptionError if a module has a backward hook: the backward runs layer by layer, without the module.
    """
    for name, module in model.named_modules():
        if found := backward_hooks(module):
            raise OptionError(
                f"{name or 'the model'} has a backward hook, {found[0]}, which would never be called: remove it (the "
                "handle's .remove()). Forward hooks are part of the model"
            )
        if getattr(module, "gradient_checkpointing", False):  # each layer is run again in its backward anyway
            module.gradient_checkpointing = False
            _leave_out_cache(module)
        if hasattr(type(module), "update_and_allocate"):
            vars(module)["update_and_allocate"] = _refuse_ranks
    _stream_generation(model)


def _leave_out_cache(module: nn.Module) -> None:
    """Turn off the cache, as transformers does for checkpointing: with it, attention ignores borders of sequences."""
    config: Any = getattr(module, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False


def _refuse_ranks(*_: Any, **__: Any) -> NoReturn:
    """Replaces `update_and_allocate` of AdaLoRA and AdaMSS on several ranks."""
    raise ReleasedParameterError(
        "update_and_allocate: AdaLoRA chooses ranks by gradients, and AdaMSS subspaces, but those of parameters that "
        "live on the tiers are never in p.grad. Leave this call out, and the AdamssAsaCallback: all ranks stay init_r, "
        "and all subspaces are trained, so set init_r, or num_subspaces, to what you want, or use LoRA"
    )


def _stream_generation(model: nn.Module) -> None:
    """Let `generate` read parameters as layers use them: a compiled model cannot take its cache."""
    generate = getattr(model, "generate", None)
    if generate is None or "generate" in vars(model):
        return
    own = getattr(base_model(model), "generate", None)  # a model without one may be wrapped by PEFT, which has
    may_sync = own is not None and "synced_gpus" in inspect.signature(own).parameters

    @wraps(generate)
    def streamed(*args: Any, **kwargs: Any) -> Any:
        if may_sync and _is_read_by_all(model):
            kwargs["synced_gpus"] = True  # ranks that are done go on until all are
        with streaming(model):
            return generate(*args, **kwargs)

    vars(model)["generate"] = streamed


def _is_read_by_all(model: nn.Module) -> bool:
    """Whether all of torch's ranks read parameters together, so that each has to run the same number of forwards."""
    meshes = (residency_of(each).mesh for each in model.parameters() if is_offloaded(each))
    mesh = next((each for each in meshes if each is not None), None)
    return mesh is not None and mesh.size() == dist.get_world_size()


def _leave_states(accelerator: Any) -> None:
    """Let Accelerate not move the states of our optimizers: it would move all of them to the device at once."""
    ordinary = accelerator.prepare_optimizer

    def prepare_optimizer(optimizer: Any, device_placement: bool | None = None) -> Any:
        is_stored = isinstance(optimizer, TieredOptimizer)
        return ordinary(optimizer, device_placement=False if is_stored else device_placement)

    accelerator.prepare_optimizer = prepare_optimizer


def _share_among_ranks(accelerator: Any, model: nn.Module, options: Mapping[str, Any]) -> None:
    """Let Accelerate not wrap models in DistributedDataParallel: the backend shares them among the ranks.

    It saves and loads whole tensors, as it knows no others. Raises OptionError if it was made for one process, but
    there are several.
    """
    if accelerator.num_processes == 1:
        if (number := num_processes()) > 1 and not {"group", "mesh"} & options.keys():
            raise OptionError(
                f"there are {number} processes, but Accelerate sees only this one: on a CPU use Accelerator(cpu=True), "
                "or use_cpu=True among TrainingArguments. Processes that train alone pass group=, a group of their own"
            )
        return

    def join_uneven_inputs(joinables: Any, even_batches: bool | None = None) -> Any:
        if accelerator.even_batches if even_batches is None else even_batches:
            return contextlib.nullcontext(joinables)
        raise OptionError(
            "join_uneven_inputs has ranks without data follow those that have some, and here all ranks take part in "
            "each step, with a batch: leave it out, and let Accelerate make the batches even (even_batches=True)"
        )

    accelerator.join_uneven_inputs = join_uneven_inputs
    accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)
    for name in ("save_state", "load_state", "get_state_dict"):
        setattr(accelerator, name, whole_states(model)(getattr(accelerator, name)))
