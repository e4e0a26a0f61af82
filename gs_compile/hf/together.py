"""together: calls of a compiled model by several strands become one call with the batches of all."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cache, wraps
from types import MethodType
from typing import Any, NamedTuple

import torch

from gs_compile.capture.internals import compiled_call, wrap_compiled_call
from gs_compile.errors import OptionError
from gs_compile.hf import strands
from gs_compile.hf.fused_head import has_fused_head, make_capturable
from gs_compile.hf.gather import Padding, gathered
from gs_compile.hf.parts import parted
from gs_compile.hf.weights import options_of
from gs_compile.model.optim import SGD
from gs_compile.model.replaced import replaced
from gs_compile.planner.cost.model import base_model

log = logging.getLogger(__name__)

_METHODS = ("forward", "prepare_inputs_for_generation")  # that PEFT replaces


class Mode(NamedTuple):
    """What a loss may change in a model around a call of its reference: for the whole model, until it sets it back.

    Each strand has its own, as contexts that several enter before one leaves would set back what another has set.
    methods: those that stand in place of the class's, as PEFT has its base's where prompts are left out; adapter: of
    PEFT, the active one.
    """

    is_training: bool
    methods: tuple[Any, ...] = ()
    adapter: Any = None
    is_off: bool = False

    @classmethod
    def of(cls, model: Any) -> Mode:
        found = cls(model.training, tuple(vars(model).get(name) for name in _METHODS))
        if not hasattr(model, "_adapters_disabled"):
            return found
        return found._replace(adapter=model.active_adapter, is_off=model._adapters_disabled)

    def enter(self, model: Any) -> None:
        """Set a model to this."""
        found = Mode.of(model)
        if self.is_training != found.is_training:
            model.train(self.is_training)
        for name, method, before in zip(_METHODS, self.methods, found.methods, strict=True):
            if method is not before:
                _set_method(model, name, method)
        if self.adapter != found.adapter:
            model.set_adapter(self.adapter)
        if self.is_off != found.is_off:
            if hasattr(model.base_model, "disable_adapter_layers"):  # not of prompts
                layers = model.base_model
                (layers.disable_adapter_layers if self.is_off else layers.enable_adapter_layers)()
            model._adapters_disabled = self.is_off


@dataclass(frozen=True, eq=False)
class _Question:
    """A strand's call of a model, in a mode, with a batch."""

    call: Callable[..., Any]
    batch: Mapping[str, Any]
    has_grad: bool
    model: Any
    mode: Mode

    @property
    def kind(self) -> tuple[Any, ...]:
        """Questions of one kind are answered by one call."""
        return self.call, self.has_grad, self.mode


class AskedModel:
    """A model that is compiled in place, and runs in a context. Strands ask for its results; `answered` calls it."""

    is_for_its_loss = False  # callers with gradients read only the loss, or get `ReadsMore`
    _own_forward: Any = None  # of the model, and what stands in its place in `wrappable`
    _asking_forward: Any = None

    def __init__(
        self, model: Any, options: dict[str, Any], around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """options: of the backend; entries are changed here if the model needs others."""
        self.model, self.options, self.around, self.base = model, options, around, base_model(model)
        self.has_loss_alone = False  # although nobody has asked for that: who wants more gets it by `give_all`
        if has_fused_head(self.base):
            make_capturable(self.base)
            options["outputs"] = "all"  # the model's own loss, such as the routers', is only a term of the trainer's
        self.compile_within(options["micro_batch_size"])

    def give_all(self) -> None:
        """Return all outputs from now on."""
        self.has_loss_alone, self.options["outputs"] = False, "all"
        self.compile_within(self._most_samples)

    def compile_within(self, most_samples: int) -> None:
        """Compile the model, if necessary again, with micro-batches of at most so many samples."""
        self._most_samples = most_samples
        size = min(most_samples, self.options["micro_batch_size"])
        self.model.compile(backend="greedysnake", options={**self.options, "micro_batch_size": size})
        wrap_compiled_call(self.model, self._asked)
        self._call = compiled_call(self.model)

    @contextmanager
    def wrappable(self) -> Iterator[None]:
        """Inside the block, the model's forward is its compiled call, so that a loss may wrap the forward.

        For example, MatryoshkaLoss keeps what the forward returns. Its wrapper would otherwise be compiled, too.
        """

        @wraps(self.model.forward)
        def asking(*args: Any, **batch: Any) -> Any:
            if compiled_call(self.model) is not self._call:  # in `streaming`, as within `generate`: as it is written
                return (self._own_forward or MethodType(type(self.model).forward, self.model))(*args, **batch)
            with self._forward(asking):  # another strand finds it without what this one's loss has put around it
                return self.model(*args, **batch)

        own = vars(self.model).get("forward")
        with replaced(vars(self), _own_forward=own, _asking_forward=asking), self._forward(asking):
            yield

    @contextmanager
    def _forward(self, forward: Any) -> Iterator[None]:
        """Inside the block, the model has this forward; None: that of its class."""
        before = vars(self.model).get("forward")
        _set_method(self.model, "forward", forward)
        try:
            yield
        finally:
            _set_method(self.model, "forward", before)

    def _asked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **batch: Any) -> Any:
            is_asking = self._asking_forward and self.model.forward is self._asking_forward
            with self.around(), self._forward(self._own_forward) if is_asking else nullcontext():
                return call(*args, **batch)

        def ask(*args: Any, **batch: Any) -> Any:
            is_asking = self.model.forward is self._asking_forward or _is_of_a_part(self.model.forward, self.model)
            if self._asking_forward and not is_asking:
                return self.model.forward(*args, **batch)
            if self.has_loss_alone and torch.is_grad_enabled() and not self.is_for_its_loss:
                log.info("a training_step of the user's own calls the model, which gives it all outputs from now on")
                self.give_all()
                return self.model(*args, **batch)
            if not strands.in_strand():
                return run(*args, **batch)
            named, mode = dict(zip(_names(self.model, self.base), args, strict=False)), Mode.of(self.model)
            try:
                return strands.ask(_Question(run, {**named, **batch}, torch.is_grad_enabled(), self.model, mode))
            finally:
                mode.enter(self.model)

        return ask


def _set_method(model: Any, name: str, method: Any) -> None:
    """Have a model call this in place of its class's method; None: that of its class."""
    vars(model).pop(name, None)
    if method is not None:
        vars(model)[name] = method


def _is_of_a_part(method: Any, model: Any) -> bool:
    """Whether a method is that of a module within a model, and no wrapper of the model's."""
    owner = getattr(method, "__self__", model)
    return isinstance(owner, torch.nn.Module) and owner is not model


@cache
def _watched(kind: Any) -> Any:
    """A subclass of transformers' outputs of which only the loss was computed: other entries raise `ReadsMore`."""
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
    """The names of the arguments of a model's forward; adapters without a task pass theirs on as ``*args``."""
    names = inspect.signature(model.forward).parameters
    hands_on = any(each.kind is each.VAR_POSITIONAL for each in names.values())
    return list(inspect.signature(base.forward).parameters if hands_on else names)


def stored_reference(
    model: Any,
    options: Mapping[str, Any],
    given: Mapping[str, Any],
    autocast: Callable[[], AbstractContextManager[Any]],
) -> tuple[SGD, AskedModel]:
    """Compile a model that is never trained, so that its parameters are stored.

    Returns the optimizer that holds them, and the compiled model.

    options: of the model that is trained; given: options of this one, which override those of `from_pretrained`;
    autocast: the context in which Accelerate runs its forward. Raises OptionError if there is no model.
    """
    if model is None:
        raise OptionError(
            "reference=: this Trainer has no ref_model; with adapters, its reference is the model without them"
        )
    model.requires_grad_(False)
    compiled = AskedModel(model, {**options, **options_of(model, given)}, autocast)
    return SGD(model.parameters(), lr=0.0), compiled


class ReadsMore(Exception):  # noqa: N818  what a loss does, and no fault of it
    """A loss reads more of the model's outputs than the model's own loss, which alone was computed."""


def answered(questions: Sequence[_Question], padding: Padding, *, has_loss_alone: bool) -> list[Any]:
    """What each call would have returned; calls of one model in one mode become one call.

    has_loss_alone: reading another output raises `ReadsMore`, and so does asking whether there is one.
    """
    answers: dict[_Question, Any] = {}
    for question in questions:
        if question in answers:
            continue
        alike = [each for each in questions if each.kind == question.kind]
        batches = [each.batch for each in alike]
        question.mode.enter(question.model)
        with torch.set_grad_enabled(question.has_grad):
            outputs = question.call(**(gathered(batches, padding) if len(batches) > 1 else batches[0]))
        found = parted(outputs, batches, padding) if len(batches) > 1 else [outputs]
        for each in found if has_loss_alone else ():
            if hasattr(type(each), "__dataclass_fields__") and isinstance(each, Mapping):
                each.__class__ = _watched(type(each))
        answers |= zip(alike, found, strict=True)
    return [answers[question] for question in questions]
