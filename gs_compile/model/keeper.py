"""keeper: values and optimizer states, out of the tiers and into them, in memory for no more than a piece at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gs_compile.errors import OptimizerError
from gs_compile.model.mapped import CHUNK_NBYTES, directory, mapped
from gs_compile.model.optim import TieredOptimizer
from gs_compile.options import Options
from gs_compile.runtime.tiers import Slice, Tiers

Tensor = torch.Tensor


class Keeper:
    """What an engine does for `materialize` and for state dicts."""

    optimizer: TieredOptimizer
    options: Options
    tiers: Tiers
    slices: dict[int, Slice]  # by the id of a parameter
    components: tuple[str, ...]  # of the optimizer's state, when it was made
    num_writes = 0

    def synchronize(self) -> None:
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        return self.tiers.closed

    @property
    def age(self) -> int:
        return self.optimizer.num_steps + self.num_writes

    def read(self, parameter: Tensor, *, master: bool = False) -> Tensor:
        """A parameter's values after all updates, or its master's, mapped from a file."""
        self.synchronize()
        place = self.slices[id(parameter)]
        dtype = self.tiers.dtype(place, master=master)
        return mapped(
            place.shape, dtype, self._folder, lambda a, b: self.tiers.read(_within(place, a, b), master=master)
        )

    def write(self, parameter: Tensor, values: Tensor) -> None:
        """New values for a parameter. Where they are its values rounded, its master stays as it is."""
        self.synchronize()
        self.abandon()
        place, values = self.slices[id(parameter)], values.detach().reshape(-1)
        own, wide = self.tiers.dtype(place), self.tiers.dtype(place, master=True)
        step = CHUNK_NBYTES // wide.itemsize
        for start in range(0, place.numel, step):
            piece = _within(place, start, min(start + step, place.numel))
            new = values[start : start + piece.numel].cpu()
            if own != wide and new.dtype == own:
                new = torch.where(new == self.tiers.read(piece), self.tiers.read(piece, master=True), new.to(wide))
            self.tiers.fill(piece, new)
        self.num_writes += 1

    def abandon(self) -> None:
        """Give up a step whose backward has not begun: its parameters are to change."""
        raise NotImplementedError

    def trains(self, parameter: Tensor) -> bool:
        """Whether the parameter is on the tiers and has a state."""
        place = self.slices.get(id(parameter))
        return place is not None and place.offset < self.tiers.placement.by_unit[place.unit].num_trained

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """A parameter's optimizer state as torch has it; its tensors are mapped from files."""
        self.synchronize()
        place = self.slices[id(parameter)]
        first = self.tiers.has_master(place)
        state: dict[str, Any] = {"step": torch.tensor(float(self.optimizer.num_steps))}
        for number, name in enumerate(self.components, start=first):
            state[name] = self._component(place, number)
        return state

    def load_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """The inverse of `state_of`."""
        self.synchronize()
        place = self.slices[id(parameter)]
        first = self.tiers.has_master(place)
        for number, name in enumerate(self.components, start=first):
            values = state.get(name)
            if values is None and name in state:  # torch's momentum before it has any
                values = torch.zeros((), dtype=torch.float32).expand(place.shape)
            if not isinstance(values, Tensor) or values.shape != place.shape:
                found = tuple(values.shape) if isinstance(values, Tensor) else values
                raise OptimizerError(f"the state of a parameter of shape {place.shape} has {name} {found}")
            self._load_component(place, number, values.detach().reshape(-1))

    def _component(self, place: Slice, number: int) -> Tensor:
        dtype = self.tiers.optimizer.state_dtype(place.unit)
        return mapped(
            place.shape, dtype, self._folder, lambda a, b: self.tiers.read_state(_within(place, a, b), number)
        )

    def _load_component(self, place: Slice, number: int, values: Tensor) -> None:
        step = CHUNK_NBYTES // 4
        for start in range(0, place.numel, step):
            piece = _within(place, start, min(start + step, place.numel))
            self.tiers.write_state(piece, number, values[start : start + piece.numel].cpu())

    @property
    def _folder(self) -> Path:
        return directory(self.options.storage[0])


def _within(place: Slice, start: int, stop: int) -> Slice:
    """Elements of a parameter, as a place of their own."""
    return replace(place, offset=place.offset + start, shape=(stop - start,))
