"""materialized: parameters that live on the tiers, in their model again, for whatever reads or changes them.

    with gs_compile.materialize(model):             with gs_compile.materialize(model, write=True):
        model.generate(ids)                             model.lm_head.weight.mul_(0.5)

The values are mapped from unnamed files, so that memory need not hold them all. `state_dict`, `load_state_dict` and
what is made of them, as `save_pretrained`, work at any time: hooks on the modules read and write through to wherever
the values are (the keeper of each parameter knows).
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from gs_compile.errors import ReleasedParameterError, StepOrderError
from gs_compile.model.placeholders import is_released, release
from gs_compile.model.storage_init import contents_of

Tensor = torch.Tensor


class Keeper(Protocol):
    """Whoever has the values of released parameters."""

    @property
    def closed(self) -> bool: ...

    @property
    def age(self) -> int:
        """Another number whenever a value has changed."""

    def read(self, parameter: Tensor, *, master: bool = False) -> Tensor:
        """The values after all updates, in a tensor that is the caller's; on the CPU, in the parameter's dtype."""

    def write(self, parameter: Tensor, values: Tensor) -> None:
        """New values, of the parameter's dtype or the master's: what is the same when rounded keeps its master."""


_keepers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter -> weak reference to its keeper
_inside: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameters that are materialized now


@contextmanager
def materialize(model: nn.Module, *, write: bool = False, master: bool = False) -> Iterator[nn.Module]:
    """All parameters of `model` hold their values, every update done; at the end placeholders return.

    On a CPU they are mapped from files; a GPU has to have room for them. With `write`, what has changed goes back home
    (not if the block fails), to fp32 masters too; otherwise changes are lost, but for those of a model that has not
    run yet. With `master`, parameters that are computed with in bf16 are their fp32 masters.

    In the block the model runs as plain PyTorch does, for evaluation: a call with gradients enabled raises
    StepOrderError, as it does between backward and optimizer.step(). Training goes on afterwards as if nothing had
    happened.
    """
    released = {parameter: parameter.dtype for parameter in model.parameters() if is_released(parameter)}
    with ExitStack() as stack:
        for parameter, dtype in released.items():
            values = _read(parameter, master=master).to(parameter.device)
            stack.callback(_leave, parameter, dtype)
            parameter.data = values
            _inside[parameter] = True
        if released:
            stack.enter_context(_plain_calls(model))
        yield model
        if write:
            for parameter in released:
                _write(parameter, parameter.data)


def is_materialized(parameter: Tensor) -> bool:
    """Whether its values are in memory for the time of a `materialize`."""
    return parameter in _inside


def keep(parameters: Iterable[Tensor], keeper: Keeper) -> None:
    """Note who keeps the values of released parameters; it lives as long as its own owner wants."""
    for parameter in parameters:
        _keepers[parameter] = weakref.ref(keeper)


def keeper_of(parameter: Tensor) -> Keeper | None:
    """Who keeps the parameter's values."""
    reference = _keepers.get(parameter)
    keeper: Keeper | None = reference() if reference is not None else None
    return None if keeper is None or keeper.closed else keeper


def watch(model: nn.Module) -> None:
    """State dicts of the model and of its modules read and write through, and copies of it are refused."""
    for module in model.modules():
        if not any(isinstance(hook, _Shown) for hook in module._state_dict_hooks.values()):
            module.register_state_dict_post_hook(_Shown(module))
            module.register_load_state_dict_pre_hook(_load)


def watch_callers(parameters: Iterable[Tensor]) -> None:
    """`watch` the models of `parameters` among those whose call is running, and what else their callers hold."""
    wanted, seen = {id(parameter) for parameter in parameters}, set()
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals
        values = list(found.values())
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(found) is dict:
            found.clear()  # a copy that Python up to 3.12 keeps with the frame, and with it all that was in it
        for value in values:
            if isinstance(value, nn.Module) and id(value) not in seen:
                seen.add(id(value))
                if any(id(parameter) in wanted for parameter in value.parameters()):
                    watch(value)
        frame = frame.f_back  # type: ignore[assignment]


# Values ---------------------------------------------------------------------------------------------------------------


def _read(parameter: Tensor, *, master: bool = False) -> Tensor:
    keeper = keeper_of(parameter)
    if keeper is not None:
        return keeper.read(parameter, master=master)
    values = contents_of(parameter)
    return values if master else values.to(parameter.dtype)


def _write(parameter: Tensor, values: Tensor) -> None:
    keeper = keeper_of(parameter)
    if keeper is not None:
        keeper.write(parameter, values)
        return
    own = contents_of(parameter)
    if own.data_ptr() != values.data_ptr():
        with torch.no_grad():
            own.copy_(values)


def _leave(parameter: Tensor, dtype: torch.dtype) -> None:
    release(parameter, dtype)
    _inside.pop(parameter, None)


# Calls ----------------------------------------------------------------------------------------------------------------


@contextmanager
def _plain_calls(model: nn.Module) -> Iterator[None]:
    """Calls of the model, and of compiled modules in it, run as they are, and not as a step."""
    compiled = [each for each in model.modules() if each is model or each._compiled_call_impl is not None]
    before = {each: each.__dict__.get("_compiled_call_impl") for each in compiled}
    for module in compiled:  # past the __setattr__ of what torch.compile returns, which is its model's
        module.__dict__["_compiled_call_impl"] = _evaluation(module)
    try:
        yield
    finally:
        for module, call in before.items():
            module.__dict__["_compiled_call_impl"] = call


def _evaluation(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            raise StepOrderError(
                "inside gs_compile.materialize() the model cannot be trained, only evaluated: call it under "
                "torch.no_grad(), or leave the block"
            )
        inner = getattr(module, "_orig_mod", module)  # of what torch.compile returned
        return inner._call_impl(*args, **kwargs)

    return call


# State dicts ----------------------------------------------------------------------------------------------------------


class _Shown:
    """A state dict hook that gives values for placeholders. It is copied with its module, or rather: it refuses."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = weakref.ref(module) if module is not None else None

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and is_released(parameter) and prefix + name in state_dict:
                state_dict[prefix + name] = _shown(parameter)

    def __deepcopy__(self, memo: Any) -> _Shown:
        self._refuse_copies()
        return _Shown()

    def __reduce__(self) -> Any:
        self._refuse_copies()
        return _Shown, ()

    def _refuse_copies(self) -> None:
        module = self._module() if self._module is not None else None
        if module is not None and any(is_released(parameter) for parameter in module.parameters()):
            _refuse_copy()


def _refuse_copy() -> NoReturn:
    raise ReleasedParameterError(
        "this model cannot be copied or pickled: its parameters live on the tiers. Take its state_dict(), or copy it "
        "inside `with gs_compile.materialize(model):`"
    )


_last_shown: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter -> weak reference to values, and of when


def _shown(parameter: Tensor) -> Tensor:
    """Its values for a state dict: the same tensor again while it is in use and true, so that tied ones stay tied."""
    keeper = keeper_of(parameter)
    if keeper is None:
        return _read(parameter)
    known, age, version = _last_shown.get(parameter, (lambda: None, -1, -1))
    values: Tensor | None = known()
    if values is None or age != keeper.age or version != values._version:
        values = keeper.read(parameter)
        _last_shown[parameter] = weakref.ref(values), keeper.age, values._version
    return values


def _load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """What is to be loaded goes where it belongs; torch then copies the parameter to itself, which does nothing."""
    for name, parameter in module._parameters.items():
        given = state_dict.get(prefix + name)
        if parameter is None or not is_released(parameter) or not isinstance(given, Tensor) or given is parameter:
            continue
        if given.shape == parameter.shape and not given.is_meta:
            _write(parameter, given.detach())
            state_dict[prefix + name] = parameter
