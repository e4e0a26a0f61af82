"""plain: plain PyTorch with everything in memory: what a step takes when nothing has to move.

Every block is run again in the backward (torch.utils.checkpoint, non-reentrant), micro-batches follow each other, their
gradients add in `.grad`, and torch's fused AdamW closes the step. Setting `compile`: "none" runs eagerly, "blocks"
compiles each block, "model" the whole model. Setting `recompute`: "all", or "none" where memory holds all activations.

In bf16 parameters and computation are bf16. Gradients of each micro-batch are added to fp32 sums as soon as autograd
has them, AdamW works on fp32 masters, and the masters are rounded back: what ZeRO-3 and GreedySnake compute too.

    python -m benchmarks.race.plain --case 25m --settings '{"compile": "blocks"}'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.race.protocol import BETAS, EPSILON, WEIGHT_DECAY, Contestant, build_model, main


class Plain(Contestant):
    """Plain PyTorch in memory."""

    name = "plain"

    def build(self) -> dict[str, Any]:
        compiled = self.settings.get("compile", "none")
        model = build_model(self.case)
        self.names = [name for name, _ in model.named_parameters()]
        self.masters = list(model.parameters())
        if self.case.precision == "bf16":
            self.masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
            model.to(torch.bfloat16)
            for parameter, master in zip(model.parameters(), self.masters, strict=True):
                parameter.register_post_accumulate_grad_hook(_adder(master))
        recompute = checkpoint_blocks(model, self.settings)
        if compiled == "blocks":
            for block in model.transformer.h:
                block.compile()
        elif compiled == "model":
            model.compile()
        self.model = model
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=self.case.lr, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
        )
        found = {"compile": compiled, "recompute": recompute, "threads": torch.get_num_threads()}
        return {**found, "optimizer": "torch.optim.AdamW(fused)"}

    def step(self, ids: torch.Tensor) -> float:
        loss = accumulate(self.model, ids.split(self.case.micro_batch_size))
        if self.case.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.masters, self.case.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.case.precision == "bf16":
            with torch.no_grad():
                torch._foreach_copy_(list(self.model.parameters()), self.masters)
        return loss

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: master.detach() for name, master in zip(self.names, self.masters, strict=True)}


def checkpoint_blocks(model: Any, settings: Mapping[str, Any], *, reentrant: bool = False) -> str:
    """Every block is recomputed in the backward, if the setting `recompute`, which is returned, is not "none".

    There is no dropout, so no random state to keep.
    """
    recompute = str(settings.get("recompute", "all"))
    if recompute == "none":
        return recompute
    options = {"use_reentrant": reentrant, "preserve_rng_state": False}
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    return recompute


def accumulate(model: Any, micro_batches: tuple[torch.Tensor, ...]) -> float:
    """Forward and backward of each micro-batch in turn; the mean of their losses."""
    total = 0.0
    for ids in micro_batches:
        loss = model(input_ids=ids, labels=ids).loss
        (loss / len(micro_batches)).backward()
        total += loss.item()
    return total / len(micro_batches)


def _adder(master: torch.Tensor) -> Any:
    """A hook that adds a bf16 gradient to the fp32 sum, and drops it."""

    def add(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return add


if __name__ == "__main__":
    main(Plain)
