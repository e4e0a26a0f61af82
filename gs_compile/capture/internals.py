"""internals: the undocumented parts of torch that this package uses, except Dynamo's, each under one name."""

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
_FABRIC = ("lightning_fabric.wrappers", "lightning.fabric.wrappers")  # installed alone, or as a part
_UNTRACED = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")  # frames of the wrapper of `untraced`


def untraced(function: F) -> F:
    """`function`, wrapped so that Dynamo does not trace it."""
    return cast(F, torch._disable_dynamo(function))


def copy_of(function: FunctionType) -> FunctionType:
    """A copy of a function with its own code object: what Dynamo stores for the original, or substitutes for it, does
    not apply to the copy.
    """
    facts = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copied = FunctionType(function.__code__.replace(), *facts)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def without_overrides() -> AbstractContextManager[Any]:
    """In the block, no code of a tensor's class runs. It would be slow: a step queries each parameter several times."""
    return torch._C.DisableTorchFunctionSubclass()


@contextmanager
def without_modes() -> Iterator[None]:
    """In the block, no mode of the user is active, such as `torch.set_default_device`: new memory is on the host."""
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


@contextmanager
def without_packing() -> Iterator[None]:
    """In the block, no hook of the user packs what autograd saves (`torch.autograd.graph.saved_tensors_hooks`): a step
    saves inputs of layers in its own way, and layers are differentiated on tensors without values.
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
    """Replace the compiled call that `module.compile()` has made by `wrapper` of it."""
    assert module._compiled_call_impl is not None
    module._compiled_call_impl = wrapper(module._compiled_call_impl)


def compiled_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What a call of the module runs in place of its forward."""
    return module._compiled_call_impl


def changes(tensor: torch.Tensor) -> int:
    """How often the tensor was changed in place; 0 for an inference tensor, which has no counter."""
    return 0 if tensor.is_inference() else tensor._version


def has_scheduler(step: Callable[..., Any]) -> bool:
    """Whether there is a torch scheduler for the optimizer whose method `step` is."""
    return hasattr(step, "_wrapped_by_lr_sched")


def num_holders(tensor: torch.Tensor) -> int:
    """How many tensors share this one's memory, itself among them."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # `storage` holds it, too


def makes_state_dict() -> bool:
    """Whether a module's state dict is being made; called one call below a parameter's __torch_function__."""
    return _caller(4).f_code is torch.nn.Module._save_to_state_dict.__code__


def makes_replicas() -> bool:
    """Whether a DistributedDataParallel is being made, which sends all values to all ranks; called two calls below a
    parameter's __torch_function__.
    """
    found = getattr(torch.distributed, "utils", None)
    return found is not None and _caller(5).f_code is found._sync_module_states.__code__


def converts_module() -> bool:
    """Whether a module is being moved or cast; called two calls below a parameter's __torch_function__."""
    caller = _caller(5)  # the function passed to `_apply`; or `_apply`, if that function is in C
    return torch.nn.Module._apply.__code__ in (caller.f_code, caller.f_back and caller.f_back.f_code)


def _caller(depth: int) -> FrameType:
    """The frame that called a function on a parameter; depth: of the calls from there to here."""
    frame = sys._getframe(depth)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_UNTRACED):
        frame = frame.f_back
    return frame


def backward_hooks(holder: torch.Tensor | torch.nn.Module) -> list[Any]:
    """The hooks that the user has registered on a tensor's gradients, or on a module's backward."""
    names = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    return [hook for name in names for hook in (getattr(holder, name, None) or {}).values()]


def watches_gradient(tensor: torch.Tensor | None) -> bool:
    """Whether code of the user sees the gradient of a tensor, if the tensor still exists.

    Lightning's Fabric hooks all results of a model, to learn who calls the backward; it does not look at gradients.
    """
    if tensor is None:
        return False
    functions = [getattr(hook, "func", hook) for hook in backward_hooks(tensor)]
    return tensor.retains_grad or any(getattr(each, "__module__", None) not in _FABRIC for each in functions)


def wants_all(node: Any) -> bool:
    """Whether the running backward, which has reached this autograd node, needs the gradients of all its inputs."""
    return all(comes_to(each) for each, _ in node.next_functions if each is not None)


def comes_to(node: Any) -> bool:
    """Whether the running backward has reached, or will reach, an autograd node."""
    return bool(torch._C._will_engine_execute_node(node))


def add_artifact(name: str, content: Callable[[], str], compile_id: object) -> None:
    """Add a text to torch's structured trace, if one is written."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=content,
        compile_id=compile_id,  # type: ignore[arg-type]
    )
