"""fsdp2: PyTorch's own sharding with CPU offload, in a world of one: the step in memory, through its machinery."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.race.contest import BETAS, EPSILON, WEIGHT_DECAY, Contestant, build_model, main
from benchmarks.race.plain import accumulate, checkpoint_blocks


class Fsdp2(Contestant):
    """FSDP2 with CPUOffloadPolicy."""

    name = "fsdp2"

    def build(self) -> dict[str, Any]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        model = build_model(self.case)
        self.names = [name for name, _ in model.named_parameters()]
        checkpoint_blocks(model)
        bf16 = self.case.precision == "bf16"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        offload = CPUOffloadPolicy(pin_memory=bool(self.settings.get("pin", False)))
        reshard = bool(self.settings.get("reshard", True))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.case.lr, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
        )
        return {}

    def step(self, ids: torch.Tensor) -> float:
        loss = accumulate(self.model, ids.split(self.case.micro_batch_size))
        if self.case.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().full_tensor() for name, p in self.model.named_parameters()}

    def close(self) -> None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Fsdp2)
