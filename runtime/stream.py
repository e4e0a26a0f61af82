"""stream: the only file that knows about devices: their streams, events, memory and random numbers.

Device    what the runtime asks of a device. This class is a device that computes in host memory: nothing on it is
          asynchronous, so it has no streams, and nothing needs to be pinned.
Cuda      a CUDA device: what is launched on a stream runs later, in the order of that stream.
DEVICES   the class of each type of device.

A stream runs what is launched on it in order. An event is a point in a stream; other streams and threads wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Protocol

import torch

from gs_compile.machine import available_memory, usable_memory

Tensor = torch.Tensor

fused_adam, fused_adamw, fused_sgd = torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_

Reading = Callable[[], float]  # a number of the device, on its way to the host; the call waits for it


class Event(Protocol):
    """A point in a stream; `Device.seconds` tells when it was."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """A queue of a device."""

    def wait_event(self, event: Any) -> None: ...


class Device:
    """A device whose memory is the host's: what is computed is done on return."""

    has_own_memory = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        return self.device.type

    def memory_nbytes(self) -> tuple[int, int]:
        """The bytes of its memory that are free now, and all of them."""
        return available_memory(), usable_memory()

    # Order -----------------------------------------------------------------------------------------------------------

    def new_stream(self) -> Stream | None:
        """A stream beside the one that computes; None where the thread itself does the work."""
        return None

    def current_stream(self) -> Stream | None:
        """The stream on which this thread launches."""
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """This thread launches on `stream` inside the block."""
        return nullcontext()

    def record(self, stream: Any) -> Event:
        """An event after all that was launched on `stream` so far."""
        raise NotImplementedError(f"{self.name} has no streams")

    def seconds(self, start: Any, end: Any) -> tuple[float, float]:
        """When two events happened, by the clock of `time.perf_counter`; both have."""
        raise NotImplementedError(f"{self.name} has no streams")

    def synchronize(self) -> None:
        """Wait for all that was launched."""

    # Memory ----------------------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> Tensor:
        """Memory of this device, not written yet."""
        if stride is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy on the current stream; on return it is launched. Memory of the device stays until it has been used."""
        target.copy_(source)

    def hold(self, *tensors: Tensor) -> None:
        """Memory of the device stays until what was launched on the current stream has used it."""

    def read(self, number: Tensor) -> Reading:
        """Bring a number of the current stream to the host, without a wait where the device can."""
        value = float(number)
        return lambda: value

    def pin(self, address: int, nbytes: int) -> None:
        """Let host memory take part in asynchronous copies; RuntimeError where the system refuses."""

    def unpin(self, address: int) -> None:
        """The end of `pin`: before the memory is unmapped."""


class Cuda(Device):
    """A CUDA device."""

    has_own_memory = True

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def memory_nbytes(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.device)

    def new_stream(self) -> Stream | None:
        return torch.cuda.Stream(self.device)

    def current_stream(self) -> Stream | None:
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self, stream: Any) -> Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return event

    @cached_property
    def _origin(self) -> tuple[Any, float]:
        event = self.record(self.current_stream())
        event.synchronize()
        return event, time.perf_counter()

    def seconds(self, start: Any, end: Any) -> tuple[float, float]:
        origin, origin_seconds = self._origin
        begin = origin_seconds + origin.elapsed_time(start) / 1e3
        return begin, begin + start.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        self.hold(target, source)

    def hold(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(self.device))

    def read(self, number: Tensor) -> Reading:
        arrived = torch.empty((), dtype=torch.float64, pin_memory=True)
        arrived.copy_(number, non_blocking=True)
        event = self.record(self.current_stream())

        def wait() -> float:
            event.synchronize()
            return float(arrived)

        return wait

    def pin(self, address: int, nbytes: int) -> None:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)))

    def unpin(self, address: int) -> None:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))


DEVICES: Mapping[str, Callable[[torch.device], Device]] = {"cpu": Device, "cuda": Cuda}


def device_of(device: torch.device) -> Device:
    """The `Device` for a device of torch's."""
    return DEVICES.get(device.type, Device)(device)


def has_own_memory(device: torch.device) -> bool:
    """Whether values on `device` are not in host memory."""
    return device_of(device).has_own_memory


def is_in_host_memory(tensor: Tensor | torch.UntypedStorage) -> bool:
    return tensor.device.type == "cpu"


def default_device() -> torch.device:
    """A CUDA device where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cuda_devices() -> list[tuple[str, int]]:
    """The name and the bytes of memory of each CUDA device."""
    if not torch.cuda.is_available():
        return []
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [(each.name, each.total_memory) for each in properties]


def network_backend() -> str:
    """What torch.distributed moves data with between ranks, for the memory of the host and of a device."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def pinned_block(nbytes: int) -> Tensor:
    """Pinned memory of torch's own, which is rounded up to a power of two; RuntimeError where there is none."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def without_autocast() -> AbstractContextManager[None]:
    """The code inside computes in the dtypes it was captured with, whatever autocast the user has on."""
    disabled: AbstractContextManager[None] = torch._C._DisableAutocast()
    return disabled
