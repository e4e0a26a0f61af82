"""zero_infinity: DeepSpeed's ZeRO-3 with parameters and optimizer states on NVMe (ZeRO-Infinity), in a world of one.

Horizontal order: each micro-batch passes through the whole model; a parameter is read from its file when its module
runs, in the forward, in the recompute and in the backward, and dropped after. Gradients add in a host buffer for the
whole model; after the last micro-batch they go to files, and DeepSpeedCPUAdam updates group after group, with the next
group's states being read and the last one's being written.

What was chosen, and why (all in SETTINGS; `--settings` changes any):

- `parameters`, `states`: nvme, or cpu, in host memory; both there are what DeepSpeed calls ZeRO-Offload.
- `max_in_cpu` 0: by default 1e9 parameters stay in memory, which would be every model of this race.
- `optimizer_buffers` 12: parameter, gradient and two moments for the group being read, updated and written. Each is as
  large as the largest group, so groups are one block (`sub_group_blocks`); a group is never less than one parameter.
- `parameter_buffers`: every parameter in memory takes a buffer of the largest one's size, and `reuse_blocks` 0 drops a
  parameter after its module, as the default of 1e9 elements would keep them all and end without buffers.
- `prefetch_blocks` 1: one block's parameters are read ahead, which saves a tenth of the step and a fifth of the bytes
  read. With recompute a parameter is twice in the order that prefetch follows, and prefetch asserts `already assigned
  swap buffer` (DeepSpeed issue 4072): `_swap_in_once` asks for it once. More of it, more parameter buffers, larger
  groups and larger reduce buckets were within 4 % at 110 M, for up to half more memory.
- Recomputation in torch's reentrant form. The other one keeps detached views of the parameters that it reads, and those
  are views of the swap buffers: their next content would be read in the backward, and the losses were wrong.
- `grad_accum_dtype` fp32, as everyone else's sums are, also in bf16.
- Tensors below 1 MiB stay in memory: DeepSpeed's own bound, not a setting. All tensor sizes of the presets are
  multiples of 256 elements, which its files are aligned to in fp32; vocabularies need no padding.

In fp32, DeepSpeed 0.19.8 makes the parameters bf16 wherever fp16 is not supported (`Init._set_dtype` drops the type it
is given then), and the first addmm meets two types. `_keep_fp32` says that fp16 is supported, so that the type stays:
nothing else asks while a model in fp32 is trained.

`DS_ACCELERATOR` is the case's device, and nothing is asked of a launcher. The operators async_io, cpu_adam and
pin_memory have to be there (requirements-peers.txt tells how to build them); the one for collectives of several ranks
is told off. Buffers are locked into memory, which takes root or `ulimit -l unlimited`.

    python -m benchmarks.race.zero_infinity --case 25m --storage /path/on/a/drive
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.race.plain import checkpoint_blocks
from benchmarks.race.protocol import BETAS, EPSILON, WEIGHT_DECAY, Cannot, Case, Contestant, build_model, main
from benchmarks.race.registry import meeting_place

SETTINGS: dict[str, Any] = {
    "parameters": "nvme",
    "states": "nvme",
    "block_size": 1 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "pipeline_read": True,
    "pipeline_write": True,
    "optimizer_buffers": 12,
    "sub_group_blocks": 1.0,
    "prefetch_blocks": 1.0,
    "reuse_blocks": 0.0,
    "parameter_buffers": 12,
    "max_in_cpu": 0,
    "grad_accum_dtype": "fp32",
    "reduce_bucket_blocks": 1.0,
}


class ZeroInfinity(Contestant):
    """DeepSpeed ZeRO-Infinity."""

    name = "zero-infinity"
    packages = ("torch", "transformers", "deepspeed")

    def build(self) -> dict[str, Any]:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **meeting_place()}
        os.environ.update({**alone, **os.environ, "DS_ACCELERATOR": self.case.device})
        try:
            import deepspeed
        except ImportError as error:
            raise Cannot(f"DeepSpeed is not installed here: {error}") from error
        with suppress(OSError):  # async_io built at installation is not linked with it: undefined symbol io_submit
            ctypes.CDLL("libaio.so.1", mode=ctypes.RTLD_GLOBAL)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # collectives of several ranks: no need to build
        _swap_in_once()
        model = build_model(self.case)
        recompute = checkpoint_blocks(model, self.settings, reentrant=True)
        if self.case.precision == "bf16":
            model.to(torch.bfloat16)
        else:
            _keep_fp32()
        settings = {**SETTINGS, **self.settings, "recompute": recompute}
        config = configuration(self.case, self.storage, settings)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.model = model
        for offload in ("offload_param", "offload_optimizer"):
            settled = config["zero_optimization"][offload]
            settled |= {"nvme_path": "a folder of its own"} if "nvme_path" in settled else {}
        return {**settings, "config": config, "threads": torch.get_num_threads()}

    def step(self, ids: torch.Tensor) -> float:
        total = 0.0
        for micro_batch in ids.split(self.case.micro_batch_size):
            loss = self.engine(input_ids=micro_batch, labels=micro_batch).loss
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item()
        return total / self.case.micro_batches

    def weights(self) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(p).clone() for name, p in self.model.named_parameters()}

    def close(self) -> None:
        self.engine.destroy()


def configuration(case: Case, storage: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration for a case."""
    block = 12 * case.hidden**2
    largest = max(case.vocabulary * case.hidden, 4 * case.hidden**2)
    nvme = {"device": "nvme", "nvme_path": str(storage), "pin_memory": True}
    in_memory = {"device": "cpu", "pin_memory": True}
    parameters_on_nvme = {
        **nvme,
        "buffer_count": settings["parameter_buffers"],
        "buffer_size": largest,
        "max_in_cpu": settings["max_in_cpu"],
    }
    states_on_nvme = {
        **nvme,
        "buffer_count": settings["optimizer_buffers"],
        "pipeline_read": settings["pipeline_read"],
        "pipeline_write": settings["pipeline_write"],
    }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.micro_batch_size,
        "gradient_accumulation_steps": case.micro_batches,
        "gradient_clipping": case.max_grad_norm or 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": case.lr, "betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": parameters_on_nvme if settings["parameters"] == "nvme" else in_memory,
            "offload_optimizer": states_on_nvme if settings["states"] == "nvme" else in_memory,
            "sub_group_size": int(settings["sub_group_blocks"] * block),
            "stage3_prefetch_bucket_size": int(settings["prefetch_blocks"] * block),
            "stage3_max_live_parameters": largest + 2 * block,
            "stage3_max_reuse_distance": int(settings["reuse_blocks"] * block),
            "reduce_bucket_size": max(int(settings["reduce_bucket_blocks"] * block), 1),
            "overlap_comm": False,
        },
        "aio": {
            key: settings[key]
            for key in ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events")
        },
        "data_types": {"grad_accum_dtype": settings["grad_accum_dtype"]},
        "steps_per_print": 1_000_000,
    }
    if case.precision == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def _keep_fp32() -> None:
    """DeepSpeed honours a model's dtype only where the accelerator supports fp16."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


def _swap_in_once() -> None:
    """DeepSpeed's prefetch asks for a parameter twice where recompute uses it twice: ask once."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper as Swapper

    swap_in = Swapper.swap_in

    def once(self: Any, params: Any, async_op: bool = True, swap_in_buffers: Any = None) -> None:
        swap_in(self, list(dict.fromkeys(params)), async_op=async_op, swap_in_buffers=swap_in_buffers)

    Swapper.swap_in = once


if __name__ == "__main__":
    main(ZeroInfinity)
