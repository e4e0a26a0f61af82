"""together: calls of a compiled model that strands make, made as one call for the batches of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gs_compile.capture.internals import wrap_compiled_call
from gs_compile.hf import strands
from gs_compile.hf.gather import gathered, parted


@dataclass(frozen=True, eq=False)
class _Question:
    """A model's call with a batch."""

    call: Callable[..., Any]
    batch: Mapping[str, Any]
    has_grad: bool


def call_together(model: torch.nn.Module) -> None:
    """From now on strands ask for the results of a compiled model; `answered` calls it."""

    def asking(call: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **batch: Any) -> Any:
            if args or not strands.in_strand():
                return call(*args, **batch)
            return strands.ask(_Question(call, batch, torch.is_grad_enabled()))

        return ask

    wrap_compiled_call(model, asking)


def answered(questions: Sequence[_Question], pad_token_id: int) -> list[Any]:
    """What each call would have returned; calls of one model in one mode are made as one."""
    answers: dict[_Question, Any] = {}
    for question in questions:
        if question in answers:
            continue
        alike = [each for each in questions if (each.call, each.has_grad) == (question.call, question.has_grad)]
        batches = [each.batch for each in alike]
        with torch.set_grad_enabled(question.has_grad):
            outputs = question.call(**gathered(batches, pad_token_id))
        answers |= zip(alike, parted(outputs, batches), strict=True)
    return [answers[question] for question in questions]
