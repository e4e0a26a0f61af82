"""card: a device of its own for torch, in host memory: what a run does on a GPU is done on it, on any machine.

It is a PrivateUse1 device, two of them, written in C++ (csrc/):

    streams.cpp   a stream is a queue with a thread; events are marks in it, timed
    memory.cpp    a range of addresses for each stream, poisoned where it is freed, with a byte limit; the host faults
                  where it touches a tensor's address outside of an operator
    pinned.cpp    host memory that copies are asynchronous from and to: allocated, or registered
    random.cpp    generators
    operators.cpp memory, views, copies
    fallback.cpp  all other operators: the CPU's, once the current stream's queue is empty
    module.cpp    what torch asks of a device, and tests ask of the card

So what is computed is computed at once and with the CPU's bits, and copies run later: what nothing orders shows as
wrong values, with `delays` for certain. This file is the module `torch.card`, as torch wants one for each type of
device. `installed` makes the card the process's accelerator for as long as its tests run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import build
import torch

Stream, Event = torch.Stream, torch.Event
NAME = "card"
_initialized = True  # checkpoints save random states of such a device alone


@cache
def native() -> ModuleType:
    """The C++ module; torch knows the device from then on, and sees it inside `installed` alone."""
    found = build.load()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    found.set_available(False)
    return found


@contextmanager
def installed() -> Iterator[None]:
    """The card is this process's accelerator inside the block."""
    native().set_available(True)
    try:
        yield
    finally:
        delays()
        set_device(0)
        torch.accelerator.empty_cache()
        for index in range(native().device_count()):
            set_limit(None, index)
        native().set_available(False)


# What tests ask -------------------------------------------------------------------------------------------------------


class Counts(NamedTuple):
    asynchronous: int  # copies between host and device that the host went on beside
    synchronous: int
    operators: int


def counts() -> Counts:
    return Counts(*native().counts())


def delays(copy: float = 0.0, operator: float = 0.0) -> None:
    """Seconds that every copy between host and device, and every operator, takes more."""
    native().set_copy_delay(copy)
    native().set_operator_delay(operator)


def set_limit(nbytes: int | None = None, device: int = 0) -> None:
    """The bytes of a device's memory; None: as it is at first."""
    native().set_limit(device, 4 << 30 if nbytes is None else nbytes)


def take_touches(device: int) -> int:
    """How often threads have launched, allocated or stood on a device since the last call."""
    return int(native().take_touches(device))


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU with the bytes of one of the card as they are now."""
    found: torch.Tensor = native().host_view(tensor)
    return found


# What torch asks of a device's module -----------------------------------------------------------------------------------


def is_available() -> bool:
    return bool(native().available())


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return native().device_count() if is_available() else 0


def current_device() -> int:
    return int(native().current_device())


def set_device(device: Any) -> None:
    native().set_device(_index(device))


class device:  # noqa: N801  its name in every module of a device
    """The current device inside the block."""

    def __init__(self, device: Any) -> None:
        self._index = -1 if device is None else _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        native().set_device(self._index)

    def __exit__(self, *_: object) -> None:
        native().set_device(self._before)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def stream(stream: torch.Stream) -> torch.Stream:
    return stream


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def get_device_name(device: Any = None) -> str:
    return "a card in host memory"


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def register(address: int, nbytes: int) -> None:
    native().register(address, nbytes)


def unregister(address: int) -> None:
    native().unregister(address)


def __getattr__(name: str) -> Any:
    if name == "default_generators":
        return tuple(native().generator(index) for index in range(native().device_count()))
    raise AttributeError(name)


def manual_seed_all(seed: int) -> None:
    for index in range(native().device_count()):
        native().generator(index).manual_seed(seed)


def manual_seed(seed: int) -> None:
    native().generator(current_device()).manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    found: torch.Tensor = native().generator(_index(device)).get_state()
    return found


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    native().generator(_index(device)).set_state(state)


def _index(device: Any = None) -> int:
    if device is None:
        return current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return current_device() if index is None or index < 0 else index
