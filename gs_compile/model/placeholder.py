"""placeholder: what the user holds of a parameter whose value is elsewhere, and of its gradient.

An offloaded parameter's memory is one NaN that is seen in every place of its shape; it has the device and dtype that
the model computes with, as Dynamo's guards ask. Its value is read and written through its own methods: `detach`, with
which `state_dict` reads, and `copy_`, with which `load_state_dict` writes. `.to(...)` and its like change where and in
what dtype the model computes; no value is lost or brought into memory.

Strides of a placeholder are 0, and Dynamo guards strides. So the backend detaches parameters in its first call and has
Dynamo trace again: the model is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from gs_compile.errors import ReleasedParameterError

Tensor = torch.Tensor


class Source(Protocol):
    """Where the value of one parameter is (`gs_compile.model.residency.Residency`)."""

    def is_offloaded(self, parameter: Tensor) -> bool: ...
    def convert(self, parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor: ...
    def shown_value(self, parameter: Tensor) -> Tensor: ...
    def write(self, parameter: Tensor, values: Tensor) -> None: ...


def placeholder(dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN, which nobody computed, or the least integer where there is none."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full((), float("nan"), dtype=dtype, device=device)
    return torch.full((), 0 if dtype == torch.bool else torch.iinfo(dtype).min, dtype=dtype, device=device)


def _conversion(name: str) -> Callable[..., Any]:
    """A tensor's method `name` for an offloaded parameter: a tensor without elements tells what it leads to."""
    plain = getattr(Tensor, name)

    def convert(self: OffloadedParameter, *args: Any, **kwargs: Any) -> Any:
        source = self.source
        if source is None:
            return plain(self, *args, **kwargs)
        kwargs.pop("memory_format", None)  # values are kept in one order
        like = plain(torch.empty(0, dtype=self.dtype, device=self.device), *args, **kwargs)
        return source.convert(self, like.dtype, like.device)

    return convert


class OffloadedParameter(nn.Parameter):
    """A parameter whose value is elsewhere. A resident one becomes this, and is an ordinary one again afterwards."""

    _greedysnake: Source

    @property
    def source(self) -> Source | None:
        """Where the value is; None while Dynamo traces, and where somebody gave other `.data`: an ordinary tensor."""
        if torch.compiler.is_dynamo_compiling() or not self._greedysnake.is_offloaded(self):
            return None
        return self._greedysnake

    to = _conversion("to")
    cpu = _conversion("cpu")
    cuda = _conversion("cuda")
    float = _conversion("float")
    double = _conversion("double")
    half = _conversion("half")
    bfloat16 = _conversion("bfloat16")

    def detach(self) -> Tensor:
        """The value, in a tensor that takes memory only where it is touched."""
        source = self.source
        return Tensor.detach(self) if source is None else source.shown_value(self)

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Tensor:
        """Write `other` to wherever the value is."""
        source = self.source
        if source is None or torch.is_grad_enabled():
            return Tensor.copy_(self, other, non_blocking)
        if other is not self:
            source.write(self, other.detach().expand(self.shape))
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        kept = f"shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'"
        return f"OffloadedParameter({kept}, requires_grad={self.requires_grad})"

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        self._refuse_copy()
        copied: nn.Parameter = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse_copy()
        return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _refuse_copy(self) -> None:
        if self.source is not None:
            raise ReleasedParameterError(
                "this model cannot be copied or pickled: its parameters live on the tiers. Take its state_dict(), or "
                "copy it inside `with gs_compile.materialize(model):`"
            )


# To look at it, as Dynamo does; names that begin with "is_" or "_is_" are so too.
_HARMLESS = {
    "__get__",
    "detach_",
    "requires_grad_",
    "size",
    "dim",
    "numel",
    "stride",
    "storage_offset",
    "untyped_storage",
}


class UnavailableGradient(torch.Tensor):
    """The `.grad` of an offloaded parameter between backward and optimizer.step(); nobody can compute with it.

    Without it, clipping and other optimizers would pass over the parameter without a word.
    """

    @staticmethod
    def of(parameter: Tensor) -> Tensor:
        """One for a parameter; it takes no memory."""
        whole = placeholder(parameter.dtype, parameter.device).expand(parameter.shape)
        return whole.as_subclass(UnavailableGradient)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """To be looked at, zeroed and dropped is what it allows."""
        name = getattr(function, "__name__", "")
        if name in ("zero_", "_foreach_zero_"):
            return args[0]
        if name in _HARMLESS or name.lstrip("_").startswith("is_"):
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise ReleasedParameterError(
            f"{name}: gradients of parameters that live on the tiers cannot be clipped or used from outside: they "
            "never are in p.grad. Use max_grad_norm= of the gs_compile optimizer, which clips by the same global norm, "
            "and leave this call out"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "UnavailableGradient()"
