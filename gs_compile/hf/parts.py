"""parts: cut what a model returns for the batches of a step together, so that each has its own."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gs_compile.capture.internals import tree_leaves, tree_map_only
from gs_compile.errors import OptionError
from gs_compile.hf.gather import KEPT, RIGHT, Padding, size_of

# Outputs of a model that have no dimension of tokens: (samples, ...), of any width.
_OF_SAMPLES = ("logits", "scores", "pooler_output", "sentence_embedding")
_OF_PAIRS = "logits_per_"  # how the outputs begin that have each sample's scores with all of its batch
_BESIDE_TEXTS = ("image_", "vision_", "audio_", "video_")  # how those of an encoder with lengths of its own begin


def parted(outputs: Any, batches: Sequence[Mapping[str, Any]], padding: Padding = RIGHT) -> list[Any]:
    """A model's outputs for the gathered batch, cut for each batch.

    Tensors are (samples, tokens, ...), (samples, ...), like routers' logits (samples * tokens, ...) or, like CLIP's,
    (samples, samples); others are refused when they are read. A loss is that of all batches, and each gets its share:
    the whole if it is a mean, which Trainer divides by the number of batches. Each batch gets the logits of as many of
    its last tokens as it has asked for. If there is a decoder, tokens are the decoder's, except in outputs of its
    encoder.
    """
    parts = _Parts(outputs, batches, padding)
    return [mapped(partial(parts.of, at), outputs) for at in range(len(batches))]


class _Parts:
    """Where each batch's samples and tokens are in the outputs for all."""

    def __init__(self, outputs: Any, batches: Sequence[Mapping[str, Any]], padding: Padding) -> None:
        named = outputs if isinstance(outputs, Mapping) else {}
        self.batches, self.is_left = batches, padding.is_left_of(batches)
        self.names = {id(each): name for name in named for each in tree_leaves(named[name])}
        self.logits = named.get("logits")
        self.of_samples = [named.get(name) for name in _OF_SAMPLES]
        self.numbers, self.given = zip(*map(size_of, batches), strict=True)
        self.starts = [*itertools.accumulate(self.numbers, initial=0)]
        has_encoder = any(name.startswith("encoder_") for name in named)
        self.decoded: Sequence[int] = [*map(_decoder_length, batches)] if has_encoder else self.given

    def of(self, at: int, whole: Tensor) -> Any:
        """The part of the batch `at`."""
        if not whole.dim():
            return whole if self.batches[0].get("num_items_in_batch") is None else whole / len(self.batches)
        own, name = slice(*self.starts[at : at + 2]), self.names.get(id(whole), "an output")
        tokens = self.given if name.startswith("encoder_") else self.decoded
        num_samples, lengths = self.starts[-1], (max(tokens), max(tokens) - 1)  # one less once labels are shifted
        are_pairs = len(self.batches) > 1 and whole.shape == (num_samples, num_samples)
        if are_pairs and name.startswith(_OF_PAIRS):
            return whole[own, own].contiguous()
        is_flat = len(whole) == num_samples * max(tokens) > num_samples
        is_unknown = are_pairs and num_samples not in lengths and name not in _OF_SAMPLES
        if is_unknown or (len(whole) != num_samples and not is_flat):
            return _OfNoSamples.of(whole, name)
        if is_flat:
            return whole.unflatten(0, (num_samples, -1))[own, self._tokens(at, tokens)].flatten(0, 1)
        if name.endswith("attentions") and whole.dim() == 4:
            keys = self.given if name.startswith("cross") else tokens
            return whole[own, :, self._tokens(at, tokens), self._tokens(at, keys)].contiguous()
        if whole is self.logits and (kept := self.batches[at].get(KEPT, 0)) and len(self.batches) > 1:
            return whole[own, self._tokens(at, tokens)][:, -kept:].contiguous()
        has_tokens = whole.dim() > 1 and not name.startswith(_BESIDE_TEXTS)
        if whole.dim() == 2:
            has_tokens &= whole.shape[1] in lengths and all(whole is not each for each in self.of_samples)
        elif has_tokens:
            has_tokens = whole.shape[1] >= min(lengths)
        # As a model gives it: losses call `view`
        return whole[own, self._tokens(at, tokens)].contiguous() if has_tokens else whole[own]

    def _tokens(self, at: int, lengths: Sequence[int]) -> slice:
        """The places of a batch's own tokens. lengths: of all batches."""
        missing = max(lengths) - lengths[at]
        return slice(missing, None) if self.is_left and lengths is self.given else slice(None, -missing or None)


def _decoder_length(batch: Mapping[str, Any]) -> int:
    """The number of a decoder's tokens: by its inputs, or by the labels or encoder inputs from which these are made."""
    given = (batch.get(name) for name in ("decoder_input_ids", "decoder_inputs_embeds", "labels"))
    found = (each.shape[1] for each in given if isinstance(each, Tensor) and each.dim() > 1)
    return next(found, size_of(batch)[1])


def mapped(function: Callable[[Tensor], Any], outputs: Any) -> Any:
    """Outputs with a function's results in place of tensors. (A tokenizer's batch is not a pytree.)"""
    if isinstance(outputs, MutableMapping) and not isinstance(outputs, dict):
        found = copy.copy(outputs)
        found.update({name: mapped(function, each) for name, each in outputs.items()})
        return found
    return tree_map_only(Tensor, function, outputs)


class _OfNoSamples(Tensor):
    """Stands for an output that cannot be cut for the batches: it raises an error when it is read."""

    what: str

    @classmethod
    def of(cls, whole: Tensor, name: str) -> _OfNoSamples:
        found = whole.detach().as_subclass(cls)
        found.what = f"{name} of shape {list(whole.shape)}"
        return found

    @classmethod
    def __torch_function__(cls, _: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = next(each.what for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        raise OptionError(
            f"the loss reads {what}, which has no row for each sample, and none for each token, of the batches of a "
            "step: give gradient_accumulation_steps=1 and a larger per_device_train_batch_size"
        )
