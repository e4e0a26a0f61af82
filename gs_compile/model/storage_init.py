"""A model larger than memory is built as usual, and its values go to storage as they are drawn.

    factory()   each operation runs as it is; then
                [1] what is large and new moves to a file that is mapped into memory
                [2] pages of the tensors that were used longest ago leave memory
    its model   [3] the value of each parameter is stashed in its file; a placeholder stands for it

Nothing is recorded and replayed: torch's own code draws each random number, in its own order, into the tensor for which
it is meant. So the values are bitwise those of ordinary construction, whatever the initialiser does: views, copies,
arithmetic, reading a value, even numpy. A mapped tensor is an ordinary tensor of which the kernel keeps in memory what
is in use.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from gs_compile.capture.internals import TorchDispatchMode, tree_leaves, tree_map_only
from gs_compile.errors import InitialisationError, RankError
from gs_compile.model.aliases import is_plain, overlapping
from gs_compile.model.files import SMALL_NBYTES, directory, is_mapped, leave_memory, map_file, shared, trim
from gs_compile.model.replaced import replaced
from gs_compile.model.residency import is_offloaded, residency_of, stash
from gs_compile.model.stand_in import address
from gs_compile.options import Options
from gs_compile.runtime.groups import mesh_of, team_of
from gs_compile.runtime.stream import is_in_host_memory

CACHE_NBYTES = 256 << 20  # of mapped tensors in memory: enough to draw, scale and copy a layer's usual weights

aten = torch.ops.aten
_UNINITIALISED = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)


def init_on_storage(
    factory: Callable[[], nn.Module],
    *,
    storage: Any = None,
    device: torch.device | str | None = None,
    group: Any = None,
) -> nn.Module:
    """Build the model of `factory` with its parameters on storage; values are bitwise those of ordinary construction.

    `storage` is as in `Options`; of several directories the first has the files. Memory holds at most 256 MiB of
    parameters, and what one operation needs. Tied parameters stay tied, and buffers are in memory. `device` is where
    the model computes, by default the CPU, on which the factory builds it. `model.to(device)` changes it later, and
    moves no parameter's value.

    If several ranks train together (by default all of torch.distributed's, otherwise those of `group`), all of them
    call this with the same factory. The values are the first rank's. Once all is built, each rank's files have its
    rows.

    Raises InitialisationError, naming the parameter, for what cannot be stored in a file: values that are not on the
    CPU, lazy or tensor-like parameters, two parameters that share memory, a parameter that is resized. Raises
    StorageFullError, and RankError if ranks have built different models. Warns of parameters whose values were not made
    by torch operations in this thread, for example by numpy: their values are right, but they were in memory until all
    was built.
    """
    with NewTensorsInFiles(directory(Options.of({"storage": storage}).storage[0])) as files:
        model = factory()
    resident = offload(model, files, group)
    if resident:
        warnings.warn(
            "initial values that no torch operation of this thread has made (from_numpy, a checkpoint, a thread) were "
            f"in memory until the model was built; they are right, but took their room: {', '.join(resident)}",
            stacklevel=2,
        )
    return model if device is None else model.to(device)


def offload(model: nn.Module, files: NewTensorsInFiles, group: Any) -> list[str]:
    """Offload the parameters of a model that was built within `files`; group and errors: see `init_on_storage`.

    Returns the names of those whose values were not in files before.
    """
    parameters = {name: each for name, each in model.named_parameters() if not is_offloaded(each)}
    buffers = dict(model.named_buffers())
    for name, parameter in parameters.items():
        _check(name, parameter)
    _check_apart(parameters, buffers)
    resident = _stash_all(parameters, files)
    _share(parameters, files.folder, group)
    mapped = [buffer for buffer in buffers.values() if _in_file(buffer)]
    for buffer, copied in zip(mapped, copy.deepcopy([buffer.detach() for buffer in mapped]), strict=True):
        buffer.data = copied  # in memory; those that shared a file go on sharing
    files.drop_pages(down_to_nbytes=0)
    return resident


# While the factory runs -----------------------------------------------------------------------------------------------


class NewTensorsInFiles(TorchDispatchMode):
    """Every large new tensor is in a file, of which only those used last are in memory: `cache_nbytes` of them."""

    _is_aside = False

    def __init__(self, folder: Path, cache_nbytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.folder = folder
        self.cache_nbytes = CACHE_NBYTES if cache_nbytes is None else cache_nbytes
        self.left_nbytes = 0  # bytes that tensors have left in the heap when they went to files
        self.recent: OrderedDict[int, torch.UntypedStorage] = OrderedDict()  # by address; the last one was used last

    def __torch_dispatch__(
        self, operation: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._is_aside:
            return operation(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs)) if _is_plain(each)]
        _refuse_resize(operation, args)
        self._touch(tensors)  # and make room, before the operation needs more
        results = operation(*args, **(kwargs or {}))
        # `lift_fresh` is how torch.tensor() shows what it has just made.
        old = set() if operation is aten.lift_fresh.default else {address(each) for each in tensors}
        old |= {each.data_ptr() for each in args if isinstance(each, torch.UntypedStorage)}
        files: dict[int, torch.UntypedStorage] = {}

        def in_file(result: torch.Tensor) -> torch.Tensor:
            if not _is_plain(result) or address(result) in old:
                return result
            storage = result.untyped_storage()
            if storage.nbytes() < SMALL_NBYTES or not storage.resizable():  # memory of numpy's, say, is used by others
                return result
            if storage.data_ptr() not in files:  # [1]
                files[storage.data_ptr()] = file = map_file(self.folder, storage.nbytes())
                if operation.overloadpacket not in _UNINITIALISED:
                    file.copy_(storage)
            return _alias(result, files[storage.data_ptr()])

        results = tree_map_only(torch.Tensor, in_file, results)
        self._trim(sum(file.nbytes() for file in files.values()))
        for each in [each for each in tensors if files and not _in_file(each)]:
            leave_memory(each.untyped_storage())  # of a checkpoint that is mapped
        self._touch(each for each in tree_leaves(results) if _is_plain(each))
        return results

    def aside(self) -> AbstractContextManager[None]:
        """In the block new tensors stay in memory."""
        return replaced(vars(self), _is_aside=True)

    def drop_pages(self, *, down_to_nbytes: int) -> None:
        """[2] Drop pages from this process's memory; the kernel writes them to the file when it wants to."""
        while sum(storage.nbytes() for storage in self.recent.values()) > down_to_nbytes:
            leave_memory(self.recent.popitem(last=False)[1])

    def _trim(self, nbytes: int) -> None:
        """Note bytes that an operation has made in memory before they went to files; now and then, trim the heap."""
        self.left_nbytes += nbytes
        if self.left_nbytes > self.cache_nbytes // 4:
            trim()
            self.left_nbytes = 0

    def _touch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that these are used; pages of those used longest ago leave memory."""
        for tensor in filter(_in_file, tensors):
            self.recent[address(tensor)] = tensor.untyped_storage()
            self.recent.move_to_end(address(tensor))
        self.drop_pages(down_to_nbytes=self.cache_nbytes)


def _refuse_resize(operation: Any, args: tuple[Any, ...]) -> None:
    if operation is not aten.resize_.default or not _in_file(args[0]):
        return
    numel = args[0].storage_offset() + torch.Size(args[1]).numel()
    if numel * args[0].element_size() > args[0].untyped_storage().nbytes():
        raise InitialisationError(
            f"resize_ of a tensor of shape {tuple(args[0].shape)} to {tuple(args[1])}: a tensor on storage cannot "
            "grow. Make it of its final shape at once"
        )


def _is_plain(value: object) -> bool:
    """Whether it is a tensor with memory of its own on the CPU."""
    return is_plain(value) and is_in_host_memory(value)


def _in_file(tensor: torch.Tensor) -> bool:
    return _is_plain(tensor) and is_mapped(tensor.untyped_storage())


def _alias(tensor: torch.Tensor, storage: torch.UntypedStorage | None = None) -> torch.Tensor:
    """A new tensor on `storage` (by default the same one) with the layout of `tensor`, unrelated for autograd."""
    storage = tensor.untyped_storage() if storage is None else storage
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


# When it has run ------------------------------------------------------------------------------------------------------


def _stash_all(parameters: dict[str, nn.Parameter], files: NewTensorsInFiles) -> list[str]:
    """Stash the values of parameters in their files. Values that are in none go to new files; returns their names."""
    resident = [
        name
        for name, each in parameters.items()
        if each.untyped_storage().nbytes() >= SMALL_NBYTES and not _in_file(each)
    ]
    for name, parameter in parameters.items():
        values = _alias(parameter)
        if name in resident:
            with files:
                values = values.clone()
        stash(parameter, values=values, folder=files.folder)  # [3]
    return resident


def _share(parameters: dict[str, nn.Parameter], folder: Path, group: Any) -> None:
    """With several ranks, each keeps its rows of the values that the first has drawn."""
    team = team_of(Options(group=group))
    if team is None:
        return
    mesh = mesh_of(team)
    built: list[Any] = [None] * mesh.size()
    own = {name: (tuple(each.shape), each.dtype) for name, each in parameters.items()}
    dist.all_gather_object(built, own, mesh.get_group())
    if any(each != built[0] for each in built):
        names = {name for each in built for name in (*each, *built[0]) if each.get(name) != built[0].get(name)}
        differ = sorted(names)[:5]
        raise RankError(f"the ranks have built different models: {', '.join(differ)} differ. Build the same on all")
    for parameter in parameters.values():
        residency = residency_of(parameter)
        values = residency.stashed_value(parameter)
        if values.nbytes >= SMALL_NBYTES:
            residency.stash = shared(values, folder, mesh)
        else:
            residency.stash = values.contiguous()
            dist.broadcast(residency.stash, group=mesh.get_group(), group_src=0)


def _check(name: str, parameter: torch.Tensor) -> None:
    """Raise InitialisationError if the parameter's values cannot be in a file."""
    if is_lazy(parameter):
        fault, remedy = "has no shape yet", "Give the module its sizes instead of a lazy one"
    elif not is_in_host_memory(parameter):
        fault, remedy = f"is on {parameter.device}", "Build the model on the CPU; it is moved when it runs"
    elif not _is_plain(parameter):
        fault, remedy = f"is a {type(parameter).__name__}, {parameter.layout}", "Only plain dense parameters are kept"
    else:
        return
    raise InitialisationError(f"parameter {name} {fault}, so its values cannot go to storage. {remedy}")


def _check_apart(parameters: dict[str, nn.Parameter], buffers: dict[str, torch.Tensor]) -> None:
    """Raise if a parameter shares memory with another one or a buffer: in files they would not."""
    tensors = {name: each for name, each in {**buffers, **parameters}.items() if _is_plain(each)}
    if found := overlapping(tensors, lambda *names: not parameters.keys().isdisjoint(names)):
        raise InitialisationError(
            f"{found[0]} and {found[1]} are two tensors in the same memory, but on storage each would have its own. "
            "Tie them by assigning the same Parameter to both modules"
        )
