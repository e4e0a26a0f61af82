"""gather: combine the batches of a step into one. `parts` cuts what a model returns for it."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gs_compile.capture.internals import tree_leaves
from gs_compile.errors import OptionError
from gs_compile.hf.images import entries_of
from gs_compile.planner.cost.model import base_model

IGNORED = -100  # a label that no loss counts
# Where the sequences that are packed in a row begin, for some attention kernels: `position_ids` say the same.
_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
KEPT = "logits_to_keep"  # for how many last tokens a model returns logits; 0: for all
_MASK, _TEXTS, _BORDER = "attention_mask", ("input_ids", "inputs_embeds"), "original_max_position_embeddings"
_ONE_LENGTH = (
    "pad all batches to one length (padding='max_length') or give gradient_accumulation_steps=1 and a larger "
    "per_device_train_batch_size"
)
# Models that mix neighbouring tokens whatever the mask says, as group norms over the time of a sound mix all.
_MIXING = {"convbert", "funnel"}
_CHOSEN = {"start_positions", "end_positions"}  # labels that are places among all tokens, padding included


class Padding(NamedTuple):
    """How batches of a step are padded to one length.

    token_id: to pad with. is_left: before the tokens, if no batch of a step shows on which side its padding is.
    may_move: a model's results do not depend on how many places are before the tokens. reads_last: it reads the last
    place of a sequence, whatever is there; None: not known, as it is the user's model. averages: it reads the mean of
    all places. of_images: entries that only batches with images have, one image after the other. labels: names of
    labels that do not look like labels. border: beyond so many positions it computes all places otherwise; None: never.
    """

    token_id: int = 0
    is_left: bool = False
    may_move: bool = True
    reads_last: bool | None = False
    averages: bool = False
    of_images: frozenset[str] = frozenset()
    labels: frozenset[str] = frozenset()
    border: int | None = None

    def is_left_of(self, batches: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these batches are padded before the tokens, as a model that reads the last token may need."""
        return self.may_move and self._is_ahead(batches)

    def changes(self, batches: Sequence[Mapping[str, Any]]) -> bool:
        """Whether padding would be in places that the model may read of each sequence."""
        labels = (each for name, each in batches[0].items() if self.names_label(name) and isinstance(each, Tensor))
        is_of_samples = any(each.dim() == 1 or each.is_floating_point() for each in labels)
        may_read = is_of_samples and self._is_ahead(batches) if self.reads_last is None else self.reads_last
        return self.averages or (may_read and not self.is_left_of(batches))

    def names_label(self, name: str) -> bool:
        """Whether an entry of a batch is a label by its name, as in Trainer."""
        return "label" in name or name in self.labels

    def _is_ahead(self, batches: Sequence[Mapping[str, Any]]) -> bool:
        """Whether padding is before the tokens, or, if there is none, should be."""
        masks = [each for batch in batches for each in _masks(batch) if each.dim() == 2]
        starts, ends = (any(not each[:, at].all() for each in masks) for at in (0, -1))
        return bool(masks) and not ends and (starts or self.is_left or self.reads_last is True)


RIGHT = Padding()


def padding_of(model: Any, tokenizer: Any = None) -> Padding:
    """The padding for a model: on the tokenizer's side, with the model's token, by which classifiers find the end."""
    config = getattr(model, "config", None)
    known = (getattr(of, "pad_token_id", None) for of in (config, tokenizer))
    token_id = next((each for each in known if each is not None), 0)
    is_left = getattr(tokenizer, "padding_side", "right") == "left"
    may_move = config is None or not _has_place_embeddings(config)
    base = base_model(model)
    summary = getattr(base, "sequence_summary", None)
    # Most classifiers of transformers look for the last token that is not padding.
    is_known = summary is not None or type(base).__module__.startswith("transformers.")
    kind = getattr(summary, "summary_type", "")
    reads_last = kind in ("last", "cls_index") if is_known else None  # "cls_index" is the last, unless it is given
    is_mixing = getattr(config, "model_type", "") in _MIXING or getattr(config, "feat_extract_norm", "") == "group"
    averages = kind == "mean" or is_mixing
    border = None if config is None else _border(config)
    return Padding(token_id, is_left, may_move, reads_last, averages, entries_of(base), border=border)


def _border(config: Any) -> int | None:
    """The number of positions beyond which longrope rotates all places by other frequencies; None: there is none."""
    rope = getattr(_of_texts(config), "rope_parameters", None) or {}
    found = (each for each in (rope, *rope.values()) if isinstance(each, Mapping))
    border: int | None = next((each.get(_BORDER) for each in found if each.get("rope_type") == "longrope"), None)
    return border


def _of_texts(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _has_place_embeddings(config: Any) -> bool:
    """Whether a model of transformers learns a vector for each place, as GPT-2 does; others use relative positions."""
    text = _of_texts(config)
    rotates = any(getattr(text, name, None) for name in ("rope_parameters", "rope_theta", "rotary_dim", "alibi"))
    return not rotates and (getattr(text, "max_position_embeddings", None) or 0) > 0


def gathered(batches: Sequence[Mapping[str, Any]], padding: Padding = RIGHT) -> Mapping[str, Any]:
    """One batch of all samples, of the first batch's type; shorter sequences are padded on the collator's side.

    Padding needs an attention mask, which excludes it, or position ids, by which it is another one of the sequences
    that are packed in a row; labels there are ignored. Raises OptionError if batches have other entries than the first,
    or need padding and have neither mask nor position ids, or labels that padding would change. Labels themselves need
    no mask, such as those of Whisper, whose decoder has none. Some batches may have no images.
    """
    first, every = batches[0], dict.fromkeys(itertools.chain.from_iterable(batches))
    if any(not every.keys() - batch.keys() <= padding.of_images for batch in batches):
        raise OptionError(
            f"the batches of a step have different entries: {sorted({*map(tuple, batches)})}: have the collator give "
            "all batches the same"
        )
    if first.get("position_ids") is None and (offsets := sorted(first.keys() & {*_OFFSETS})):
        raise OptionError(
            f"the batches say by {offsets[0]!r} alone where packed sequences begin, which is lost where they are put "
            "together: have the collator give position_ids, too (return_position_ids=True)"
        )
    if padding.border is not None and len({_reach(batch) > padding.border for batch in batches}) > 1:
        raise OptionError(
            f"some batches of a step are longer than {padding.border}, from where on this model rotates all places by "
            f"other frequencies (longrope), and others are not: {_ONE_LENGTH}"
        )
    having = {name: [batch for batch in batches if name in batch] for name in every}
    joined = {name: _joined(name, own, padding) for name, own in having.items() if name not in (*_OFFSETS, KEPT)}
    if KEPT in first:
        joined[KEPT] = _to_keep(batches)
    if not isinstance(first, MutableMapping):
        return joined
    found = copy.copy(first)  # a tokenizer's batch, with a `to(device)` and attributes that loops use
    for name in first.keys() - joined.keys():
        del found[name]
    found.update(joined)
    return found


def _to_keep(batches: Sequence[Mapping[str, Any]]) -> Any:
    """The number of last tokens of the gathered batch that include those whose logits each batch asks for."""
    numbers, lengths = [batch[KEPT] for batch in batches], [size_of(batch)[1] for batch in batches]
    if len(batches) == 1:
        return numbers[0]
    if not all(isinstance(number, int) for number in numbers):
        raise OptionError(f"{KEPT!r} has places, which differ between the batches of a step: give a number, or none")
    missing = (max(lengths) - length for length in lengths)
    return max(map(sum, zip(numbers, missing, strict=True))) if all(numbers) else 0


def size_of(batch: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of samples and tokens: those of the text if there is one, also after images."""
    number, length, *_ = next(_tensors(batch)).shape
    return number, length


def _reach(batch: Mapping[str, Any]) -> int:
    """The number of positions of a batch: as many as tokens, unless it has positions of its own."""
    positions = batch.get("position_ids")
    return int(positions.max()) + 1 if isinstance(positions, Tensor) else size_of(batch)[1]


def _tensors(batch: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors of two dimensions and more, texts first. (A tokenizer's batch is not a dict.)"""
    for name in sorted(batch, key=lambda name: name not in _TEXTS):
        if isinstance(batch[name], Mapping):
            yield from _tensors(batch[name])
        else:
            yield from (x for x in tree_leaves(batch[name]) if isinstance(x, Tensor) and x.dim() > 1)


def _num_rows(batch: Mapping[str, Any]) -> int | None:
    """The rows of the first tensor."""
    return next((len(each) for each in batch.values() if isinstance(each, Tensor) and each.dim()), None)


def _masks(batch: Mapping[str, Any]) -> Iterator[Tensor]:
    for name, each in batch.items():
        if isinstance(each, Mapping):
            yield from _masks(each)
        elif name == _MASK and isinstance(each, Tensor):
            yield each


def _joined(name: str, batches: Sequence[Mapping[str, Any]], padding: Padding) -> Any:
    values = [batch[name] for batch in batches]
    if all(isinstance(batch[name], list) and len(batch[name]) == _num_rows(batch) for batch in batches):
        return list(itertools.chain.from_iterable(values))  # an entry for each sample, such as texts
    if all(isinstance(value, Mapping) for value in values):  # as sentence-transformers' models take all they are given
        return gathered(values, padding)
    if all(map(_is_stacked, values, batches)):
        joined = _rows_joined(name, [value.movedim(0, -1) for value in values], batches, padding)
        return joined.movedim(-1, 0).contiguous()
    if not all(isinstance(value, Tensor) and value.dim() for value in values):
        if any(value is not values[0] and value != values[0] for value in values):
            raise OptionError(
                f"{name!r} is no tensor or list with a row for each sample, and differs between the batches of a step: "
                "have the collator make one, or give gradient_accumulation_steps=1"
            )
        return values[0]
    return _rows_joined(name, values, batches, padding)


def _is_stacked(value: Any, batch: Mapping[str, Any]) -> bool:
    """Whether it has a dimension before the samples, such as positions of shape (3, samples, tokens)."""
    return isinstance(value, Tensor) and value.dim() == 3 and value.shape[1:] == size_of(batch) != value.shape[:2]


def _rows_joined(name: str, values: Sequence[Tensor], batches: Sequence[Mapping[str, Any]], padding: Padding) -> Tensor:
    """Tensors with a row for each sample, as one."""
    first, shapes = batches[0], [value.shape[1:] for value in values]
    if len(set(shapes)) == 1:
        return torch.cat(list(values))
    is_label = _is_label(name, values, padding)
    if not is_label and first.get(_MASK) is None and first.get("position_ids") is None:
        raise OptionError(
            f"{name!r} has sequences of different lengths in the batches of a step, and there are no attention_mask "
            "and no position_ids to pad them with: pad all batches to one length, or have the collator make a mask"
        )
    if chosen := sorted(_CHOSEN & first.keys()):
        raise OptionError(
            f"{name!r} has sequences of different lengths in the batches of a step, and {chosen[0]!r} is a position "
            f"among all tokens, so padding would change the loss: {_ONE_LENGTH}"
        )
    if padding.changes(batches) and not (is_label and padding.averages):  # which inputs alone may change
        raise OptionError(
            f"{name!r} has sequences of different lengths in the batches of a step, and this model may read the last "
            f"place of a sequence, or the mean of all, where padding would be: {_ONE_LENGTH}"
        )
    whole = [max(sizes) for sizes in zip(*shapes, strict=True)]
    if name == "position_ids" and first.get(_MASK) is None:
        return torch.cat([_followed(value, whole[0]) for value in values])
    elsewhere = padding.token_id if name == "input_ids" else _masked(name, values[0])
    filling = _ignored(name, values) if is_label else elsewhere
    are_tokens = all(value.shape[1] == size_of(batch)[1] for batch, value in zip(batches, values, strict=True))
    is_left = are_tokens and padding.is_left_of(batches)
    return torch.cat([_padded(value, whole, filling, is_left=is_left) for value in values])


def _is_label(name: str, values: Sequence[Tensor], padding: Padding) -> bool:
    """Whether it has a label for each token: by its name, or because some are ignored."""
    if name.endswith("mask") or name in _TEXTS:
        return False
    is_whole = values[0].dtype.is_signed and not values[0].dtype.is_floating_point
    return padding.names_label(name) or (is_whole and any(_has(value, IGNORED) for value in values))


def _ignored(name: str, values: Sequence[Tensor]) -> float:
    """A label that the loss leaves out: of whole numbers -100, of floats what these have of -100 and NaN."""
    dtype = values[0].dtype
    if not dtype.is_floating_point and dtype.is_signed:
        return IGNORED
    found = [each for each in (IGNORED, math.nan) if any(_has(value, each) for value in values)]
    if not (found and dtype.is_floating_point):
        raise OptionError(
            f"{name!r} has sequences of different lengths in the batches of a step, and no label there says which one "
            f"the loss leaves out, as -100 or NaN would, so padding would count: {_ONE_LENGTH}"
        )
    return found[0]


def _has(value: Tensor, label: float) -> bool:
    return bool((value.isnan() if math.isnan(label) else value == label).any())


def _masked(name: str, value: Tensor) -> float:
    """The value that excludes places: 0, except in a mask of four dimensions that is added to attention scores."""
    is_added = name.endswith(_MASK) and value.dim() > 3 and value.is_floating_point()
    return torch.finfo(value.dtype).min if is_added else 0


def _padded(value: Tensor, whole: Sequence[int], filling: float, *, is_left: bool) -> Tensor:
    missing = [size - own for size, own in zip(whole, value.shape[1:], strict=True)]
    pairs = [(size, 0) if is_left else (0, size) for size in reversed(missing)]
    return functional.pad(value, list(itertools.chain.from_iterable(pairs)), value=filling)


def _followed(positions: Tensor, length: int) -> Tensor:
    """Positions of packed sequences, with those of one more at the end."""
    number, own, *others = positions.shape
    more = torch.arange(length - own, device=positions.device).expand(number, *others, -1)
    return torch.cat([positions, more.movedim(-1, 1)], 1)
