"""frame_settings: the settings under which Dynamo compiles a frame for this backend.

By default Dynamo traces a frame with static shapes first. To run micro-batches of any size from one capture, the
dimension of the samples must be symbolic in every batch input; usually it is dimension 0. So when Dynamo begins to
compile a frame for this backend, those of the frame's arguments that look like the batch are named in
``torch.compiler.config.dynamic_sources``, and one trace is enough. If the trace shows that an input of the batch was
missed, for example inside an object, or that a named one is not of the batch, Dynamo is asked for another trace.
Tensors whose size depends on values are captured. `tracing` has further changes of what Dynamo does.

The settings are global, so they are restored when Dynamo's compile of the frame ends, also after an error. This file
relies on internals of Dynamo; each has a test in ``tests/capture/test_capture.py``, or, for a model in a
DistributedDataParallel, in ``tests/ranks/test_in_memory.py``.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from traceback import walk_stack
from types import CodeType
from typing import Any

import torch
from torch._dynamo import callback_handler as callback_handler
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.callback import CallbackArgs, CallbackTrigger
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.variables import builder as dynamo_builder
from torch.fx.experimental import _config

from gs_compile.capture import toolchain, tracing
from gs_compile.capture.adapters import trace_libraries
from gs_compile.capture.graph import hint
from gs_compile.errors import CaptureError, GreedySnakeError
from gs_compile.options import Options
from gs_compile.progress import stage

compiler_config: Any = torch.compiler.config
symbolic_config: Any = _config
_LOGGING = "transformers.utils.logging"  # some heads log a warning as they run, where a config has no `loss_type`


def set_from_the_start() -> None:
    """Make frames that Dynamo compiles for this backend have their settings from the first trace on."""
    if _begin not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_begin)


def is_freed(batch: Mapping[str, int], sources: Iterable[str]) -> bool:
    """Whether in this trace these dimensions of `batch` were symbolic, and none of the other `sources`."""
    current, known = _current(), {*sources}
    return current is not None and {each: dim for each, dim in current.sources.items() if each in known} == batch


def free(batch: Mapping[str, int]) -> None:
    """Make the next trace of this frame treat a dimension of each of these sources as symbolic."""
    (_current() or _Settings()).name(batch)


def guessed() -> Mapping[str, int]:
    """The sources that looked like the batch before the first trace, in the order of the call, with dimensions."""
    return current.guessed if (current := _current()) is not None else {}


def enter_settings() -> bool:
    """Make this frame be traced under its settings; returns whether it was not, as if Dynamo has lost its callbacks."""
    if _current() is not None:
        return False
    _keep_whole(compiled_frame()["compiler_fn"])
    return bool(_Settings())


def undo_if_it_fails(undo: Callable[[], None]) -> None:
    """Call `undo` if Dynamo's compile of this frame ends with an error, such as an interrupt by the user."""
    if (current := _current()) is not None:
        current.undone.append(undo)


def compiled_frame(*names: str) -> Mapping[str, Any]:
    """Locals of Dynamo's compile of a frame, which is among the callers: its backend, the frame's values, `names`."""
    found = (dict(frame.f_locals) for frame, _ in walk_stack(sys._getframe()))  # no view, as from 3.13 on
    return next(known for known in found if {"compiler_fn", "locals", *names} <= known.keys())


def modules_in(values: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    """The modules among the values of a frame, by name."""
    own = dict(values)
    if isinstance(args := own.get("args"), tuple):  # in a decorator of the forward, such as autocast
        own.setdefault("self", next(iter(args), None))
    return {name: each for name, each in own.items() if isinstance(each, torch.nn.Module)}


def is_ours(backend: Any) -> bool:
    """Whether a backend, as Dynamo has wrapped it, is this package's."""
    return str(getattr(_function(backend), "__module__", "")).startswith("gs_compile.")


class Refused(ShortenTraceback):
    """Carries an error of this package through Dynamo's compile of a frame; Dynamo then stores nothing for it."""

    def __init__(self, error: GreedySnakeError) -> None:
        super().__init__(str(error), first_useful_frame=None)
        self.error = error

    def remove_dynamo_frames(self) -> GreedySnakeError:  # type: ignore[override]
        """The error that Dynamo raises to the user."""
        return self.error.with_traceback(None)


def _function(backend: Any) -> Any:
    """The function that a backend calls, without its options."""
    backend = _unwrapped(backend)
    return getattr(backend, "compiler_fn", backend)


def _unwrapped(backend: Any) -> Any:
    while True:
        if hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        elif (splits := _in_ddp(backend)) is not None:
            backend = splits.backend_compile_fn
        else:
            return backend


def _in_ddp(backend: Any) -> DDPOptimizer | None:
    """Dynamo's wrapper around the backend of a model in a DistributedDataParallel, which cuts graphs into buckets."""
    owner = getattr(backend, "__self__", None)
    return owner if isinstance(owner, DDPOptimizer) else None


def _keep_whole(backend: Any) -> None:
    """Make that wrapper cut no graph: a step needs the whole."""
    if (splits := _in_ddp(backend)) is not None:
        splits.first_bucket_cap = splits.bucket_bytes_cap = sys.maxsize


def _begin(begun: CallbackArgs) -> None:
    """Called when Dynamo begins to compile a frame, or another backend a backward."""
    if begun.callback_trigger is not CallbackTrigger.DYNAMO:
        return
    compiled = compiled_frame()
    if is_ours(compiled["compiler_fn"]):
        options = _checked(compiled["compiler_fn"])
        trace_libraries()  # also for those imported since the last frame
        _keep_whole(compiled["compiler_fn"])
        given = dict(_tensors("L", {name: each for name, each in compiled["locals"].items() if name != "self"}))
        _refuse_nested(given)
        named = zip(given, batch_dims(list(given.values())), strict=True)
        dims = {source: dim for source, dim in named if dim is not None}
        free({source: dim for source, dim in dims.items() if given[source].shape[dim] > 1})
        settings = _current()
        assert settings is not None
        settings.guessed = dims
        for name in _changed_numbers(compiled["code"], compiled["locals"]):
            settings.has_symbol(name)
        if given and options is not None:
            toolchain.ask_for(of_batch(list(given.values())).device, options)


def _changed_numbers(code: CodeType, values: Mapping[str, Any]) -> Iterator[str]:
    """The sources of integers that have changed since a model was traced, such as an epoch that a script counts. In
    this trace they become symbols, like those that a forward changes itself (`tracing`).

    Only if the earlier codes are all of one model, which is on the tiers: another model's numbers differ anyway.
    """
    for entry in _debug_get_cache_entry_list(code):
        manager: Any = entry.guard_manager
        known = getattr(manager, "id_matched_objs", {})
        if known and all(values.get(name) is each() for name, each in known.items()):
            for guard in manager.check_verbose(values).verbose_code_parts:
                if (found := re.match(r"([LG]\[[^()=]*) == -?\d+\b", guard)) is not None:
                    yield found[1]


def _refuse_nested(given: Mapping[str, torch.Tensor]) -> None:
    if nested := [source for source, each in given.items() if each.is_nested]:
        name = re.sub(r"^L\['(\w+)'\]", r"\1", nested[0])
        error = CaptureError(
            f"{name} is a nested tensor, whose samples have no common length, so it cannot be cut into micro-batches: "
            "pass torch.nested.to_padded_tensor(tensor, 0), and a mask of what is not padding"
        )
        raise Refused(error)


def _checked(backend: Any) -> Options | None:
    """The options of a backend, checked before anything is traced; raises the error for invalid ones.

    None: the backend itself will raise it, as if Dynamo suppresses errors.
    """
    check = getattr(_function(backend), "check", None)
    if check is None or dynamo_config.suppress_errors:
        return None
    try:
        found: Options = check(**getattr(_unwrapped(backend), "kwargs", {}))
    except GreedySnakeError as error:
        raise Refused(error) from None
    return found


def has_batch(tensor: torch.Tensor) -> tuple[bool, bool]:
    """A sort key, by how likely a tensor's first dimension is the batch's: first hidden states that require a gradient,
    then tensors of two and more dimensions.
    """
    return tensor.dim() > 2 and tensor.requires_grad, tensor.dim() > 1


def of_batch(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first of the tensors whose first dimension is most likely the batch's.

    A row that all samples share, as positions often are, is skipped, and so is what `_is_stacked`.
    """
    shapes = [_hints(each) for each in tensors]
    several = {shape[1:] for shape in shapes if len(shape) > 1 and shape[0] > 1}
    own = [
        each
        for each, shape in zip(tensors, shapes, strict=True)
        if (shape[0] > 1 or shape[1:] not in several) and not _is_stacked(each, shapes)
    ]
    return max(own or tensors, key=has_batch)


def batch_dims(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """For each tensor, the dimension that has the batch's size and so may be the samples'; None: there is none.

    It is the first, or the second of three or more, as in positions of shape (3, samples, tokens). This is a guess by
    sizes, which may be equal by coincidence: the trace shows whether such a second dimension has the batch's symbol.
    """
    shapes, found = [_hints(each) for each in tensors], list[int | None]()
    first = of_batch(tensors) if tensors else None
    for each, shape in zip(tensors, shapes, strict=True):
        assert first is not None
        dims = [dim for dim in range(2 if len(shape) > 2 else 1) if shape[dim] == hint(first.shape[0])]
        is_second = each is not first and _is_stacked(each, shapes)
        found.append(next(iter(dims[::-1] if is_second else dims), None))
    return found


def _is_stacked(tensor: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a tensor stacks several of the batch: without its first dimension, its shape is how another's begins.

    A float tensor must have as many dimensions as the other; with fewer it is a table for all samples.
    """
    shape = _hints(tensor)
    fewest = len(shape) - (not tensor.is_floating_point())
    begins = (each[: len(shape) - 1] for each in shapes if len(each) >= fewest and len(shape) > 2)
    return any(each == shape[1:] != shape[:-1] for each in begins)


def _hints(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(map(hint, tensor.shape))


def _tensors(source: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in `value` that have dimensions, each with the name of Dynamo's source of it."""
    if isinstance(value, torch.Tensor):
        if value.dim() > 0:
            yield source, value
    elif type(value) is dict:
        for key, each in value.items():
            yield from _tensors(f"{source}[{key!r}]", each)
    elif type(value) in (list, tuple):
        for index, each in enumerate(value):
            yield from _tensors(f"{source}[{index}]", each)


def _current() -> _Settings | None:
    """The settings of the frame that is being compiled: their `end` is among Dynamo's callbacks."""
    owners = (getattr(callback, "__self__", None) for callback in callback_handler.end_callbacks)
    return next((each for each in owners if isinstance(each, _Settings)), None)


class _Functions(set[Any]):
    """Functions. A copy has their names instead: torch 2.11 logs its configuration as JSON, with sets sorted."""

    def __deepcopy__(self, _: object) -> set[str]:
        return {f"{each.__module__}.{each.__qualname__}" for each in self}


class _Settings(ExitStack):
    """The settings of a frame's traces; restored when Dynamo's compile of the frame ends, also after an error."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[str, int] = {}  # of batch inputs, with their dimensions of samples
        self.guessed: dict[str, int] = {}  # before the first trace, also in a call with one sample
        self.numbers: list[str] = []  # patterns of the sources of integers that are symbols
        self.undone: list[Callable[[], None]] = []  # called if the compile fails
        self._before, self._handled = compiler_config.dynamic_sources, sys.exception()  # as the compile begins
        # Floats that have changed become inputs; with ``dynamic=True`` all would.
        fixes_floats = not dynamo_config.assume_static_by_default
        self.enter_context(dynamo_config.patch(specialize_float=fixes_floats, capture_dynamic_output_shape_ops=True))
        # A parameter's class, dtype and `requires_grad` may change while the dict that holds it does not.
        self.enter_context(dynamo_config.patch(skip_tensor_guards_with_matching_dict_tags=False))
        # A module's hook that was added after the first call is called.
        self.enter_context(dynamo_config.patch(skip_nnmodule_hook_guards=False))
        # A warning in a forward, or one that transformers logs once, does not break the graph; it is not shown.
        once = (getattr(sys.modules.get(_LOGGING), name, warnings.warn) for name in ("warning_once", "info_once"))
        ignored = _Functions(dynamo_config.ignore_logging_functions | {warnings.warn, *once})
        self.enter_context(dynamo_config.patch(ignore_logging_functions=ignored))
        # Two dimensions of equal size get two symbols.
        self.enter_context(symbolic_config.patch("use_duck_shape", False))
        # Where it is installed it chooses an order of an einsum's products by sizes, and so makes numbers of them; when
        # the einsum runs, it does.
        self.enter_context(torch.backends.opt_einsum.flags(enabled=False))
        tracing.enter(self, self.has_symbol)
        self.enter_context(stage("tracing the model"))
        callback_handler.register_end_callback(self.end)

    def name(self, sources: Mapping[str, int]) -> None:
        """Make a dimension of each of these sources symbolic from now on, and no longer those named before."""
        self.sources = dict(sources)
        per_dimension = hasattr(dynamo_builder, "_parse_source_entry")  # older: the whole source becomes symbolic
        entries = [f"{re.escape(source)}:{dim}" if per_dimension else source for source, dim in sources.items()]
        named = ",".join(filter(None, [self._before, *entries, *self.numbers]))
        self.enter_context(compiler_config.patch(dynamic_sources=named))

    def has_symbol(self, name: str) -> bool:
        """Whether integers whose source ends with `name` are symbols in this trace; in the next one they are."""
        pattern = ".*" + re.sub(r"\\? |,", ".", re.escape(name)) + "$"  # sources are listed with commas, without spaces
        if pattern in self.numbers:
            return True
        self.numbers.append(pattern)
        self.name(self.sources)
        return False

    def end(self, _: object) -> None:
        callback_handler.remove_end_callback(self.end)
        with self:
            for undo in self.undone if sys.exception() is not self._handled else ():
                undo()
