"""in_memory: an optimizer's parameters whose values, gradients and states are in memory.

The compiled model does not read them; an example are those of an eager head. `optimizer.step()` updates them by the
same rule, with the factor that clips all gradients together. Ranks average their gradients, as DistributedDataParallel
does.
"""

from __future__ import annotations

import gc
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gs_compile.capture.internals import changes
from gs_compile.errors import OptimizerError
from gs_compile.machine import in_groups
from gs_compile.model.optimizer import Optimizer
from gs_compile.model.optimizer_state import has_values, whole_step
from gs_compile.model.parameter_store import as_step
from gs_compile.model.residency import is_offloaded, residency_of
from gs_compile.options import Options
from gs_compile.runtime.muon import STATES, update_whole
from gs_compile.runtime.ranks import Ranks, ranks_of
from gs_compile.runtime.step_record import StepRecord

BUCKET_NBYTES = 25 << 20  # that are exchanged together, as in DistributedDataParallel


def parameters_in_memory(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Tensor]]:
    """The parameters of an optimizer that are in memory, and their places in it; not those that are materialized."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return (
        (place, each)
        for place, each in enumerate(parameters)
        if not (is_offloaded(each) or residency_of(each).is_materialized)
    )


def by_name(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, Tensor]]:
    """The parameters in memory by the names that `give_names` has given, in the names' order, as on all ranks."""
    named = ((residency_of(each).name or f"parameter {place}", each) for place, each in parameters_in_memory(groups))
    return sorted(named, key=itemgetter(0))


def give_names(groups: Sequence[Mapping[str, Any]]) -> None:
    """Name the parameters in memory as the smallest module does that has all of them, or the most.

    Their places in an optimizer may differ between ranks, for example if a script has iterated over a set of names.
    """
    for module, own in _owners_of({each for _, each in parameters_in_memory(groups)}):
        for name, parameter in sorted(module.named_parameters(remove_duplicate=False), key=itemgetter(0)):
            if parameter in own:
                residency_of(parameter).name = f"{type(module).__name__}.{name}"
                own.remove(parameter)


def _owners_of(
    parameters: Iterable[Tensor], outside: Set[torch.nn.Module] = frozenset()
) -> Iterator[tuple[torch.nn.Module, set[Tensor]]]:
    """The smallest module that has all parameters, or the most, with those that it has; and the same for the others.

    outside: if given, the largest modules that have none of these.
    """
    left, order = set(parameters), -1 if outside else 1
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)) if left else ()
    owners = [(each, own) for each in found if (own := left.intersection(each.parameters()))]
    pairs = [(each, own) for each, own in owners if outside.isdisjoint(each.modules())]
    for module, own in sorted(pairs, key=lambda each: (-len(each[1]), order * sum(1 for _ in each[0].modules()))):
        if new := own & left:
            left -= own
            yield module, new


def modules_beside(optimizer: Optimizer, own: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules outside of the compiled model, `own`, that have an optimizer's parameters, and those in them. Each
    has a prefix for names of what it has: it begins with a parameter's place in the optimizer.
    """
    inside = set(own)
    known = {parameter for module in inside for parameter in module.parameters(recurse=False)}
    in_memory = parameters_in_memory(optimizer.param_groups)
    places = {each: place for place, each in in_memory if inside and each not in known}
    for module, parameters in _owners_of(places, inside):
        start = min(places[each] for each in parameters)
        for path, each in module.named_modules():
            yield f"{start}.{path}{path and '.'}", each


def with_gradients(groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """The parameters in memory that have a gradient."""
    return [each for _, each in parameters_in_memory(groups) if each.grad is not None]


def begin(groups: Sequence[Mapping[str, Any]], record: StepRecord, ranks: Ranks | None = None) -> None:
    """Include gradients in memory, averaged over ranks, in the norm of a step that begins."""
    if ranks is not None:
        record.num_ranks = ranks.total
        average(groups, record, ranks)
    count(groups, record)


def count(groups: Sequence[Mapping[str, Any]], record: StepRecord) -> None:
    """Include gradients in memory, as they are now, in the norm of a step."""
    square = _sum_of_squares(with_gradients(groups)) * record.num_ranks**2  # as the others are, which are summed
    if square or "resident" in record.squares:
        record.squares["resident"] = lambda: square


def average(groups: Sequence[Mapping[str, Any]], record: StepRecord, ranks: Ranks, since: str = "") -> None:
    """Average over ranks the gradients in memory that are new on any rank."""
    beside = [each for each in by_name(groups) if each[1].requires_grad]
    gradients = [parameter.grad for _, parameter in beside]
    are_new = [each is not None and record.means.get(each) != changes(each) for each in gradients]
    means = _means(ranks, beside, gradients, are_new, since) if beside else {}
    for place, mean in means.items():
        beside[place][1].grad = mean
    record.means = {**record.means, **{mean: changes(mean) for mean in means.values()}}


def refuse_other_gradients(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise OptimizerError, before a step is closed, if a parameter in memory that has a gradient is neither float32
    nor float64, which would need a master, or if the gradient is sparse.
    """
    for parameter in with_gradients(groups):
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise OptimizerError(
                f"a parameter of shape {tuple(parameter.shape)} outside of the compiled model has a gradient of layout "
                f"{parameter.grad.layout}: leave sparse=True out"
            )
        if parameter.dtype not in (torch.float32, torch.float64):
            raise OptimizerError(
                f"a parameter of shape {tuple(parameter.shape)} and {parameter.dtype} is outside of the compiled "
                "model, so it has no fp32 master: convert it to float32"
            )


@torch.no_grad()
def update(optimizer: Optimizer, parameters: Sequence[Tensor], record: StepRecord) -> None:
    """One step of parameters in memory that have gradients. States are torch's; what they lack starts at zero."""
    group_of = optimizer.group_of
    for parameter in parameters if not record.skipped else ():
        assert parameter.grad is not None
        place, factor = group_of[parameter], record.factor * record.num_ranks
        hyper, group = record.hypers[place], optimizer.param_groups[place]
        state, of_run = optimizer.state[parameter], record.number - optimizer.steps.missed.get(parameter, 0)
        number = 1 + (whole_step({"step": of_run - 1, **state}) if has_values(state) else 0)
        state["step"] = as_step(number)  # its own: it has no gradient in some steps of the others
        apply, components = optimizer.rule.apply, optimizer.rule.components(hyper)
        if (matrices := optimizer.matrices(parameter, group)) is not None:
            apply, components, hyper = partial(update_whole, matrices=matrices), STATES, hyper["matrices"]
        for name in components:
            found = state.get(name)
            if not isinstance(found, Tensor) or found.is_meta:
                found = torch.zeros(parameter.shape)
            state[name] = found.cpu().to(parameter.dtype).contiguous()  # one that was loaded may have another form
        values, gradient = (each.detach().cpu().reshape(-1) for each in (parameter, parameter.grad * factor))
        apply(values, gradient, [state[name].view(-1) for name in components], hyper, number)
        parameter.copy_(values.view(parameter.shape))


def _sum_of_squares(parameters: Sequence[Tensor]) -> float:
    """The sum of the squares of their gradients; infinite if an element is not finite."""
    squares = [float(parameter.grad.double().square().sum()) for parameter in parameters if parameter.grad is not None]
    return math.fsum(squares) if all(map(math.isfinite, squares)) else math.inf


# The mean over ranks --------------------------------------------------------------------------------------------------


def ranks_that_average(first: Tensor, named: Iterable[tuple[str, Tensor]], options: Options) -> Ranks | None:
    """The ranks of a model that none of our optimizers trains; None: there are no others, or a DistributedDataParallel
    averages its gradients.

    first: the first parameter that it trains; named: all parameters that it reads, and buffers. In its first step they
    get the first rank's values.
    """
    residency = residency_of(first)
    if residency.ranks is None:
        ranks = None if is_wrapped(first) else ranks_of(options)
        if ranks is not None:
            begin_alike(ranks, named)
        residency.ranks = (ranks,)
    return residency.ranks[0]


def averaged(ranks: Ranks, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The mean of each gradient over all ranks; shapes are the same on all."""
    ranks.agree_on(f"the mean of {len(gradients)} gradients, {sum(each.numel() for each in gradients)} elements")
    means = []
    for bucket in _buckets(gradients):
        flat = torch.cat([each.reshape(-1) for each in bucket]) / ranks.total  # the sum may be too large for float16
        ranks.sum(flat, "the mean of gradients")
        parts = flat.split([each.numel() for each in bucket])
        means += [part.view(each.shape) for part, each in zip(parts, bucket, strict=True)]
    return means


def averaged_of_any(
    ranks: Ranks, gradients: Sequence[Tensor | None], parameters: Mapping[int, tuple[str, Tensor]]
) -> list[Tensor | None]:
    """The mean over all ranks of each gradient whose parameter is given, None if no rank has one; others unchanged.

    parameters: by the places of their gradients, with their names, which are the same on all ranks.
    """
    given = [gradients[place] for place in parameters]
    adds = ", in one more backward" * any(parameter.grad is not None for _, parameter in parameters.values())
    means = _means(ranks, list(parameters.values()), given, [each is not None for each in given], adds)
    found = {place: means[number] for number, place in enumerate(parameters) if number in means}
    return [found.get(place, gradient) for place, gradient in enumerate(gradients)]


def _means(
    ranks: Ranks,
    named: Sequence[tuple[str, Tensor]],
    gradients: Sequence[Tensor | None],
    are_new: list[bool],
    when: str,
) -> dict[int, Tensor]:
    """By place, the mean over all ranks of each gradient that is new on any rank.

    A rank that has none gives zeros, as with DistributedDataParallel's `find_unused_parameters`.
    """
    names = [name for name, _ in named]
    which = f"up to {names[-1][-40:]} ({zlib.crc32(repr(names).encode()):08x})" if names else ""
    what = f"which of {len(named)} parameters {which} have gradients{when}"
    ranks.agree_on(what)
    ranks.sum(counts := torch.tensor(are_new, dtype=torch.int32), what)
    places = [place for place, number in enumerate(counts.tolist()) if number]
    pairs = [(gradients[place], named[place][1]) for place in places]
    whole = [torch.zeros_like(parameter) if gradient is None else gradient for gradient, parameter in pairs]
    return dict(zip(places, averaged(ranks, whole), strict=True)) if places else {}


def begin_alike(ranks: Ranks, named: Iterable[tuple[str, Tensor]]) -> None:
    """Give parameters in memory, and buffers, the first rank's values; their names are the same on all ranks.

    No forward changes a buffer (capture/split.py), so once is as often as DistributedDataParallel needs to.
    """
    for name, tensor in named:
        values = tensor.detach().cpu().contiguous()
        ranks.broadcast(values, what=f"the first values of {name}")
        tensor.data.copy_(values)


def is_wrapped(parameter: Tensor) -> bool:
    """Whether a DistributedDataParallel has it."""
    if not torch.distributed.is_initialized():  # none can be made then, and there are many objects
        return False
    found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return any(each is parameter for model in found for each in model.parameters())


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive gradients of one dtype and device, in groups of at most BUCKET_NBYTES; a larger one is alone."""
    for _, alike in groupby(gradients, lambda each: (each.dtype, each.device)):
        yield from in_groups(alike, BUCKET_NBYTES)
