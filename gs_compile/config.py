"""The options of ``torch.compile(model, backend="greedysnake", options={...})``, checked when they are made."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from gs_compile.errors import OptionError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Expert:
    """What few users should touch.

    schedule: the order of layers and micro-batches; "vertical" runs a layer for all micro-batches before the next.
    compiler: what compiles the layers' code: "inductor", "eager" (runs it as it is), or "auto": inductor where a C++
        compiler (Triton on a GPU) is there.
    snake: alternate the micro-batch order from layer to layer.
    """

    schedule: Literal["vertical"] = "vertical"
    compiler: Literal["auto", "inductor", "eager"] = "auto"
    snake: bool = True

    def __post_init__(self) -> None:
        _one_of("expert.schedule", self.schedule, ("vertical",))
        _one_of("expert.compiler", self.compiler, ("auto", "inductor", "eager"))
        _one_of("expert.snake", self.snake, (True, False))


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the backend.

    micro_batch_size: samples that run through a layer at a time; the last micro-batch of a batch may be smaller.
    outputs: "all" gives back everything the model returns; "loss" keeps the loss alone (no logits, no caches: they come
        back as None), which is what training wants.
    expert: an `Expert`, or a dict of its fields.
    mode: torch.compile's `mode`, passed on to inductor.
    """

    micro_batch_size: int = 1
    outputs: Literal["all", "loss"] = "all"
    expert: Expert = field(default_factory=Expert)
    mode: str | None = None

    def __post_init__(self) -> None:
        size = self.micro_batch_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise OptionError(f"micro_batch_size must be a whole number of samples, 1 or more; got {size!r}")
        _one_of("outputs", self.outputs, ("all", "loss"))
        if not isinstance(self.expert, (Mapping, Expert)):
            raise OptionError(f"expert must be a dict or gs_compile.Expert; got {self.expert!r}")
        if isinstance(self.expert, Mapping):
            object.__setattr__(self, "expert", _from_mapping(Expert, self.expert, "expert."))

    @classmethod
    def of(cls, options: Mapping[str, Any] | Options | None, mode: str | None = None) -> Options:
        """The options from what torch.compile hands to a backend; raises `OptionError` for what it does not know."""
        if isinstance(options, Options):
            return replace(options, mode=mode or options.mode)
        given = dict(options or {})
        if mode is not None:
            given["mode"] = mode
        return _from_mapping(cls, given, "")


def _from_mapping(cls: type[T], given: Mapping[str, Any], prefix: str) -> T:
    known = [entry.name for entry in fields(cls)]  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(prefix + k for k in known)}"
            raise OptionError(f"unknown option {prefix}{key}; {hint}")
    return cls(**given)


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(value is entry or (value == entry and type(value) is type(entry)) for entry in allowed):
        raise OptionError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
