"""parameter_store: values and optimizer states on the tiers, read and written a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gs_compile.errors import OptimizerError
from gs_compile.model.mapped import CHUNK_NBYTES, directory, leave_memory, mapped
from gs_compile.runtime.tiers import Slice, Tiers

Tensor = torch.Tensor
MASTER = "master"  # the entry of a state that is the parameter's fp32 value


class ParameterStore:
    """Reads and writes the parameters and states of one model between steps, each in its span.

    What is read is mapped from files under `folder`, and belongs to the caller. `components` names the tensors of a
    parameter's optimizer state. The engine, which runs the steps, derives from this.
    """

    def __init__(self, tiers: Tiers, folder: Path, components: Sequence[str]) -> None:
        self.tiers = tiers
        self.folder = folder
        self.components = components
        self.num_steps = 0  # after which values have changed

    @property
    def closed(self) -> bool:
        return self.tiers.closed

    def synchronize(self) -> None:
        """Return when all updates are done and written."""
        self.tiers.synchronize()

    def read(self, span: Slice, *, master: bool = False) -> Tensor:
        """A parameter's value after all updates, on the CPU; with `master` in fp32 where it is kept so."""
        self.synchronize()
        dtype = self.tiers.dtype(span, master=master)
        return self._mapped(span, dtype, lambda piece: self.tiers.read(piece, master=master))

    @property
    def room_nbytes(self) -> int:
        """The memory that values may take for the time of an evaluation."""
        return 0

    def write(self, span: Slice, values: Tensor) -> None:
        """A new value, in the parameter's dtype or the master's. A master that rounds to it stays as it is."""
        self.synchronize()
        flat, own, wide = values.detach().reshape(-1), self.tiers.dtype(span), self.tiers.dtype(span, master=True)
        for start, piece in _pieces(span, wide.itemsize):
            new = flat[start : start + piece.numel].cpu()
            if own != wide and new.dtype == own:
                new = torch.where(new == self.tiers.read(piece), self.tiers.read(piece, master=True), new.to(wide))
            self.tiers.fill(piece, new)
            leave_memory(values.untyped_storage())

    def state(self, span: Slice, num_steps: int) -> dict[str, Any]:
        """A parameter's optimizer state after all updates, as torch has it; its master, where there is one, beside."""
        self.synchronize()
        dtype = self.tiers.setting.state_dtype(span.unit)
        found: dict[str, Any] = {"step": torch.tensor(float(num_steps))}
        for number, name in enumerate(self._components(span)):
            found[name] = self._mapped(span, dtype, lambda piece, n=number: self.tiers.read_state(piece, n))  # type: ignore[misc]
        return found

    def is_rounded(self, span: Slice) -> bool:
        """Whether there is a master, and it is no finer than the value."""
        pieces = [piece for _, piece in _pieces(span, 4)] if self.tiers.has_master(span) else []
        return bool(pieces) and all(
            torch.equal(self.tiers.read(piece, master=True), self.tiers.read(piece).float()) for piece in pieces
        )

    def load_state(self, span: Slice, state: Mapping[str, Any]) -> None:
        """The inverse of `state`; a master that is not in `state` stays.

        Raises OptimizerError where another component is missing, where one is of another shape, and where a master does
        not round to the parameter's value: the value is loaded first.
        """
        self.synchronize()
        for number, name in enumerate(self._components(span)):
            values = state.get(name)
            if values is None and name == MASTER:
                continue
            if values is None and name in state:  # torch's momentum before it has any
                values = torch.zeros((), dtype=torch.float32).expand(span.shape)
            if not isinstance(values, Tensor) or values.shape != span.shape:
                found = tuple(values.shape) if isinstance(values, Tensor) else values
                raise OptimizerError(f"the state of a parameter of shape {span.shape} has {name} {found}")
            flat = values.detach().reshape(-1)
            for start, piece in _pieces(span, 4):
                new = flat[start : start + piece.numel].cpu()
                if name == MASTER and not torch.equal(new.to(self.tiers.dtype(span)), self.tiers.read(piece)):
                    raise OptimizerError(
                        f"the state of a parameter of shape {span.shape} has a master that does not round to the "
                        "parameter's value: load the model's state dict first, then the optimizer's (with "
                        "set_model_state_dict and set_optimizer_state_dict, not set_state_dict; or take the entries "
                        f"{MASTER!r} out, if these are to go on from other values)"
                    )
                self.tiers.write_state(piece, number, new)
                leave_memory(values.untyped_storage())

    def _components(self, span: Slice) -> Sequence[str]:
        """Names of the tensors of a parameter's state, in their order."""
        return (MASTER, *self.components) if self.tiers.has_master(span) else self.components

    def _mapped(self, span: Slice, dtype: torch.dtype, read: Callable[[Slice], Tensor]) -> Tensor:
        return mapped(span.shape, dtype, directory(self.folder), lambda start, stop: read(_within(span, start, stop)))


def _pieces(span: Slice, itemsize: int) -> list[tuple[int, Slice]]:
    """A parameter in pieces of CHUNK_NBYTES: where each starts in it, and each as a span."""
    step = CHUNK_NBYTES // itemsize
    return [(start, _within(span, start, min(start + step, span.numel))) for start in range(0, span.numel, step)]


def _within(span: Slice, start: int, stop: int) -> Slice:
    return replace(span, offset=span.offset + start, shape=(stop - start,))
