"""fsdp2: PyTorch's own sharding with CPU offload, over the ranks of the case: the step in memory, by its machinery.

Every block is sharded on its own, and what is left of the model after them; parameters are all-gathered for a block's
forward, again for its backward, and dropped after each. Gradients go to the offloaded shards after every micro-batch,
where torch's fused AdamW updates them. Recompute and accumulation are those of `plain`.

It runs without an accelerator, with two adaptations: the mesh is of "cpu" (gloo), and `pin_memory=False`, for pinning
asks for an accelerator ("Cannot access accelerator device when none is available"). Offloading then moves nothing, as
device and host are one memory: what is left is the copies of gathering, scattering and reducing. The losses and the
parameters after steps in fp32 are those of `plain` bit for bit.

In bf16 the sharded parameters are fp32 masters, gathered as bf16, and gradients are reduced in fp32.

    python -m benchmarks.race.fsdp2 --case 25m
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from benchmarks.race.plain import accumulate, checkpoint_blocks
from benchmarks.race.protocol import BETAS, EPSILON, WEIGHT_DECAY, Contestant, build_model, main


class Fsdp2(Contestant):
    """FSDP2 with CPUOffloadPolicy."""

    name = "fsdp2"

    def build(self) -> dict[str, Any]:
        if self.case.ranks == 1:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group("gloo")
        bf16 = self.case.precision == "bf16"
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (self.case.ranks,)),
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy(),
            "offload_policy": CPUOffloadPolicy(pin_memory=False),
        }
        self.model = model = build_model(self.case)
        recompute = checkpoint_blocks(model, self.settings)
        for block in model.transformer.h:
            fully_shard(block, reshard_after_forward=True, **options)
        fully_shard(model, **options)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.case.lr, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
        )
        return {
            "backend": "gloo",
            "offload": "CPUOffloadPolicy(pin_memory=False)",
            "reshard_after_forward": True,
            "recompute": recompute,
            "threads": torch.get_num_threads(),
            "optimizer": "torch.optim.AdamW(fused)",
        }

    def step(self, ids: torch.Tensor) -> float:
        loss = accumulate(self.model, ids.split(self.case.micro_batch_size))
        if self.case.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().full_tensor() for name, parameter in self.model.named_parameters()}

    def close(self) -> None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Fsdp2)
