"""dynamo: from Dynamo's trace of a model to one graph whose batch dimension is free.

`frame_settings` makes the batch dimension symbolic. If a trace cannot be used, the backend raises the exception by
which it may ask Dynamo to trace the frame again.

This file relies on internals of Dynamo; each has a test in ``tests/capture/test_capture.py``.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from traceback import walk_stack
from types import CodeType
from typing import Any

import sympy
import torch
from torch import fx

from gs_compile.capture.adapters import trace_libraries
from gs_compile.capture.clamped import check_clamps
from gs_compile.capture.floats import as_tensors
from gs_compile.capture.graph import Captured, Input, Role, output_values
from gs_compile.errors import CaptureError, MixedDeviceError, NoBatchInputError, VersionError

OLDEST_TORCH = (2, 11)


def check_torch(version: str = torch.__version__) -> None:
    """Raise `VersionError` if torch is older than this package supports."""
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        raise VersionError(f"torch {version} is too old: greedysnake needs torch >= {wanted}; pip install -U torch")


check_torch()

try:
    from torch._dynamo.convert_frame import compile_lock as compile_lock  # held while a frame is compiled
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.exc import SkipFrame as SkipFrame  # makes Dynamo run a frame uncompiled
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis
    from torch._dynamo.exc import TorchDynamoException as TorchDynamoException  # for callers of a capture
    from torch._dynamo.exc import Unsupported as Unsupported
    from torch._dynamo.guards import DeletedGuardManagerWrapper, GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, GlobalSource, LocalSource
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.utils import orig_code_map
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting, VariableTracker
    from torch._guards import CompileContext

    from gs_compile.capture.exchange import leave_out_alone
    from gs_compile.capture.frame_settings import (
        batch_dims,
        enter_settings,
        free,
        guessed,
        has_batch,
        is_freed,
        is_ours,
        modules_in,
    )
    from gs_compile.capture.graph_breaks import graph_break_of
    from gs_compile.capture.operations import place_first
    from gs_compile.capture.tracing import READ_LATER
    from gs_compile.capture.vmapped import broadcast
except ImportError as error:  # a release of torch has moved one of these
    raise VersionError(
        f"torch {torch.__version__} moved an interface that greedysnake's capture needs ({error}); install "
        "torch==2.13.0, or a newer greedysnake"
    ) from error


_TIED = (
    "the model's code needs the batch size to be that of another dimension of the inputs, so the batch cannot be cut "
    "into micro-batches: change the code that makes them equal"
)
_HOOKS_ON_ALL = tuple(f"_global_{each}_hooks" for each in ("forward_pre", "forward", "backward_pre", "backward"))

current_compile_id = CompileContext.current_compile_id  # of the frame that Dynamo compiles now


class _TraceAgain(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
    """The first base passes through Dynamo's backend call; the second makes Dynamo forget earlier graph breaks."""


def capture(
    module: fx.GraphModule, example_inputs: Sequence[Any], detach: Callable[[Sequence[Any]], bool] = lambda _: False
) -> Captured:
    """The captured graph with its inputs named and its batch dimension free.

    `detach` gets the parameters of a usable graph, and returns whether it changed what the graph computes with; if so,
    Dynamo traces again.

    Raises an exception of Dynamo's if the frame must be traced again, and `CaptureError` (graph break, no batch input,
    inputs on several devices) if the graph cannot be used.
    """
    broadcast(module)
    leave_out_alone(module)
    place_first(module.graph)
    nodes = module.graph.find_nodes(op="placeholder")
    inputs = [_input(node, example) for node, example in zip(nodes, example_inputs, strict=True)]
    check_clamps(module, {node for node, entry in zip(nodes, inputs, strict=True) if entry.role == "parameter"})
    _refuse_graph_break(module)
    _refuse_mixed_devices(inputs, example_inputs)
    dims = _batch_dims(inputs, nodes)
    shapes = {node: _example(node).shape for node in nodes if isinstance(_example(node), torch.Tensor)}
    symbols, others = _own_and_others(shapes, dims)
    is_another = detach([each for entry, each in zip(inputs, example_inputs, strict=True) if entry.role == "parameter"])
    complete_guards()
    sources = {_source(node): dim for node, dim in dims.items()}
    if not is_freed(sources, map(_source, nodes)):
        fixed = not symbols and any(int(shapes[node][dim]) > 1 for node, dim in dims.items())
        if fixed or symbols & others or _has_float_symbols(module):
            free(sources)
            raise _TraceAgain(restart_reason="greedysnake: symbolic batch dimension")
    if is_another:
        raise _TraceAgain(restart_reason="greedysnake: parameters have another dtype on the tiers")
    dims, symbols = _shown(shapes, dims)
    where = "" if symbols else _fixed_at(dims, next(int(shapes[node][dim]) for node, dim in dims.items()))
    pairs = zip(inputs, nodes, strict=True)
    inputs = [replace(e, role="batch", dim=dims[node]) if node in dims else e for e, node in pairs]
    inputs = list(_named(inputs, example_inputs, models := _models()))
    as_tensors(module)
    devices = {example.device.type for example in example_inputs if isinstance(example, torch.Tensor)}
    autocast = next(filter(None, map(_autocast, sorted(devices))), None)
    root, stored = _root(inputs, nodes), _stored(module)
    return Captured(module, tuple(inputs), frozenset(symbols), autocast, models, where, root, stored)


def _fixed_at(batch: Mapping[fx.Node, int], size: int) -> str:
    """The user's line at which the batch size became a number, as `` (file:line in function: text)``; or empty.

    torch removes the prefix that a file's path shares with its own; if that is only a slash, also one letter more.
    """
    if current_compile_id() is None:
        return ""
    output = InstructionTranslator.current_tx().output
    found = output.shape_env
    symbols = filter(None, (found.source_to_var.get(f"{_source(node)}.size()[{dim}]") for node, dim in batch.items()))
    twice = dict.fromkeys(symbols, 2 * size)
    for guard in found.guards:
        is_of_size = isinstance(guard.expr, sympy.Eq) and guard.expr.free_symbols <= twice.keys()
        if is_of_size and guard.expr.subs(twice) == sympy.false and guard.sloc.maybe_user_loc:
            text, _, place = guard.sloc.maybe_user_loc.rpartition("  # ")
            file, _, line = place.partition(":")
            traced = (code.co_filename for code in output.tracing_context.traced_code)
            return f" ({next((each for each in traced if each.endswith(file)), file)}:{line}: {text})"
    return ""


def _stored(module: fx.GraphModule) -> frozenset[int]:
    """The indices of outputs that the forward stores in objects that existed before it, as in ``self.cache = x``, that
    it logs, or whose numbers it reads.
    """
    if current_compile_id() is None:
        return frozenset()
    output, found = InstructionTranslator.current_tx().output, set[str]()
    effects = output.side_effects

    def note(variable: VariableTracker) -> None:
        # isinstance would realize a variable that the forward has not read, which the finished graph has no input for
        if variable.is_realized() and isinstance(variable, TensorVariable):
            found.add(variable.as_proxy().node.name)

    for holder in effects.id_to_variable.values():
        is_of_user = isinstance(holder.mutation_type, (AttributeMutationExisting, ValueMutationExisting))
        if is_of_user and effects.is_modified(holder):
            VariableTracker.visit(note, [holder, effects.store_attr_mutations.get(holder, {})])
    VariableTracker.visit(note, output.root_tx.debug_locals)
    nodes = ((number, each) for number, each in enumerate(output_values(module)) if isinstance(each, fx.Node))
    return frozenset(number for number, node in nodes if node.name in found or READ_LATER in node.meta)


def _models() -> dict[str, weakref.ref[torch.nn.Module]]:
    """The models among the locals of the frame that Dynamo traces, by the prefix of their parameters' paths."""
    if current_compile_id() is None:
        return {}
    found = modules_in(InstructionTranslator.current_tx().output.root_tx.f_locals)
    return {"" if name == "self" else f"{name}.": weakref.ref(each) for name, each in found.items()}


def _named(
    inputs: Iterable[Input], examples: Sequence[Any], models: Mapping[str, weakref.ref[torch.nn.Module]]
) -> Iterator[Input]:
    """The inputs, with parameters and buffers under the names that their model has for them.

    Dynamo may know them by another path, for example if Accelerate or TRL have replaced the forward. Commits are
    compared with the model by names.
    """
    found = [(start, model) for start, each in models.items() if (model := each()) is not None]
    names = {
        f"{start}{name}": tensor
        for start, model in found
        for own in (model.named_parameters, model.named_buffers)
        for name, tensor in own(remove_duplicate=False)
    }
    name_of = {id(tensor): name for name, tensor in reversed(names.items())}
    for entry, example in zip(inputs, examples, strict=True):
        is_own = entry.role not in _OF_A_MODEL or entry.path in names
        yield entry if is_own else replace(entry, path=name_of.get(id(example), entry.path))


def is_foreign() -> bool:
    """Whether what Dynamo traces now is for another backend."""
    if current_compile_id() is None:
        return False
    return not is_ours(InstructionTranslator.current_tx().output.compiler_fn)


def complete_guards() -> None:
    """Add guards that Dynamo omits: on hooks of all modules, on the code of their methods, and on strides.

    A notebook may replace the code of a method. The strides are those that parameters have in memory now, if Dynamo
    has traced them with others. Called by a backend.
    """
    if current_compile_id() is None:
        return
    traced = InstructionTranslator.current_tx()
    modules, output = traced.import_source("torch.nn.modules.module"), traced.output
    for hooks in _HOOKS_ON_ALL:
        install_guard(AttrSource(modules, hooks).make_guard(GuardBuilder.DICT_KEYS_MATCH))
    for kind, name in _methods(output):
        method = AttrSource(GlobalSource(output.install_global_by_id("__greedysnake", kind)), name)
        install_guard(AttrSource(method, "__code__").make_guard(GuardBuilder.ID_MATCH))
    for tensor, context in output.tracing_context.tensor_to_context.items():
        source: Any = getattr(context, "tensor_source", None)
        found = output.input_source_to_sizes_strides.get(source)
        if found is not None and isinstance(tensor, torch.nn.Parameter) and tensor.layout == torch.strided:
            found["stride"] = torch._C.TensorBase.stride(tensor)


def _methods(output: Any) -> set[tuple[type, str]]:
    """The methods of the models' modules that Dynamo has traced, by class and name, and those that they override."""
    traced = set(output.tracing_context.traced_code)
    models = modules_in(output.root_tx.f_locals).values()
    kinds = {type(each) for model in models for each in model.modules()}
    found = ((kind, base, *each) for kind in kinds for base in kind.__mro__ for each in vars(base).items())
    named = {(kind, base, name) for kind, base, name, method in found if getattr(method, "__code__", None) in traced}
    return {(each, name) for *both, name in named for each in both if hasattr(getattr(each, name), "__code__")}


def guard_model(parameters: Iterable[torch.Tensor]) -> None:
    """Make Dynamo use this code only for the model that it now traces, and no longer count it once that model is gone.

    For a model whose parameters are on the tiers: no other model can run its code, as a new one has its parameters in
    memory at its first call. Otherwise the ninth model of a class in one process would exceed Dynamo's limit. Called by
    a backend.
    """
    if current_compile_id() is None:
        return
    traced, frame = set(parameters), InstructionTranslator.current_tx().output.root_tx
    for name, value in frame.f_locals.items():
        if isinstance(value, torch.nn.Module) and not traced.isdisjoint(value.parameters()):
            ended = weakref.finalize(value, _pass_over_ended, frame.f_code)  # called after Dynamo's
            ended.atexit = False
            install_guard(LocalSource(name).make_guard(GuardBuilder.ID_MATCH))


def forget_code() -> None:
    """Make Dynamo drop its code that is running now, so that its limit no longer counts it; this call will be refused.

    Also the code that calls it: if Dynamo has broken a forward, its first part calls the rest.
    """
    for frame, _ in walk_stack(sys._getframe()):
        if (function := orig_code_map.get(frame.f_code)) is not None:
            for entry in _debug_get_cache_entry_list(function):
                if entry.code is frame.f_code and (state := entry.guard_manager.extra_state) is not None:
                    state.invalidate(entry, DeletedGuardManagerWrapper("its call was refused"))
            _pass_over_ended(function)


def _pass_over_ended(code: CodeType) -> None:
    """Make Dynamo's limit skip the codes of models that are gone, as it does with those of other models."""
    for entry in _debug_get_cache_entry_list(code):
        if isinstance(entry.guard_manager, DeletedGuardManagerWrapper):
            entry.guard_manager.id_matched_objs = {"self": weakref.ref(_pass_over_ended)}  # no model


def _autocast(device_type: str) -> tuple[Any, ...] | None:
    """The autocast region around the model's call; Dynamo guards on it, so it is the same in every call."""
    if not torch.amp.autocast_mode.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return (device_type, torch.get_autocast_dtype(device_type), True, torch.is_autocast_cache_enabled())


# Placeholders ---------------------------------------------------------------------------------------------------------


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _source(node: fx.Node) -> str:
    try:
        name = node.meta["grapharg"].source.name
    except (KeyError, AttributeError) as error:
        raise VersionError(
            f"torch {torch.__version__} does not name the source of graph input {node.name} where greedysnake looks "
            "for it; install torch==2.13.0, or a newer greedysnake"
        ) from error
    return str(name() if callable(name) else name)


def _input(node: fx.Node, example: Any) -> Input:
    source = _source(node)
    role: Role
    if not isinstance(_example(node), torch.Tensor):
        role = "size"
    elif isinstance(example, torch.nn.Parameter) or "._parameters[" in source:
        role = "parameter"
    elif "._buffers[" in source:
        role = "buffer"
    else:
        role = "constant"
    return Input(node.name, role, _path(source))


def _root(inputs: Sequence[Input], nodes: Sequence[fx.Node]) -> str:
    """The common prefix of the paths to all parameters and buffers, which leads to the model; empty: there are several.

    A function reaches the model by a name, or through an argument; neither is part of the model's own names.
    """
    own = [(each.path, _source(node)) for each, node in zip(inputs, nodes, strict=True) if each.role in _OF_A_MODEL]
    roots = {_path(re.split(_OF_MODULES, source, maxsplit=1)[0]) for _, source in own} - {"L['self']"}
    root = f"{roots.pop()}." if len(roots) == 1 else ""
    return root if all(path.startswith(root) for path, _ in own) else ""


_OF_A_MODEL = ("parameter", "buffer")
_OF_MODULES = r"\.(?:__dict__\[')?_(?:modules|parameters|buffers)(?:'\])?\['([^']*)'\]"


def _path(source: str) -> str:
    """``L['self']._modules['h']._modules['0']._parameters['weight']`` as ``h.0.weight``."""
    path = re.sub(_OF_MODULES, r".\1", source)
    path = re.sub(r"^L\['(?:self|kwargs|args)'\]", "", path)
    path = re.sub(r"\['([^']*)'\]", r".\1", re.sub(r"^L\['([^']*)'\]", r"\1", path))
    return path.removeprefix(".") or source


def _batch_dims(inputs: Sequence[Input], nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The placeholders that may have the samples, and along which dimension: `batch_dims` of what the user passed.

    The graph has its inputs in the order in which they are read, which may begin with a table of positions. So the
    inputs that `guessed` found in the order of the call come first, unless the trace has shown that they have a fixed
    size.
    """
    tensors = [node for node, entry in zip(nodes, inputs, strict=True) if entry.role == "constant"]
    passed = [node for node in tensors if _example(node).dim() > 0 and _is_passed_by_user(_source(node))]
    if not passed:
        found = ", ".join(f"{e.path} ({e.role})" for e in inputs if e.role not in ("parameter", "size")) or "none"
        raise NoBatchInputError(
            f"the model was called without a tensor that has a batch dimension (inputs found: {found}); pass tensors "
            "with the batch along dimension 0, such as input_ids of shape (batch, tokens)"
        )
    known = guessed()
    passed.sort(key=lambda node: not _may_grow(_example(node).shape, known.get(_source(node))))
    pairs = zip(passed, batch_dims(list(map(_example, passed))), strict=True)
    return {node: dim for node, dim in pairs if dim is not None}


def _may_grow(shape: Sequence[Any], dim: int | None) -> bool:
    return dim is not None and (bool(_symbols([shape[dim]])) or shape[dim] == 1)


def _own_and_others(
    shapes: Mapping[fx.Node, Sequence[Any]], dims: Mapping[fx.Node, int]
) -> tuple[set[sympy.Symbol], set[sympy.Symbol]]:
    """The symbols of the dimensions with samples, and those of all others but the first of inputs without samples."""
    own = _symbols(shapes[node][dim] for node, dim in dims.items())
    sizes = ((dim == dims.get(node, 0), size) for node, shape in shapes.items() for dim, size in enumerate(shape))
    return own, _symbols(size for is_first, size in sizes if not is_first)


def _shown(
    shapes: Mapping[fx.Node, Sequence[Any]], dims: Mapping[fx.Node, int]
) -> tuple[dict[fx.Node, int], set[sympy.Symbol]]:
    """The inputs with samples, and the symbols of the batch size, as the trace has shown them; none: it is fixed.

    The trace shows which sizes were equal to the batch's only by coincidence: they are fixed, or have another symbol.
    """
    first = _symbols(shapes[node][0] for node, dim in dims.items() if dim == 0)
    dims = {node: dim for node, dim in dims.items() if dim == 0 or _symbols([shapes[node][dim]]) & first}
    symbols, others = _own_and_others(shapes, dims)
    are_fixed = (has_batch(_example(node))[0] and not _symbols([shapes[node][dim]]) for node, dim in dims.items())
    if not symbols or any(are_fixed):  # an input with a row for each sample has a fixed size
        return dims, set()
    if not (symbols := symbols - others):
        raise CaptureError(_TIED)
    return {node: dim for node, dim in dims.items() if _symbols([shapes[node][dim]]) & symbols}, symbols


def _is_passed_by_user(source: str) -> bool:
    return source.startswith("L[") and "._modules[" not in source and not source.startswith("L['self'].")


def _symbols(sizes: Iterable[Any]) -> set[sympy.Symbol]:
    return set().union(*(size.node.expr.free_symbols for size in sizes if isinstance(size, torch.SymInt)))


def _has_float_symbols(module: fx.GraphModule) -> bool:
    """Whether Python floats, such as epsilons, are graph inputs, as with ``dynamic=True``."""
    return any(isinstance(_example(node), torch.SymFloat) for node in module.graph.nodes)


# Refusals -------------------------------------------------------------------------------------------------------------


def _refuse_graph_break(module: fx.GraphModule) -> None:
    found = getattr(module, "compile_subgraph_reason", None)
    if found is not None and found.graph_break and (trace_libraries() or enter_settings()):
        raise _TraceAgain(restart_reason="greedysnake: a call that can be passed over, or traced otherwise")
    if (broken := graph_break_of(module)) is not None:
        raise broken


def _refuse_mixed_devices(inputs: Sequence[Input], examples: Sequence[Any]) -> None:
    first: dict[torch.device, str] = {}
    for entry, example in zip(inputs, examples, strict=True):
        if isinstance(example, torch.Tensor) and (example.dim() > 0 or entry.role == "parameter"):
            first.setdefault(example.device, entry.path)
    if len(first) > 1:
        found = ", ".join(f"{path} on {device}" for device, path in first.items())
        raise MixedDeviceError(f"inputs and parameters are on several devices: {found}; move all of them to one device")
