"""together: calls of a compiled model that strands make, made as one call for the batches of all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch

from gs_compile.capture.internals import wrap_compiled_call
from gs_compile.errors import OptionError
from gs_compile.hf import strands
from gs_compile.hf.fused_head import has_fused_head, make_capturable
from gs_compile.hf.gather import Padding, gathered, parted
from gs_compile.hf.weights import options_of
from gs_compile.model.optim import SGD
from gs_compile.planner.cost.model import base_model


@dataclass(frozen=True, eq=False)
class _Question:
    """A model's call with a batch."""

    call: Callable[..., Any]
    batch: Mapping[str, Any]
    has_grad: bool


def compile_for_strands(
    model: Any, options: dict[str, Any], around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Callable[..., None]:
    """Compile a model in place, to run in a context. From now on strands ask for its results; `answered` calls it.

    options: get what the model is compiled with, where it needs something else. Returns what compiles it again, with
    micro-batches of so many samples at most, and other options.
    """
    base = base_model(model)
    if has_fused_head(base):
        make_capturable(base)
        options["outputs"] = "all"  # a loss that it gives, as that of routers, is a term of the trainer's

    def asking(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **batch: Any) -> Any:
            with around():
                return call(*args, **batch)

        def ask(*args: Any, **batch: Any) -> Any:
            if not strands.in_strand():
                return run(*args, **batch)
            named = dict(zip(_names(model, base), args, strict=False))
            return strands.ask(_Question(run, {**named, **batch}, torch.is_grad_enabled()))

        return ask

    def compile_within(most_samples: int, **changes: Any) -> None:
        options.update(changes)
        size = min(most_samples, options["micro_batch_size"])
        model.compile(backend="greedysnake", options={**options, "micro_batch_size": size})
        wrap_compiled_call(model, asking)

    compile_within(options["micro_batch_size"])
    return compile_within


@cache
def _watched(kind: Any) -> Any:
    """A kind of transformers' outputs, of which all but the loss was left out."""
    names, places = {field.name for field in fields(kind)} - {"loss"}, range(len(fields(kind)))

    def found(name: Any, value: Any) -> Any:
        if value is None and name in names:
            raise ReadsMore(name)
        return value

    def getattribute(self: Any, name: str) -> Any:
        return found(name, kind.__getattribute__(self, name))

    def get(self: Any, name: Any, default: Any = None) -> Any:
        return found(name, kind.get(self, name)) if name in names else kind.get(self, name, default)

    def contains(self: Any, name: Any) -> bool:
        return found(name, kind.get(self, name)) is not None

    def getitem(self: Any, name: Any) -> Any:
        try:
            if not isinstance(name, str) and range(len(self))[name] != places[name]:  # negative ones, and slices
                raise ReadsMore(name)
            return kind.__getitem__(self, name)
        except (KeyError, IndexError) as error:
            raise ReadsMore(name) from error

    methods = {"__getattribute__": getattribute, "get": get, "__contains__": contains, "__getitem__": getitem}
    return type(kind.__name__, (kind,), methods)


def _names(model: Any, base: Any) -> list[str]:
    """The names of the arguments of a model's forward; adapters without a task hand theirs on as ``*args``."""
    names = inspect.signature(model.forward).parameters
    hands_on = any(each.kind is each.VAR_POSITIONAL for each in names.values())
    return list(inspect.signature(base.forward).parameters if hands_on else names)


def stored_reference(
    model: Any,
    options: Mapping[str, Any],
    given: Mapping[str, Any],
    autocast: Callable[[], AbstractContextManager[Any]],
) -> tuple[SGD, Callable[..., None]]:
    """Compile a model that is never trained, so that its parameters are stored.

    Returns the optimizer that holds them, and what `compile_for_strands` does.

    options: of the model that is trained; given: in what this one differs, over what it has of `from_pretrained`;
    autocast: what Accelerate has wrapped its forward in. Raises OptionError where there is no model.
    """
    if model is None:
        raise OptionError(
            "reference=: this Trainer has no ref_model; with adapters, its reference is the model without them"
        )
    model.requires_grad_(False)
    compile_within = compile_for_strands(model, {**options, **options_of(model, given)}, autocast)
    return SGD(model.parameters(), lr=0.0), compile_within


class ReadsMore(Exception):  # noqa: N818  what a loss does, and no fault of it
    """A loss reads more of what the model returns than the model's own loss, which is all that there is."""


def answered(questions: Sequence[_Question], padding: Padding, *, has_loss_alone: bool = False) -> list[Any]:
    """What each call would have returned; calls of one model in one mode are made as one.

    has_loss_alone: whoever reads another output gets `ReadsMore`, also who only asks whether it is there.
    """
    answers: dict[_Question, Any] = {}
    for question in questions:
        if question in answers:
            continue
        alike = [each for each in questions if (each.call, each.has_grad) == (question.call, question.has_grad)]
        batches = [each.batch for each in alike]
        with torch.set_grad_enabled(question.has_grad):
            outputs = question.call(**(gathered(batches, padding) if len(batches) > 1 else batches[0]))
        found = parted(outputs, batches, padding) if len(batches) > 1 else [outputs]
        for each in found if has_loss_alone else ():
            if hasattr(type(each), "__dataclass_fields__") and isinstance(each, Mapping):
                each.__class__ = _watched(type(each))
        answers |= zip(alike, found, strict=True)
    return [answers[question] for question in questions]
