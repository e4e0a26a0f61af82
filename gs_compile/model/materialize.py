"""materialize, streaming: offloaded parameters have their values in the model again, for code that uses them.

    with gs_compile.materialize(model):             with gs_compile.materialize(model, write=True):
        model.generate(ids)                             model.lm_head.weight.mul_(0.5)

The values are mapped from unnamed files, so memory need not hold all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gs_compile.errors import ReleasedParameterError, StepOrderError
from gs_compile.model.parameter_store import ParameterStore, Reader, in_full
from gs_compile.model.replaced import replaced
from gs_compile.model.residency import is_offloaded, materialized, residency_of
from gs_compile.runtime.ranks import Ranks

_ALONE = "what the first rank reads alone"


@contextmanager
def materialize(model: nn.Module, *, write: bool = False, master: bool = False) -> Iterator[nn.Module]:
    """All parameters of `model` hold their values inside the block, with every update done; later they are offloaded.

    On a CPU they are mapped from files; a GPU needs room for them. With `write`, changes are stored (unless the block
    fails), in fp32 masters too, also those of a block around it so far. Otherwise changes are lost, except those of a
    model that has not run yet. With `master`, parameters that compute in bf16 are replaced by their fp32 masters.

    In the block the model runs as in plain PyTorch, for evaluation: a call with gradients enabled raises
    StepOrderError. So does the block itself between backward and optimizer.step(). Training continues afterwards as if
    nothing had happened.
    """
    offloaded = [parameter for parameter in model.parameters() if is_offloaded(parameter)]
    with ExitStack() as stack:
        for parameter in offloaded:
            stack.enter_context(materialized(parameter, master=master))
        if offloaded:
            stack.enter_context(_plain_calls(model))
        shapes = {each: each.shape for each in model.parameters() if residency_of(each).is_materialized}  # in any block
        yield model
        if write:
            _refuse_other_shapes(shapes)
            homes = (residency_of(parameter).tiered for parameter in shapes)
            in_full(partial(_store, shapes), next((home.store for home in homes if home is not None), None))


def _store(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        residency_of(parameter).write(parameter, parameter.data)


def _refuse_other_shapes(shapes: Mapping[nn.Parameter, torch.Size]) -> None:
    """Raise ReleasedParameterError if parameters do not have these shapes any more, for example after a resize."""
    for parameter, shape in shapes.items():
        if parameter.shape != shape:
            raise ReleasedParameterError(
                f"a parameter of shape {tuple(shape)} was given shape {tuple(parameter.shape)} inside of materialize, "
                "and cannot be stored. Change the model before its first call, and make its optimizer afterwards. "
                "Nothing was stored"
            )


@contextmanager
def whole_states(model: nn.Module) -> Iterator[None]:
    """State dicts that all ranks make in the block hold whole tensors on each, mapped from files."""
    with ExitStack() as stack:
        for store in stores_of(model.parameters()):
            stack.enter_context(replaced(vars(store), shows_whole=True))
        yield


@contextmanager
def on_first_rank(model: nn.Module) -> Iterator[bool]:
    """All ranks enter the block. The first, which gets True, may read anything in it, and gets whole tensors. The
    others take part in its reads at the end of their block, and keep nothing. So state dicts are those of one rank.
    """
    stores = stores_of(model.parameters())
    for store in stores:
        store.synchronize()
    ranks = stores[0].tiers.setting.ranks if stores else None
    if ranks is None:
        with _whole_stashes(model) as mesh:
            yield mesh is None or mesh.get_local_rank() == 0
    elif ranks.place:
        yield False
        while (asked := ranks.from_first(_ALONE, _nothing)) is not None:
            number, *what = asked
            stores[number].tiers.read_any(*what)
    else:
        with ExitStack() as stack:
            stack.callback(ranks.from_first, _ALONE, _nothing)
            for number, store in enumerate(stores):
                stack.enter_context(replaced(vars(store.tiers), before_read=partial(_tell, ranks, number)))
            yield True


@contextmanager
def _whole_stashes(model: nn.Module) -> Iterator[DeviceMesh | None]:
    """Before the first call: parameters whose rows ranks share are whole on each rank. Yields the ranks' mesh."""
    mesh = None
    with ExitStack() as stack:
        for parameter in filter(is_offloaded, model.parameters()):
            residency = residency_of(parameter)
            if residency.mesh is not None:
                mesh = residency.mesh
                stack.enter_context(replaced(vars(residency), stash=residency.value(parameter, master=True)))
        yield mesh


def _nothing() -> Any:
    """Tells the other ranks that the first one has ended its reads."""


def _tell(ranks: Ranks, number: int, *what: Any) -> None:
    ranks.from_first(_ALONE, lambda: (number, *what))


@contextmanager
def streaming(model: nn.Module) -> Iterator[nn.Module]:
    """The model runs as in plain PyTorch inside the block, and reads parameters as layers use them, every update done.

    This is for evaluations that cannot run in layers, such as `generate` with its cache. Each use reads a parameter
    once. Parameters in memory are not copied, except those in bf16 whose masters are split. Copies and others stay in
    memory until the end of the block as far as the budget has room: `host_memory`, or the device's own memory. As in
    `materialize`, a call with gradients enabled raises StepOrderError.
    """
    parameters = list(model.parameters())
    for store in stores_of(parameters):
        store.reader = None
    with _plain_calls(model), reading(parameters, _reader(stores_of(parameters))):
        yield model


@contextmanager
def evaluating(args: Sequence[Any]) -> Iterator[None]:
    """A call that does not run in layers reads the parameters among `args` as in `streaming`.

    What the budget has room for is kept until the next call that does.
    """
    stores = stores_of(args)
    reader = next((store.reader for store in stores if store.reader is not None), None) or _reader(stores)
    for store in stores:
        store.reader = reader
    with reading(args, reader):
        yield


@contextmanager
def reading(args: Sequence[Any], reader: Reader) -> Iterator[None]:
    """The parameters among `args` that are offloaded are read by `reader`, unless they have one."""
    with ExitStack() as stack:
        for residency in map(residency_of, filter(is_offloaded, args)):
            if residency.reader is None:
                stack.enter_context(replaced(vars(residency), reader=reader))
        yield


def _reader(stores: Sequence[ParameterStore]) -> Reader:
    """A reader with the room that steps leave, once every update is done."""
    for store in stores:
        store.synchronize()
    room_nbytes = min((store.room_nbytes for store in stores), default=0)
    for ranks in filter(None, dict.fromkeys(store.tiers.setting.ranks for store in stores)):  # in one order on all
        room_nbytes = min(ranks.agree("the room for parameters", room_nbytes))  # what one keeps, no other reads again
    return Reader(room_nbytes)


def stores_of(args: Iterable[Any]) -> list[ParameterStore]:
    """The stores of the parameters among `args`, each once, in the same order on all ranks."""
    homes = (residency_of(each).tiered for each in args if is_offloaded(each))
    return list(dict.fromkeys(home.store for home in homes if home is not None))


@contextmanager
def _plain_calls(model: nn.Module) -> Iterator[None]:
    """Calls of a model that is compiled, as a whole or in part, run as in plain PyTorch."""
    with ExitStack() as stack:
        for module in model.modules():
            if module is model or module._compiled_call_impl is not None:
                plain = partial(_evaluate, getattr(module, "_orig_mod", module))  # that model itself
                stack.enter_context(replaced(vars(module), _compiled_call_impl=plain))  # past __setattr__
        yield


def _evaluate(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.is_grad_enabled():
        raise StepOrderError(
            "inside gs_compile.materialize() or streaming() the model cannot be trained, only evaluated: call it "
            "under torch.no_grad(), or leave the block"
        )
    return module._call_impl(*args, **kwargs)
