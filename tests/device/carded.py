"""Runs of the package on the card: the class of the device, and what a run on it leaves."""

from __future__ import annotations

from typing import Any

import card
import torch

from gs_compile.runtime.stream import Accelerator


class Card(Accelerator):
    """The card as Cuda is: host memory is registered."""

    registers = True

    def pin(self, address: int, nbytes: int) -> None:
        with torch.accelerator.device_index(self.device.index):
            card.register(address, nbytes)

    def unpin(self, address: int) -> None:
        card.unregister(address)


def to(model: torch.nn.Module, where: str = "card:0") -> Any:
    """The model on the card, with the same parameters, ties and all.

    `Module.to` alone gives it others: torch knows a few types of devices whose tensors a parameter may become in place.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(where)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
