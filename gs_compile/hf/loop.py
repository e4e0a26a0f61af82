"""loop: the user's own training loop with Accelerate, whose steps run layer-major.

With Accelerate's `accumulate`, a step has several forwards. Here the data loader returns all batches of a step at once,
so each iteration of the loop is a whole step: its loss is the step's, and gradients are always complete.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from gs_compile.errors import OPTIMIZERS, OptimizerError, OptionError
from gs_compile.hf.fitting import fit
from gs_compile.hf.gather import Padding, gathered, padding_of
from gs_compile.hf.images import encode_for
from gs_compile.model.resume import resume
from gs_compile.model.tiered_optimizer import TieredOptimizer

log = logging.getLogger(__name__)

# Attributes of a data loader that its replacement gets.
_KEPT = frozenset(
    "num_workers pin_memory timeout worker_init_fn multiprocessing_context generator prefetch_factor "
    "persistent_workers".split()
)


def prepare(
    accelerator: Any,
    model: torch.nn.Module,
    optimizer: TieredOptimizer,
    loader: DataLoader[Any],
    *others: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """``accelerator.prepare``, with the model compiled in place; `options` are those of the backend.

    optimizer: of this package, with `max_grad_norm` if the loop clips; `accelerator.clip_grad_norm_` then returns the
        norm of all gradients.
    loader: of the training data. It returns the batches of `accelerator.gradient_accumulation_steps` (1 from then on)
        as one batch, those that Accelerate gives this process, padded as in `hf.gather`. Micro-batches have the size of
        its batches. The loss is the mean over a whole step, where accumulation takes the mean of the batches' means.
    others: schedulers, whose states commits store, and loaders of evaluation data; they are prepared as usual.

    All of these may come in any order, as Accelerate takes them: the first model is trained, by the first optimizer, on
    the data of the first loader. Returns what `accelerator.prepare` does, in that order. Raises OptionError for another
    optimizer, fp8, a dynamo backend, DeepSpeed and FSDP.
    """
    given: list[Any] = [model, optimizer, loader, *others]
    places = _places(given)
    model, optimizer, loader, *rest = (given[place] for place in places)
    num_batches = accelerator.gradient_accumulation_steps
    _check(accelerator, optimizer, loader)
    size = options.get("micro_batch_size") or _size_of_batches(accelerator, loader)
    chosen, asked = fit(accelerator, model, size, {**options, "micro_batch_size": size})
    accelerator.gradient_accumulation_steps = 1
    accelerator.clip_grad_norm_ = partial(_clip_grad_norm, optimizer, accelerator.clip_grad_norm_)
    encode_for(accelerator, model)
    model.compile(backend="greedysnake", options=chosen)
    if accelerator.scaler is not None:
        accelerator.scaler.serve(optimizer)
    prepared: tuple[Any, ...] = accelerator.prepare(model, optimizer, loader, *rest)
    if num_batches > 1:
        gather_steps(prepared[2], num_batches, size, padding_of(model))
    schedulers = [each for each in prepared[3:] if hasattr(each, "get_last_lr")]
    states = {f"scheduler_{number}": each for number, each in enumerate(schedulers)} if asked.durability else {}
    optimizer.kept.states.update(states)
    if asked.resume is not None:  # so that the optimizer's number of steps is true from now on
        resume(model, optimizer, storage=asked.storage, group=asked.group, mesh=asked.mesh, **states)
    return tuple(prepared[places.index(place)] for place in range(len(given)))


def _places(given: Sequence[Any]) -> list[int]:
    """The indices of the model, its optimizer and its data loader among what is prepared, and then those of the others.

    One of the three that is not found counts as being at its usual place.
    """
    kinds = (torch.nn.Module, torch.optim.Optimizer, DataLoader)
    first = [next((n for n, each in enumerate(given) if isinstance(each, kind)), at) for at, kind in enumerate(kinds)]
    return list(dict.fromkeys([*first, *range(len(given))]))


def _check(accelerator: Any, optimizer: Any, loader: Any) -> None:
    """Raise OptionError for what is not supported, before anything is compiled."""
    if not isinstance(optimizer, TieredOptimizer):
        raise OptionError(
            f"{type(optimizer).__name__} keeps its states in memory: make one of {OPTIMIZERS}, which take the same "
            "settings and max_grad_norm="
        )
    if not isinstance(loader, DataLoader) or getattr(loader, "_is_accelerate_prepared", False):
        raise OptionError("give the DataLoader of the training data, not prepared before")
    if loader.batch_sampler is None and not loader.batch_size and accelerator.gradient_accumulation_steps > 1:
        raise OptionError("the loader has batch_size=None, so its batches cannot be gathered: give it a batch size")
    precision, backend = accelerator.mixed_precision, accelerator.state.dynamo_plugin.backend.value
    if precision not in ("no", "bf16", "fp16"):
        raise OptionError(f"mixed_precision={precision!r}: use bf16 or fp16")
    if str(backend).lower() != "no":
        raise OptionError(f"dynamo_backend={backend!r}: leave it out, the model is compiled already")
    if accelerator.distributed_type.value not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise OptionError(f"{accelerator.distributed_type.value}: leave it out, the backend replaces it")


def _clip_grad_norm(
    optimizer: TieredOptimizer,
    ordinary: Callable[..., Any],
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    norm_type: float = 2,
) -> Any:
    """The norm of all gradients, by which updates are clipped; for parameters of other optimizers calls `ordinary`."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    given = {parameter for parameter in parameters if parameter.requires_grad}
    own = {parameter for parameter in optimizer.group_of if parameter.requires_grad}
    if not given & own:
        return ordinary(parameters, max_norm, norm_type)
    if given != own or norm_type != 2:
        raise OptimizerError(
            "clip_grad_norm_: only the 2-norm of all parameters of the optimizer together can be clipped"
        )
    if optimizer.max_grad_norm != max_norm:
        raise OptimizerError(
            f"clip_grad_norm_({max_norm}): the updates of this backward were made with max_grad_norm="
            f"{optimizer.max_grad_norm}. Make the optimizer with max_grad_norm={max_norm}"
        )
    optimizer.count_late()
    return torch.tensor(optimizer.grad_norm)


# The batches of a step ------------------------------------------------------------------------------------------------


def _size_of_batches(accelerator: Any, loader: DataLoader[Any]) -> int:
    """Samples of each of the loader's batches, in each process."""
    if loader.batch_size is None:
        raise OptionError(
            "the loader has a batch sampler of its own, so its batches have no size: give micro_batch_size"
        )
    return loader.batch_size // (accelerator.num_processes if accelerator.split_batches else 1)


def gather_steps(prepared: Any, num_batches: int, size: int, padding: Padding) -> None:
    """Make a loader that Accelerate has prepared return `num_batches` of its batches as one, collated one by one.

    size: of a batch, if the loader has none. The loader already has one process's share of the batches, so a step has
    the batches that accumulation would have, also the last one of an epoch.
    """
    log.warning(
        "the loader returns the %d batches of a step as one, so its length counts steps from now on: the loop must not "
        "divide that length by gradient_accumulation_steps again",
        num_batches,
    )
    own = prepared.base_dataloader
    kept = {name: getattr(own, name) for name in _KEPT}
    size = own.batch_size or _share(own.batch_sampler) or size
    kept["collate_fn"] = partial(_collated, own.collate_fn, size, padding)
    if isinstance(own.dataset, IterableDataset):
        samples = _FullBatches(own.dataset, size) if own.drop_last else own.dataset
        steps: dict[str, Any] = {"dataset": samples, "batch_size": num_batches * size}
    else:
        steps = {"dataset": own.dataset, "batch_sampler": _Steps(own.batch_sampler, num_batches)}
    prepared.base_dataloader = type(own)(**steps, **kept)
    prepared._drop_last = False  # incomplete batches were left out already


def _share(batch_sampler: Any) -> int:
    """The samples of a batch that one process gets; 0: it is not known."""
    size = getattr(batch_sampler, "batch_size", None) or 0
    return size // (batch_sampler.num_processes if getattr(batch_sampler, "split_batches", False) else 1)


class _Steps(BatchSampler):
    """The indices of several batches as one. Accelerate reads and sets the attributes of the inner batch sampler."""

    def __init__(self, batch_sampler: Any, num_batches: int) -> None:
        self.batch_sampler = batch_sampler
        self.num_batches = num_batches
        self.batch_size = num_batches * (getattr(batch_sampler, "batch_size", None) or 1)

    @property
    def _innermost(self) -> Any:
        found = self.batch_sampler
        while hasattr(found, "batch_sampler"):
            found = found.batch_sampler
        return found

    @property
    def sampler(self) -> Any:
        return getattr(self._innermost, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self._innermost.sampler = sampler

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self.batch_sampler)
        while step := list(itertools.islice(batches, self.num_batches)):
            yield list(itertools.chain.from_iterable(step))

    def __len__(self) -> int:
        return -(-len(self.batch_sampler) // self.num_batches)


class _FullBatches(IterableDataset[Any]):
    """The samples of another dataset, without those after the last full batch."""

    def __init__(self, dataset: Any, size: int) -> None:
        self.dataset = dataset
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.dataset)
        while len(batch := list(itertools.islice(samples, self.size))) == self.size:
            yield from batch

    def __len__(self) -> int:
        return len(self.dataset) // self.size * self.size

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.dataset, name)  # such as `set_epoch`, which Accelerate calls


def _collated(collate: Callable[[Any], Any], size: int, padding: Padding, samples: Sequence[Any]) -> Any:
    """One batch of all samples; if batches are mappings, each `size` samples are collated by themselves."""
    batches = [collate(samples[start : start + size]) for start in range(0, len(samples), size)]
    return gathered(batches, padding) if isinstance(batches[0], Mapping) else collate(samples)
