"""offloaded: a parameter whose value is elsewhere, and that can be read and written as if the value were here.

In a capture an `OffloadedParameter` is an ordinary tensor of its shape. For every torch function outside of a capture
it stands for its value: the value is read for the function, and written back if the function has changed it in place.
So no code computes with the placeholder. What cannot be done with such a value raises `ReleasedParameterError`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gs_compile.capture.dynamo import current_compile_id, is_foreign
from gs_compile.capture.internals import (
    converts_module,
    makes_replicas,
    makes_state_dict,
    untraced,
    without_overrides,
)
from gs_compile.errors import ReleasedParameterError, UncapturedWarning
from gs_compile.model.files import own_rows
from gs_compile.model.stand_in import StandIn, Used, applied, plain, warn_of_two

# Names of torch's functions that do not need a tensor's values: they ask for its properties, such as its shape, or make
# another tensor like it. Names that begin with one of `_ASKS`, or with "new_", are among them.
LOOKS = frozenset(
    "__len__ dim element_size get_device ndimension nelement numel requires_grad_ size storage_offset stride detach_ "
    "untyped_storage _has_compatible_shallow_copy_type".split()
)
_ASKS = ("is_", "_is_")
_MAKES = frozenset("empty_like full_like ones_like rand_like randn_like zeros_like".split())
_GET_DATA: Any = cast(Any, Tensor.data).__get__
_VIEWS = frozenset("data T mT H mH real imag".split())  # attributes that show values; all others look
_CONVERSIONS = frozenset("to cpu cuda float double half bfloat16 type".split())
_REFUSED = {
    **dict.fromkeys(("resize_", "resize_as_", "share_memory_"), "has no memory of its own"),
    **dict.fromkeys(("register_hook", "register_post_accumulate_grad_hook"), "gives its gradient to its update alone"),
}
REPLICATED = (
    "the ranks already share the parameters of this model and average its gradients: leave the wrapper out. It works "
    "with a torch.optim optimizer, which leaves parameters in memory"
)


class Residence(Protocol):
    """Where the value of an offloaded parameter is (`residency.Residency`)."""

    num_replaced: int

    def shown_value(self, parameter: Tensor, device: torch.device) -> Tensor: ...
    def is_shown(self, values: Tensor) -> bool: ...
    def has_left(self, values: Tensor) -> bool: ...
    def forget(self, values: Tensor) -> None: ...
    def rows(self, parameter: Tensor) -> Tensor: ...
    def copied(self, parameter: Tensor) -> torch.nn.Parameter | None: ...
    def take(self, parameter: Tensor, values: Tensor) -> None: ...
    def write(self, parameter: Tensor, values: Tensor) -> None: ...
    def replace(self, parameter: Tensor, values: Tensor) -> None: ...
    def add_gradient(self, parameter: Tensor, gradient: Tensor) -> None: ...
    def convert(self, parameter: Tensor, dtype: torch.dtype, device: torch.device) -> None: ...


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that stands for values elsewhere: in memory one NaN, which nobody computed, or the least integer."""
    has_nan = dtype.is_floating_point or dtype.is_complex
    value = float("nan") if has_nan else 0 if dtype == torch.bool else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


class _ByWhoAsks(type(nn.Parameter)):  # type: ignore[misc]  # mypy cannot tell what the type is
    """The metaclass of classes that have no `__torch_function__` for Dynamo, which asks the class while it traces.

    So all functions, also those that ask for overrides, are traced as for an ordinary tensor. If a frame has no
    operations, Dynamo makes no code and goes on with the functions that it calls: it has to skip this one. C code asks
    a tensor, and takes an error for "none": so no Python code runs then, in which a signal could raise one.
    """

    @property
    @untraced
    def __torch_function__(self) -> Any:
        return _call if current_compile_id() is None else nn.Parameter.__torch_function__


@untraced
def _call(function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return _applied(function, args, kwargs or {})


class _Elsewhere(StandIn, metaclass=_ByWhoAsks):
    """A tensor that stands for values in other memory."""

    __torch_function__ = staticmethod(_call)


class OffloadedParameter(_Elsewhere, nn.Parameter):  # type: ignore[metaclass]
    """A parameter whose value is elsewhere. A resident one becomes this, and is an ordinary one again afterwards.

    A state dict gets a tensor of its own; `.data`, `detach` and other views write through.
    `.to(...)` and its like, when a module takes them up, change where and in what dtype the model computes.
    """

    _greedysnake: Residence

    def taken(self, name: str = "") -> Tensor:
        values = self._greedysnake.shown_value(self, self.device)
        if torch.is_grad_enabled() and self.requires_grad:
            return cast(Tensor, _Read.apply(self, values))  # type: ignore[no-untyped-call]
        return values

    def stride(self, dim: int | None = None) -> Any:
        """The strides of the value, which is contiguous; another backend's capture guards those of the memory."""
        if is_foreign():
            warnings.warn(
                "a graph of another backend reads parameters on the tiers, each where it is used, as plain PyTorch "
                "does: a compiled model that is called inside of another one, as a teacher in its hooks, runs on the "
                "tiers if it is called ahead of that one, or as torch.compiler.disable(model)",
                UncapturedWarning,
                stacklevel=2,
            )
            strides: tuple[int, ...] = (0,) * self.dim()
        else:
            strides = torch.empty(self.shape, device="meta").stride()
        return strides if dim is None else strides[dim]

    def changed(self, taken: Tensor) -> None:
        self._greedysnake.write(self, taken)

    def seen(self, result: Tensor, taken: Tensor) -> Tensor:
        return View.of(self, result, self._greedysnake.shown_value(self, self.device))

    def set_(self, source: Any = None, *place: Any) -> Any:
        """As ``.data = source``: torch does not override this method, and would set the placeholder's memory."""
        if place or not isinstance(source, Tensor):
            raise ReleasedParameterError("set_: a parameter that lives on the tiers has no memory of its own")
        self._assign(source)
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        kept = f"shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'"
        return f"OffloadedParameter({kept}, requires_grad={self.requires_grad})"

    def __deepcopy__(self, memo: Any) -> Any:
        copied = self._greedysnake.copied(self)
        if copied is None:
            return self.__reduce_ex__(None)
        return memo.setdefault(id(self), copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ReleasedParameterError(
            "this model cannot be copied or pickled: its parameters live on the tiers. Take its state_dict(), or "
            "copy it inside `with gs_compile.materialize(model):`"
        )

    def _assign(self, values: Tensor) -> None:
        """``parameter.data = values``: a conversion changes dtype or device, other values are written."""
        if values is self:  # a module is sent to where it is
            return
        if isinstance(values, Conversion) and values.parameter is self:
            self._greedysnake.convert(self, values.dtype, values.device)
            return
        owner = values.parameter if isinstance(values, View) else values
        if isinstance(owner, OffloadedParameter) and owner is not self:
            warn_of_two(self.shape)
        if (values.shape, values.dtype, values.device) == (self.shape, self.dtype, self.device):
            self._greedysnake.replace(self, _read(values))
        elif values.shape == self.shape and values.device == self.device:  # such as of parameter.data.to(dtype)
            self._greedysnake.take(self, _read(values))
        else:
            raise ReleasedParameterError(
                f"a parameter of shape {tuple(self.shape)} and {self.dtype} lives on the tiers and cannot be given "
                f".data of shape {tuple(values.shape)} and {values.dtype} on {values.device}. Change the model in "
                "memory, before it is stored or first called, and make its optimizer afterwards"
            )

    def _convert(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``parameter.to(...)`` and its like: a tensor without elements shows to which dtype and device."""
        settings = {key: value for key, value in kwargs.items() if key != "memory_format"}  # values have one order
        like = function(torch.empty(0, dtype=self.dtype, device=self.device), *args, **settings)
        if not isinstance(like, Tensor) or (like.dtype, like.device) == (self.dtype, self.device):
            return self if isinstance(like, Tensor) else like
        future = torch.__future__
        replaced = future.get_swap_module_params_on_conversion() or future.get_overwrite_module_params_on_conversion()
        if replaced or like.is_meta:
            raise ReleasedParameterError(
                f"a parameter of shape {tuple(self.shape)} lives on the tiers and cannot become {like.dtype} on "
                f"{like.device}: convert it to a device that computes, with torch's default way of conversion (.data)"
            )
        found = placeholder(self.shape, like.dtype, like.device).as_subclass(Conversion)
        found.parameter, found.read = self, None
        if not converts_module():
            found.taken()
        return found


class View(_Elsewhere):  # type: ignore[metaclass]
    """The value of an offloaded parameter, or a view of it, in memory.

    It becomes an alias once the parameter has changed. After ``parameter.data = values`` it is an independent tensor.
    """

    parameter: OffloadedParameter
    whole: Tensor
    number: int  # of the memory that the parameter has been given

    @classmethod
    def of(cls, parameter: OffloadedParameter, view: Tensor, whole: Tensor) -> View:
        """whole: all of the parameter's value, in the same memory."""
        found = view.as_subclass(cls)
        found.parameter, found.whole, found.number = parameter, whole, parameter._greedysnake.num_replaced
        return found

    def taken(self, name: str = "") -> Tensor:
        parameter, residency = self.parameter, self.parameter._greedysnake
        if residency.is_shown(self.whole) or residency.has_left(self.whole):
            return plain(self)
        is_cast = self.is_complex() or (self.dtype, self.device) != (parameter.dtype, parameter.device)
        if self.requires_grad or is_cast or self.number != residency.num_replaced:
            raise ReleasedParameterError(
                f"this view of a parameter of shape {tuple(parameter.shape)} was taken before the parameter changed: "
                "take it from the parameter again"
            )
        with without_overrides():
            Alias.follow(self, parameter, int(self.storage_offset() - self.whole.storage_offset()))
        vars(self).update(whole=None, kept=None)  # memory that nobody reads any more
        return self.taken(name)  # as an alias

    def changed(self, taken: Tensor) -> None:
        if not self.parameter._greedysnake.has_left(self.whole):
            self.parameter._greedysnake.write(self.parameter, self.whole)

    def seen(self, result: Tensor, taken: Tensor) -> Tensor:
        return View.of(self.parameter, result, self.whole)


class Alias(_Elsewhere):  # type: ignore[metaclass]
    """A tensor that shared a parameter's memory before its first call, or before the parameter changed: it shows its
    part of the parameter's value.
    """

    parameter: Tensor
    strides: tuple[int, ...]
    start: int
    kept: torch.UntypedStorage | None

    @classmethod
    def follow(cls, tensor: Any, parameter: Tensor, start: int) -> None:
        """Make a tensor an alias of a parameter, from element `start` on. Its memory is freed, unless a numpy array
        shares it.
        """
        strides, memory = tensor.stride(), tensor.untyped_storage()
        tensor.kept = None if memory.resizable() else memory
        tensor.data = placeholder(tensor.shape, tensor.dtype, tensor.device)
        tensor.__class__ = cls
        tensor.parameter, tensor.strides, tensor.start = parameter, strides, start
        parameter._greedysnake.forget(tensor)  # type: ignore[attr-defined]

    def taken(self, name: str = "") -> Tensor:
        parameter = self.parameter
        if isinstance(parameter, OffloadedParameter):
            whole = parameter._greedysnake.shown_value(parameter, parameter.device)
        else:
            whole = parameter.detach()
        with torch.inference_mode(False):  # its changes are counted
            return whole.as_strided(self.shape, self.strides, whole.storage_offset() + self.start)

    def stride(self, dim: int | None = None) -> Any:
        return self.strides if dim is None else self.strides[dim]

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        return self.taken().is_contiguous(*args, **kwargs)

    def changed(self, taken: Tensor) -> None:
        if isinstance(self.parameter, OffloadedParameter):
            assert taken._base is not None
            self.parameter._greedysnake.write(self.parameter, taken._base)

    def set_(self, *_: Any) -> Any:
        _refuse("set_", self)

    def seen(self, result: Tensor, taken: Tensor) -> Tensor:
        if not isinstance(self.parameter, OffloadedParameter):
            return result
        assert taken._base is not None
        return View.of(self.parameter, result, taken._base)


class Conversion(_Elsewhere):  # type: ignore[metaclass]
    """An offloaded parameter in another dtype or on another device: a copy of its value, which is read when it is first
    used. (When a module is moved or cast, it never is.)
    """

    parameter: OffloadedParameter
    read: Tensor | None

    def taken(self, name: str = "") -> Tensor:
        if self.read is None:
            with torch.inference_mode(False):  # its changes are counted
                self.read = self.parameter.taken().to(self.device, self.dtype)
        return self.read


class UnavailableGradient(Tensor):
    """The `.grad` of an offloaded parameter between backward and optimizer.step(), with which no code can compute.

    Without it, clipping and other optimizers would silently skip the parameter.
    """

    is_zeroed = False  # by the user, since the last backward
    is_expected = False  # in `.grad`: a backward of the current step has left it
    is_left = False  # it is of a closed step, and has not been zeroed since: torch would use it again

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allow it to be inspected, zeroed, moved and dropped, and nothing else."""
        name = getattr(function, "__name__", "")
        if name in ("detach", "detach_") or sends(name, function, args):
            return args[0]
        if name == "zero_":
            args[0].is_zeroed = True
            return args[0]
        if name == "_foreach_zero_":  # of parameters in memory too
            return [gradient.zero_() for gradient in args[0]]
        looks = name == "__get__" and function.__self__.__name__ not in _VIEWS
        if looks or name in LOOKS or name.startswith(_ASKS):
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise ReleasedParameterError(
            f"p.grad was used ({name}), as clip_grad_norm_ does: gradients of parameters that live on the tiers cannot "
            "be clipped or used from outside, because they are never in p.grad. Leave this call out. Use "
            "max_grad_norm= of the gs_compile optimizer, which clips by the same global norm (math.inf clips nothing), "
            "read optimizer.grad_norm, scale the loss before its backward, or use a torch.optim optimizer, which keeps "
            "parameters in memory and gradients in p.grad"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "UnavailableGradient()"


def sends(name: str, function: Any, args: Sequence[Any]) -> bool:
    """Whether a function moves a tensor, gets its `.data` to be moved, or sets the moved `.data`."""
    return name in _CONVERSIONS or function == _GET_DATA or (name == "__set__" and args[1] is args[0])


@dataclass(frozen=True)
class Address:
    """The result of `data_ptr`, as a parameter has no memory: it only compares whether two parameters are the same."""

    number: int

    def __index__(self) -> int:
        raise ReleasedParameterError("data_ptr: a parameter that lives on the tiers has no memory of its own")

    def __mod__(self, _: int) -> int:  # whether memory is aligned
        return self.__index__()


class _Read(torch.autograd.Function):
    """A parameter's value with a gradient, which is added to that of the compiled model."""

    @staticmethod
    def forward(ctx: Any, parameter: OffloadedParameter, values: Tensor) -> Tensor:
        ctx.parameter = parameter
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.parameter._greedysnake.add_gradient(ctx.parameter, gradient)
        return None, None


def read_for(tensors: Iterable[Tensor]) -> set[OffloadedParameter]:
    """The offloaded parameters that get gradients of these tensors from outside of a compiled model."""
    ahead, seen = [tensor.grad_fn for tensor in tensors], set[Any]()
    while ahead:
        if (node := ahead.pop()) is not None and node not in seen:
            seen.add(node)
            ahead += [further for further, _ in node.next_functions]
    return {node.parameter for node in seen if isinstance(node, _Read._backward_cls)}  # type: ignore[attr-defined]


def _applied(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The function's result for the values of all arguments whose values are elsewhere."""
    name, first = function.__name__, args[0] if args else None
    attribute = getattr(function.__self__, "__name__", "") if name in ("__get__", "__set__", "__delete__") else None
    if function is torch.autograd.grad:
        raise ReleasedParameterError(
            "torch.autograd.grad: a parameter that lives on the tiers gives its gradient to its update alone. Call "
            "loss.backward() and optimizer.step(), or use a torch.optim optimizer, which leaves gradients in p.grad"
        )
    _refuse(name, first)
    if isinstance(first, OffloadedParameter):
        if name == "data_ptr":
            return Address(id(first))
        if name == "__set__" and attribute == "data":
            return first._assign(args[1])
        if name == "detach" and makes_state_dict():
            return first._greedysnake.rows(first)
        if name == "copy_" and len(args) > 1 and not torch.is_grad_enabled():
            first._greedysnake.write(first, _read(args[1]).expand(first.shape))
            return first
        if name in _CONVERSIONS and not kwargs.get("copy"):
            return first._convert(function, args[1:], kwargs)
    looks = name in LOOKS | _MAKES or name.startswith((*_ASKS, "new_")) or function is torch.autograd.backward
    if looks or (attribute and attribute not in _VIEWS):
        return nn.Parameter.__torch_function__(function, (), args, kwargs)
    if attribute == "data":
        function = Tensor.detach  # which counts changes
    used: Used = []
    return applied(_Elsewhere, _counting(function, used), args, kwargs, used)


def _counting(function: Any, used: Used) -> Any:
    """The function; for a collective, one that also counts what arrives from other ranks as a change of the tensor."""
    if getattr(function, "__module__", "") != dist.distributed_c10d.__name__:
        return function

    @wraps(function)
    def count(*args: Any, **kwargs: Any) -> Any:
        before = [values.clone() for _, values, _ in used]
        result = function(*args, **kwargs)
        if isinstance(result, dist.Work):
            result.wait()
        for (_, values, _), old in zip(used, before, strict=True):
            if not torch.equal(values, old):
                torch.autograd.graph.increment_version(values)
        return result

    return count


def _refuse(name: str, first: Any) -> None:
    """Raise ReleasedParameterError if a function cannot be used for a value that is elsewhere."""
    if isinstance(first, OffloadedParameter) and name == "detach" and makes_replicas():
        raise ReleasedParameterError(f"DistributedDataParallel: {REPLICATED}")
    if isinstance(first, OffloadedParameter) and name in _REFUSED:
        raise ReleasedParameterError(f"{name}: a parameter that lives on the tiers {_REFUSED[name]}")
    if isinstance(first, Alias) and name in ("data_ptr", "untyped_storage", "set_", *_REFUSED):
        raise ReleasedParameterError(
            f"{name}: this tensor shows a parameter that lives on the tiers, and has no memory of its own. Take it "
            "from the parameter, or from model.state_dict(), again"
        )


def _read(tensor: Tensor) -> Tensor:
    """The values of any tensor, without a gradient."""
    return (tensor.taken() if isinstance(tensor, _Elsewhere) else own_rows(tensor)).detach()
