"""stream_random: random numbers for one unit's computation, independent of what other threads draw."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from gs_compile.capture.internals import TorchDispatchMode
from gs_compile.runtime.stream import shared_generator

aten = torch.ops.aten
# The overload that takes a generator, by the one that does not.
WITH_GENERATOR = {
    "default": "generator",
    "low": "low_generator",
    "out": "generator_out",
    "low_out": "low_generator_out",
}


class OwnNumbers(TorchDispatchMode):
    """Draws from generators of its own instead of torch's, which all threads share: it is a `capture.draws.Numbers`.

    For an operation that takes no generator, such as fused attention with dropout, torch's has this one's state while
    the operation is launched.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seed = 0

    def seed(self, number: int) -> None:
        """Begin the numbers of the seed `number`, on all devices."""
        self._seed = number
        for generator in self._generators.values():
            generator.manual_seed(number)

    def state(self) -> dict[torch.device, torch.Tensor]:
        """The generators' states."""
        return {device: generator.get_state() for device, generator in self._generators.items()}

    def go_on(self, state: dict[torch.device, torch.Tensor]) -> None:
        """Go on from states that `state` has returned."""
        for device, entry in state.items():
            self._generator(device).set_state(entry)

    def draw(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Call an operation that draws."""
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
        if device.type == "meta":  # a model that is inspected without weights: nothing is drawn
            return operator(*args, **kwargs)
        generator = self._generator(device)
        if operator is aten.native_dropout.default:
            return _dropout(*args, generator=generator)
        if (other := _with_generator(operator)) is not None:
            return other(*args, **{**kwargs, "generator": generator})
        return self._borrow(operator, args, kwargs, generator)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draws = torch.Tag.nondeterministic_seeded in func.tags
        return self.draw(func, args, kwargs or {}) if draws else func(*args, **(kwargs or {}))

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


@cache
def _with_generator(operator: Any) -> Any:
    """The operator, or another overload of it, that takes a generator; None if there is none."""
    if any(argument.name == "generator" for argument in operator._schema.arguments):
        return operator
    return getattr(operator.overloadpacket, WITH_GENERATOR.get(operator._overloadname, "none"), None)


def _dropout(tensor: torch.Tensor, p: float, train: bool | None, *, generator: torch.Generator) -> Any:
    """The result of aten.native_dropout, bit for bit, from operations that take a generator."""
    if train is False:
        return tensor, torch.ones_like(tensor, dtype=torch.bool)
    mask = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return (tensor * mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask
