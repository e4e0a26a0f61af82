"""case: what an architecture is to the zoo: a tiny model, one batch, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, TOKENS, VOCABULARY = 4, 12, 70
WIDTH, LAYERS, HEADS = 32, 3, 4
PIXELS, CLASSES = 32, 10

Loss = Callable[[nn.Module, int], Tensor]  # of the model, on the batch of a step


@dataclass(frozen=True)
class Example:
    """A model, and how a step calls it."""

    model: nn.Module
    loss: Loss
    outputs: str = "all"  # "loss": the model computes the loss itself


@dataclass(frozen=True)
class Case:
    """One architecture; `make` imports its package, so that the registry can be read without any."""

    package: str
    name: str
    make: Callable[[], Example] = field(compare=False, repr=False)
    num_blocks: int = LAYERS  # of all stacks

    @property
    def key(self) -> str:
        return f"{self.package}/{self.name}"


# Batches and losses ---------------------------------------------------------------------------------------------------


def generator(step: int) -> torch.Generator:
    """The random numbers of a step."""
    return torch.Generator().manual_seed(step + 1)


def ids(step: int, tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> Tensor:
    """Tokens of a batch; 0, 1 and 2 are special to some models and left out."""
    return torch.randint(3, vocabulary, (BATCH, tokens), generator=generator(step))


def labels(tokens: Tensor) -> Tensor:
    """The same tokens; the samples count different numbers of them."""
    found = tokens.clone()
    for sample in range(len(found)):
        found[sample, : 2 * sample] = -100
    return found


def images(step: int, pixels: int = PIXELS) -> Tensor:
    """Pixels of a batch."""
    return torch.randn(BATCH, 3, pixels, pixels, generator=generator(step))


def classes(step: int) -> Tensor:
    """A class for each sample."""
    return torch.randint(0, CLASSES, (BATCH,), generator=generator(step))


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    """The loss of a language model whose user computes it."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels(tokens)[:, 1:].flatten())


def language(model: nn.Module, step: int) -> Tensor:
    """The loss of a model that returns logits of tokens."""
    tokens = ids(step)
    return next_token(model(tokens), tokens)


def classification(model: nn.Module, step: int) -> Tensor:
    """The loss of a model that returns logits of classes."""
    return functional.cross_entropy(model(images(step)), classes(step))


def returned(**arguments: Callable[[int], Any]) -> Loss:
    """The loss that a model returns for these arguments, each made for a step."""
    return lambda model, step: model(**{name: make(step) for name, make in arguments.items()}).loss
