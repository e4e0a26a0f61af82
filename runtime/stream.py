"""stream: the only file that knows about devices: their streams, events, memory and random numbers.

Device        what the runtime asks of a device. This class is a device that computes in host memory: nothing on it is
              asynchronous, so it has no streams, and nothing needs to be pinned.
Accelerator   a device of torch.accelerator: what is launched on a stream runs later, in the order of that stream.
Cuda          one with what CUDA and ROCm do better: host memory that is registered, events that block.
DEVICES       the class of each type of device that has one of its own.

A stream runs what is launched on it in order. An event is a point in a stream; other streams and threads wait for it.
Memory of a device is allocated on the computation's stream, which may reuse it as soon as no tensor refers to it: an
operation on another stream keeps a reference until it is done (`values.Held`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gs_compile.errors import DeviceError
from gs_compile.machine import available_memory, usable_memory

fused_adam, fused_adamw, fused_sgd = torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_

SHORTEST_PAUSE, LONGEST_PAUSE = 2e-5, 1e-3  # seconds between two queries of an event
PATIENCE_SECONDS = 5.0  # for copies to end: one that waits for another rank may never do so

Reading = Callable[[], float]  # a number that moves from the device to the host; the call waits for it


class Event(Protocol):
    """A point in a stream; a `Clock` says when it happened."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


def wait_for(event: Event, check: Callable[[], None]) -> None:
    """Return when an event has happened; `check` raises if it never will."""
    pause = SHORTEST_PAUSE
    while not event.query():
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
        check()


class Stream(Protocol):
    """A queue of a device."""

    def wait_event(self, event: Any) -> None: ...


class Device:
    """A device whose memory is the host's: what is computed is done on return."""

    has_own_memory: ClassVar[bool] = False
    registers: ClassVar[bool] = True  # host memory of any allocator, by `pin`

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.check: Callable[[], None] = lambda: None  # raises if a wait would never end; a run sets its own

    @property
    def name(self) -> str:
        return self.device.type

    def memory_nbytes(self) -> tuple[int, int]:
        """The bytes of its memory that this process can allocate now, and all of its bytes."""
        return available_memory(), usable_memory()

    def enter(self) -> None:
        """This thread uses this device from now on; otherwise a new thread uses the first device."""

    # Order -----------------------------------------------------------------------------------------------------------

    def new_stream(self) -> Stream | None:
        """A stream in addition to the one that computes; None if the thread itself does the work."""
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

    @property
    def clock(self) -> Clock:
        """The clock for events that are recorded now."""
        raise NotImplementedError(f"{self.name} has no streams")

    def set_clock(self) -> None:
        """Begin a new clock: the device's own and the host's drift apart."""

    def synchronize(self) -> None:
        """Wait for all that was launched."""

    # Memory ----------------------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> Tensor:
        """Memory of this device, not written yet."""
        if stride is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy on the current stream; on return it is launched."""
        target.copy_(source)

    def read(self, number: Tensor) -> Reading:
        """Bring a number of the current stream to the host, without a wait if the device can."""
        value = float(number)
        return lambda: value

    def pin(self, address: int, nbytes: int) -> None:
        """Allow asynchronous copies of host memory; RuntimeError if the system refuses."""

    def unpin(self, address: int) -> None:
        """The end of `pin`: before the memory is unmapped, and once no copy of it is under way."""


def settle(device: Device, stream: Stream | None) -> None:
    """Return when everything launched on a stream has ended, so that the memory of its copies may go. Never fails."""
    if stream is None:
        return
    with suppress(RuntimeError):  # of a device that has failed, on which nothing runs any more
        event, until = device.record(stream), time.monotonic() + PATIENCE_SECONDS
        while not event.query() and time.monotonic() < until:
            time.sleep(LONGEST_PAUSE)


@dataclass(frozen=True)
class Clock:
    """An event, and when it happened. The time between two events is a float32 of milliseconds."""

    event: Any
    at_seconds: float

    def seconds(self, start: Any, end: Any) -> tuple[float, float]:
        """When two events happened, by the clock of `time.perf_counter`; both have."""
        begin = self.at_seconds + self.event.elapsed_time(start) / 1e3
        return begin, begin + max(0.0, start.elapsed_time(end)) / 1e3


class Accelerator(Device):
    """A device of torch.accelerator, with streams and memory of its own."""

    has_own_memory = True
    registers = False

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        super().__init__(torch.device(device.type, index))
        self._clock: Clock | None = None
        self._beside: Any = None  # a stream on which nothing waits

    @property
    def name(self) -> str:
        return str(torch.get_device_module(self.device).get_device_name(self.device))

    def memory_nbytes(self) -> tuple[int, int]:
        free, whole = torch.accelerator.get_memory_info(self.device)
        reserved = torch.accelerator.memory_reserved(self.device)  # of which the allocator lends what is not in use
        return free + reserved - torch.accelerator.memory_allocated(self.device), whole

    def enter(self) -> None:
        torch.accelerator.set_device_index(self.device)

    def new_stream(self) -> Stream | None:
        return torch.Stream(self.device)

    def current_stream(self) -> Stream | None:
        return torch.accelerator.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = stream
        return context

    def record(self, stream: Any) -> Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record(stream)
        return event

    @property
    def clock(self) -> Clock:
        if self._clock is None:
            self.set_clock()
        assert self._clock is not None
        return self._clock

    def set_clock(self) -> None:
        self._beside = self._beside or self.new_stream()
        event = self.record(self._beside)
        event.synchronize()
        self._clock = Clock(event, time.perf_counter())

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def read(self, number: Tensor) -> Reading:
        arrived = pinned_block(torch.float64.itemsize, self.device.index).view(torch.float64)[0]
        arrived.copy_(number, non_blocking=True)
        return _Arrival(arrived, self.record(self.current_stream()), self.check)

    def pin(self, address: int, nbytes: int) -> None:
        raise RuntimeError(f"{self.name} registers no memory")


class _Arrival:
    """A number that moves to the host. The first call waits for the device; later ones do not ask it."""

    def __init__(self, arrived: Tensor, event: Event, check: Callable[[], None]) -> None:
        self._arrived, self._event, self._check = arrived, event, check
        self._value: float | None = None

    def __call__(self) -> float:
        if self._value is None:
            wait_for(self._event, self._check)
            self._value = float(self._arrived)
        return self._value


class Cuda(Accelerator):
    """A CUDA device, or one of ROCm, which has the same name."""

    registers = True

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

    def pin(self, address: int, nbytes: int) -> None:
        with torch.accelerator.device_index(self.device.index):
            refused = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if refused:
            with suppress(RuntimeError):  # CUDA keeps its last error, and the next kernel of anyone would report it
                torch.ones((), device=self.device)
        torch.cuda.check_error(refused)

    def unpin(self, address: int) -> None:
        with torch.accelerator.device_index(self.device.index):  # any thread: its own device would get a context
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))


DEVICES: Mapping[str, Callable[[torch.device], Device]] = {"cpu": Device, "meta": Device, "cuda": Cuda}
REFUSED = {"mps": "its memory is the host's, and it has no streams that copy beside a computation"}


def device_of(device: torch.device) -> Device:
    """The `Device` for a torch device; raises `DeviceError` for a type that is not torch.accelerator's."""
    if device.type in DEVICES:
        return DEVICES[device.type](device)
    if device.type == _accelerator():
        return Accelerator(device)
    reason = REFUSED.get(device.type, "torch.accelerator knows no such device here")
    raise DeviceError(f"a model on {device} cannot be trained: {reason}. Move it to cpu, or to a CUDA device")


def _accelerator() -> str | None:
    """The type of this machine's accelerator, where it is one that trains."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in REFUSED else found.type


def has_own_memory(device: torch.device) -> bool:
    """Whether values on `device` are not in host memory."""
    return device_of(device).has_own_memory


def is_in_host_memory(tensor: Tensor | torch.UntypedStorage) -> bool:
    return tensor.device.type == "cpu"


def default_device() -> torch.device:
    """The current accelerator if there is one, else the CPU."""
    kind = _accelerator()
    return torch.device("cpu") if kind is None else torch.device(kind, torch.accelerator.current_device_index())


def accelerators() -> list[tuple[str, int]]:
    """The name and the bytes of memory of each accelerator."""
    kind = _accelerator()
    found = [device_of(torch.device(kind, index)) for index in range(torch.accelerator.device_count())] if kind else []
    return [(each.name, each.memory_nbytes()[1]) for each in found]


def network_backend() -> str:
    """The backend of torch.distributed for data in the memory of the host and of the device."""
    kind = _accelerator()
    return "gloo" if kind is None else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def num_groups() -> int:
    """The process groups of torch.distributed that this process is in."""
    return len(dist.distributed_c10d._world.pg_names)


def default_store() -> dist.Store:
    """The store by which the ranks of torch.distributed have met."""
    return dist.distributed_c10d._get_default_store()


def shared_generator(device: torch.device) -> torch.Generator:
    """The generator of a device that all of torch draws from."""
    if device.type == "cpu":
        return torch.default_generator
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    found: torch.Generator = torch.get_device_module(device).default_generators[index]
    return found


def pinned_block(nbytes: int, index: int | None = None) -> Tensor:
    """Pinned memory from torch, which rounds it up to a power of two; RuntimeError if there is none.

    index: of the device in whose context it is allocated; None: the current one.
    """
    with torch.accelerator.device_index(index):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def without_autocast() -> AbstractContextManager[None]:
    """The code inside computes in the dtypes it was captured with, whatever autocast the user has on."""
    disabled: AbstractContextManager[None] = torch._C._DisableAutocast()
    return disabled


@contextmanager
def deterministic(asked: bool) -> Iterator[None]:
    """If `asked`, torch uses only deterministic algorithms inside the block.

    Afterwards the setting is as before, because Dynamo captures a model again for another setting.
    """
    if not asked:
        yield
        return
    memory: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # what is not written is not read
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        memory.fill_uninitialized_memory = before[1]
