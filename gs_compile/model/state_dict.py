"""state_dict: values and optimizer states, read from the tiers and written to them, in memory a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gs_compile.errors import OptimizerError
from gs_compile.model.mapped import CHUNK_NBYTES, directory, mapped
from gs_compile.runtime.tiers import Slice, Tiers

Tensor = torch.Tensor


@dataclass(frozen=True)
class StoredValues:
    """What the tiers hold between steps, by span; what is read is mapped from files under `folder`."""

    tiers: Tiers
    folder: Path
    components: Sequence[str]  # of the optimizer's state

    def read(self, span: Slice, *, master: bool) -> Tensor:
        """A parameter's value, or its master's."""
        dtype = self.tiers.dtype(span, master=master)
        return self._mapped(span, dtype, lambda piece: self.tiers.read(piece, master=master))

    def write(self, span: Slice, values: Tensor) -> None:
        """A new value. Where it is the old one's master rounded, the master stays as it is."""
        flat, own, wide = values.detach().reshape(-1), self.tiers.dtype(span), self.tiers.dtype(span, master=True)
        for start, piece in _pieces(span, wide.itemsize):
            new = flat[start : start + piece.numel].cpu()
            if own != wide and new.dtype == own:
                new = torch.where(new == self.tiers.read(piece), self.tiers.read(piece, master=True), new.to(wide))
            self.tiers.fill(piece, new)

    def state(self, span: Slice, num_steps: int) -> dict[str, Any]:
        """A parameter's optimizer state as torch has it."""
        dtype = self.tiers.optimizer.state_dtype(span.unit)
        found: dict[str, Any] = {"step": torch.tensor(float(num_steps))}
        for number, name in enumerate(self.components, start=self.tiers.has_master(span)):
            found[name] = self._mapped(span, dtype, lambda piece, n=number: self.tiers.read_state(piece, n))  # type: ignore[misc]
        return found

    def load_state(self, span: Slice, state: Mapping[str, Any]) -> None:
        """The inverse of `state`; OptimizerError where a component is missing or of another shape."""
        for number, name in enumerate(self.components, start=self.tiers.has_master(span)):
            values = state.get(name)
            if values is None and name in state:  # torch's momentum before it has any
                values = torch.zeros((), dtype=torch.float32).expand(span.shape)
            if not isinstance(values, Tensor) or values.shape != span.shape:
                found = tuple(values.shape) if isinstance(values, Tensor) else values
                raise OptimizerError(f"the state of a parameter of shape {span.shape} has {name} {found}")
            flat = values.detach().reshape(-1)
            for start, piece in _pieces(span, 4):
                self.tiers.write_state(piece, number, flat[start : start + piece.numel].cpu())

    def _mapped(self, span: Slice, dtype: torch.dtype, read: Callable[[Slice], Tensor]) -> Tensor:
        folder = directory(self.folder)
        return mapped(span.shape, dtype, folder, lambda start, stop: read(_within(span, start, stop)))


def _pieces(span: Slice, itemsize: int) -> list[tuple[int, Slice]]:
    """A parameter in pieces of CHUNK_NBYTES: where each starts in it, and each as a span."""
    step = CHUNK_NBYTES // itemsize
    return [(start, _within(span, start, min(start + step, span.numel))) for start in range(0, span.numel, step)]


def _within(span: Slice, start: int, stop: int) -> Slice:
    return replace(span, offset=span.offset + start, shape=(stop - start,))
