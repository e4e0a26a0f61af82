"""internals: what this package uses of torch beside its documented interface and beside Dynamo, each under one name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, FunctionType
from typing import Any, TypeVar, cast

import torch
from torch._logging import trace_structured
from torch.overrides import _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

F = TypeVar("F", bound=Callable[..., Any])
_FABRIC = ("lightning_fabric.wrappers", "lightning.fabric.wrappers")  # as it is installed alone, or with the rest
_UNTRACED = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")  # frames of what `untraced` puts around a function


def untraced(function: F) -> F:
    """`function`, which Dynamo passes over."""
    return cast(F, torch._disable_dynamo(function))


def copy_of(function: FunctionType) -> FunctionType:
    """A function that does the same, with code of its own: what Dynamo keeps of the other, or has in its place, is none
    of this one's.
    """
    facts = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copied = FunctionType(function.__code__.replace(), *facts)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def without_overrides() -> AbstractContextManager[Any]:
    """In the block no code of a tensor's class runs, which takes long: a step asks each parameter several times."""
    return torch._C.DisableTorchFunctionSubclass()


@contextmanager
def without_modes() -> Iterator[None]:
    """In the block no mode of the user's sees calls, as that of `torch.set_default_device`: they make host memory."""
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


@contextmanager
def without_packing() -> Iterator[None]:
    """In the block no hook of the user's packs what autograd saves (`torch.autograd.graph.saved_tensors_hooks`): a step
    saves inputs of layers its own way, and layers are differentiated with tensors that have no values.
    """
    autograd: Any = torch._C._autograd
    hooks = list[Any]()
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        autograd._pop_saved_tensors_default_hooks()
        hooks.append(top)
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def wrap_compiled_call(module: torch.nn.Module, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrapper(call)` in the place of what `module.compile()` has made of the module's call."""
    assert module._compiled_call_impl is not None
    module._compiled_call_impl = wrapper(module._compiled_call_impl)


def changes(tensor: torch.Tensor) -> int:
    """How often the tensor was changed in place; of one that inference has made nobody counts it."""
    return 0 if tensor.is_inference() else tensor._version


def has_scheduler(step: Callable[..., Any]) -> bool:
    """Whether a scheduler of torch's has been made for the optimizer whose method `step` is."""
    return hasattr(step, "_wrapped_by_lr_sched")


def num_holders(tensor: torch.Tensor) -> int:
    """How many tensors have the memory that this one has."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # `storage` holds it, too


def makes_state_dict() -> bool:
    """Whether a parameter's __torch_function__, by a function of its own, asks this for a module's state dict."""
    return _caller(4).f_code is torch.nn.Module._save_to_state_dict.__code__


def makes_replicas() -> bool:
    """Whether DistributedDataParallel, by two functions, asks this as it is made: it sends all values to all ranks."""
    found = getattr(torch.distributed, "utils", None)
    return found is not None and _caller(5).f_code is found._sync_module_states.__code__


def converts_module() -> bool:
    """Whether a parameter's __torch_function__, by two functions of its own, asks this as a module is sent or cast."""
    caller = _caller(5)  # the function that is given to `_apply`, or that itself, which is given one of C's
    return torch.nn.Module._apply.__code__ in (caller.f_code, caller.f_back and caller.f_back.f_code)


def _caller(depth: int) -> FrameType:
    """The frame that has called a function on a parameter, whose __torch_function__ is so many calls below."""
    frame = sys._getframe(depth)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_UNTRACED):
        frame = frame.f_back
    return frame


def backward_hooks(holder: torch.Tensor | torch.nn.Module) -> list[Any]:
    """What the user has registered to be called with gradients of a tensor, or in the backward of a module."""
    names = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    return [hook for name in names for hook in (getattr(holder, name, None) or {}).values()]


def watches_gradient(tensor: torch.Tensor | None) -> bool:
    """Whether something of the user's sees the gradient of a tensor, if it is still there.

    Lightning's Fabric hooks all that a model returns, to learn who has called the backward, and looks at no gradient.
    """
    if tensor is None:
        return False
    functions = [getattr(hook, "func", hook) for hook in backward_hooks(tensor)]
    return tensor.retains_grad or any(getattr(each, "__module__", None) not in _FABRIC for each in functions)


def wants_all(node: Any) -> bool:
    """Whether the backward under way, which has come to this autograd node, has all its inputs' gradients taken up."""
    return all(comes_to(each) for each, _ in node.next_functions if each is not None)


def comes_to(node: Any) -> bool:
    """Whether the backward under way has come, or will come, to an autograd node."""
    return bool(torch._C._will_engine_execute_node(node))


def add_artifact(name: str, content: Callable[[], str], compile_id: object) -> None:
    """Add a text to torch's structured trace, if one is written."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=content,
        compile_id=compile_id,  # type: ignore[arg-type]
    )
