"""call: the capture of one call of a model, which may be without weights (on the meta device)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from textwrap import shorten
from types import FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

from gs_compile.capture.adapters import trace_libraries
from gs_compile.capture.ahead import cut_ahead
from gs_compile.capture.dynamo import capture
from gs_compile.capture.graph import Captured, hint
from gs_compile.capture.internals import copy_of
from gs_compile.errors import InspectionError


class _CapturedError(Exception):
    """Ends a call whose graph was captured before anything is computed; carries the capture and its symbolic sizes.

    The compiled function raises it when called, not the backend: since torch 2.15 Dynamo would then empty the graph.
    """


def captured_call(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Captured, dict[str, int]]:
    """The capture of one call of `model`, which is not executed, and its symbolic sizes by placeholder.

    Raises `InspectionError` if Dynamo cannot capture it, and the errors of `capture`.
    """

    def record(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., NoReturn]:
        found, _ = cut_ahead(capture(module, example_inputs))
        entries = zip(found.inputs, example_inputs, strict=False)  # without those that `ahead` adds
        sizes = {entry.name: hint(value) for entry, value in entries if entry.role == "size"}

        def end(*_: Any) -> NoReturn:
            raise _CapturedError(found, sizes)

        return end

    trace_libraries()
    for tensor in filter(torch.is_tensor, inputs.values()):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)  # so that Dynamo traces once
    settings = {
        "run_gc_after_compile": False,  # collecting garbage takes longer than half the capture
        "recompile_limit": 1 << 30,  # each capture compiles the forward's functions anew
        "accumulated_recompile_limit": 1 << 30,
    }
    try:
        with dynamo_config.patch(settings):
            torch.compile(_with_own_code(model.forward), backend=record)(**inputs)
    except _CapturedError as ended:
        captured, sizes = ended.args
        return captured, sizes
    except BackendCompilerFailed as error:
        raise error.inner_exception from None
    except TorchDynamoException as error:
        raise no_capture(error) from error
    raise InspectionError(f"Dynamo made no graph of {type(model).__name__}: its forward computes nothing")


def no_capture(error: TorchDynamoException, instead: str = "") -> InspectionError:
    """The error for a model that Dynamo cannot capture, with Dynamo's reason; instead: what else to do."""
    reason = next((line.strip() for line in str(error).splitlines() if "got " in line), str(error))
    words = shorten(reason.rpartition("got ")[2], 300)
    return InspectionError(f"Dynamo cannot capture this model without weights: {words}{instead}")


def _with_own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of the method: what Dynamo stores for a capture belongs to the copy and is dropped with it."""
    function = getattr(forward, "__func__", None)
    if not isinstance(function, FunctionType):
        return forward
    return MethodType(copy_of(function), forward.__self__)  # type: ignore[attr-defined]
