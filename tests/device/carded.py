"""Runs of the package on the card: the class of the device, and what a run on it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import card
import pytest
import torch

import gs_compile
from gs_compile.model.residency import Residency
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


@contextmanager
def in_place() -> Iterator[None]:
    """An offloaded parameter may become one of the card, or of the CPU, as it may of devices that torch knows."""
    set_data = Residency.set_data

    def across(self: Residency, parameter: torch.Tensor, values: torch.Tensor) -> None:
        if parameter.device.type == values.device.type:
            set_data(self, parameter, values)
            return
        parameter.__class__ = self.kind
        other = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
        other.__dict__.update(parameter.__dict__)
        torch._C._swap_tensor_impl(parameter, other)  # swap_tensors wants no weak references, which Dynamo has

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Residency, "set_data", across)
        patched.setattr(torch, "_has_compatible_shallow_copy_type", lambda *_: True)
        yield


def on_storage(build: Callable[[], torch.nn.Module], storage: Any, where: str = "card:0") -> Any:
    """The model that `init_on_storage` builds, on the card."""
    with in_place():
        return gs_compile.init_on_storage(build, storage=storage, device=where)
