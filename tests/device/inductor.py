"""inductor for the card: its code is the CPU's, called on the bytes of the card once the current stream's queue is empty."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import card
import torch
from torch._dynamo.device_interface import CpuInterface, register_interface_for_device
from torch._inductor import config
from torch._inductor.codegen.common import register_backend_for_device, register_device_op_overrides
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.cpu_device_op_overrides import CpuDeviceOpOverrides
from torch._inductor.codegen.wrapper import PythonWrapperCodegen


class Interface(CpuInterface):
    """What Dynamo asks of a type of device."""

    @staticmethod
    def current_device() -> int:
        return card.current_device()

    @staticmethod
    def synchronize(device: Any = None) -> None:
        card.synchronize(device)

    @staticmethod
    def is_triton_capable(device: Any = None) -> bool:
        return False


class Wrapper(PythonWrapperCodegen):
    """Code that calls kernels with the bytes of the card."""

    @staticmethod
    def create(*_: Any, **__: Any) -> Wrapper:
        return Wrapper()

    def write_header(self) -> None:
        super().write_header()
        self.imports.writeline("from inductor import bytes_of as card_bytes")

    def _generate_kernel_call_helper(self, kernel_name: str, call_args: Any, *, device: Any = None, **_: Any) -> None:
        on_card = device is not None and device.type == card.NAME
        given = [f"card_bytes({each})" for each in call_args] if on_card else list(call_args)
        self.writeline(self.wrap_kernel_call(kernel_name, given))


def bytes_of(argument: Any) -> Any:
    """An argument of a kernel: a tensor of the card as the CPU sees it, anything else as it is."""
    if not isinstance(argument, torch.Tensor) or argument.device.type != card.NAME:
        return argument
    torch.accelerator.current_stream(argument.device).synchronize()
    return card.host_view(argument)


@contextmanager
def compiling() -> Iterator[None]:
    """torch.compile's usual compiler takes the card inside the block."""
    _register()
    # What is no known type of device is compiled by the backend of this name, and fused as a GPU's would be.
    with config.patch(cuda_backend="cpp", loop_ordering_after_fusion=False, loop_reindexing_after_fusion=False):
        yield


@cache
def _register() -> None:
    register_interface_for_device(card.NAME, Interface)
    for index in range(card.native().device_count()):
        register_interface_for_device(f"{card.NAME}:{index}", Interface)
    register_device_op_overrides(card.NAME, CpuDeviceOpOverrides())
    register_backend_for_device(card.NAME, CppScheduling, Wrapper)
