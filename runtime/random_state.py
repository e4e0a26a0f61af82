"""random_state: the states of all random number generators, as text: torch's, Python's and numpy's."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gs_compile.errors import ResumeError


def random_state() -> dict[str, str]:
    """The state of each generator: "cpu" and each device in use by its name, "python", "numpy"."""
    devices = {name: bytes(state.tolist()).hex() for name, state in _device_states()}
    numpy = np.random.get_state(legacy=False)
    return {
        "cpu": bytes(torch.get_rng_state().tolist()).hex(),
        **devices,
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps(numpy, default=lambda array: array.tolist()),
    }


def set_random_state(state: Mapping[str, str]) -> None:
    """Restore the generators' states; one that is not in `state`, or is of a device that is not here, is not changed.

    Raises ResumeError if a generator does not accept its state.
    """
    for name, text in state.items():
        try:
            _set(name, text)
        except (LookupError, OverflowError, RecursionError, RuntimeError, TypeError, ValueError) as error:
            raise ResumeError(
                f"the commit's state of the random numbers of {name!r} cannot be loaded: {error}"
            ) from error


def _set(name: str, text: str) -> None:
    if name == "python":
        version, internal, gauss = json.loads(text)
        random.setstate((version, tuple(internal), gauss))
    elif name == "numpy":
        found: dict[str, Any] = json.loads(text)
        found["state"]["key"] = np.array(found["state"]["key"], np.uint32)
        np.random.set_state(found)
    elif name == "cpu":
        torch.set_rng_state(_tensor(text))
    elif name in dict(_device_states()):
        torch.get_device_module(name).set_rng_state(_tensor(text), name)


def _device_states() -> Iterator[tuple[str, torch.Tensor]]:
    found = torch.accelerator.current_accelerator(check_available=True)
    for index in range(torch.accelerator.device_count()) if found is not None else ():
        name = f"{found}:{index}"
        yield name, torch.get_device_module(found).get_rng_state(name)


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
