"""stream_random: random numbers of one unit's computation, which no other thread's draws can change."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gs_compile.runtime.stream import shared_generator

aten = torch.ops.aten
# Overloads that take a generator, by those that do not.
WITH_GENERATOR = {
    "default": "generator",
    "low": "low_generator",
    "out": "generator_out",
    "low_out": "low_generator_out",
}


class OwnNumbers(TorchDispatchMode):
    """Inside, random operations draw from generators of this object instead of torch's, which all threads draw from.

    An operation that takes no generator, such as fused attention with dropout, borrows torch's for as long as it is
    launched.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seed = 0

    def seed(self, number: int) -> None:
        """Begin the numbers that belong to `number`, on all devices."""
        self._seed = number
        for generator in self._generators.values():
            generator.manual_seed(number)

    def state(self) -> dict[torch.device, torch.Tensor]:
        """Where the numbers have come to."""
        return {device: generator.get_state() for device, generator in self._generators.items()}

    def go_on(self, state: dict[torch.device, torch.Tensor]) -> None:
        """Go on where the numbers had come to."""
        for device, entry in state.items():
            self._generator(device).set_state(entry)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
        if device.type == "meta":  # a model that is inspected without weights: nothing is drawn
            return func(*args, **kwargs)
        generator = self._generator(device)
        if func is aten.native_dropout.default:
            return _dropout(*args, generator=generator)
        named = any(argument.name == "generator" for argument in func._schema.arguments)
        other = func if named else getattr(func.overloadpacket, WITH_GENERATOR.get(func._overloadname, "none"), None)
        if other is not None:
            return other(*args, **{**kwargs, "generator": generator})
        return self._borrow(func, args, kwargs, generator)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:  # "cuda" is the current device, which has an index as well
            made = torch.Generator(device).manual_seed(self._seed)
            self._generators[device] = self._generators.setdefault(made.device, made)
        return self._generators[device]

    def _borrow(self, func: Any, args: Any, kwargs: Any, generator: torch.Generator) -> Any:
        shared = shared_generator(generator.device)
        before = shared.get_state()
        shared.set_state(generator.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            generator.set_state(shared.get_state())
            shared.set_state(before)


def _dropout(tensor: torch.Tensor, p: float, train: bool | None, *, generator: torch.Generator) -> Any:
    """The result of aten.native_dropout, bit for bit, from operations that take a generator."""
    if train is False:
        return tensor, torch.ones_like(tensor, dtype=torch.bool)
    mask = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return tensor * mask * (0.0 if p == 1 else 1 / (1 - p)), mask
