"""network: what moves the card's memory between ranks: a collective is a kernel on a stream of its group, as NCCL's are.

It begins when the stream that it was launched from comes to it, and that stream goes on beside it, unless it waits:
`wait` returns at once. Where a rank is gone the kernel never ends, until the group is aborted.

What is in host memory goes to gloo, by functions of Python too: torch has a group that Python derives keep Python's
lock while it enters gloo's queue, and gloo's thread, which keeps the queue as it frees a tensor, may wait for that lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import card
import torch
import torch.distributed as dist

NAME = "cardnet"


class _Launched(dist._Work):
    """The stream waits for it, and the host does not."""

    def __init__(self, end: torch.Event) -> None:
        super().__init__()
        self._end = end

    def wait(self, timeout: Any = None) -> bool:
        torch.accelerator.current_stream(self._end.device).wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return False


class Group(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._own = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._own)
        self._stream: torch.Stream | None = None
        self._promises: list[Any] = []
        self._is_aborted = False
        self._turn = threading.Lock()  # as collectives are launched, so they are done
        self._before = threading.Event()
        self._before.set()

    def getBackendName(self) -> str:  # noqa: N802  torch asks for it by this name
        return NAME

    def abort(self) -> None:
        """What other ranks do not come to is over."""
        self._is_aborted = True
        for promise in self._promises:
            promise.keep()

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return self._own.broadcast(tensors, options)

    def all_gather_single_coalesced(self, wholes: Any, owns: Any, options: Any = None) -> Any:
        (whole,), (own,) = wholes, owns
        return self._allgather_base(whole, own)

    def _allgather_base(self, whole: Any, own: Any, options: Any = None) -> Any:
        if whole.device.type != card.NAME:
            return self._own.allgather([list(whole.chunk(self.size()))], [own])
        return self._launch(whole, lambda: self._gathered(_bytes(own), list(_bytes(whole).chunk(self.size()))))

    all_gather_single = _allgather_base

    def _reduce_scatter_base(self, own: Any, whole: Any, options: Any = None) -> Any:
        def run() -> None:
            everyone = [torch.empty_like(_bytes(whole)) for _ in range(self.size())]
            self._gathered(_bytes(whole), everyone)
            _bytes(own).copy_(sum(each.chunk(self.size())[self.rank()] for each in everyone))

        return self._launch(own, run)

    reduce_scatter_single = _reduce_scatter_base

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        (tensor,) = tensors
        if tensor.device.type != card.NAME:
            return self._own.allreduce(tensors, options)

        def run() -> None:
            everyone = [torch.empty_like(_bytes(tensor)) for _ in range(self.size())]
            self._gathered(_bytes(tensor), everyone)
            _bytes(tensor).copy_(sum(everyone))

        return self._launch(tensor, run)

    def _gathered(self, own: torch.Tensor, everyone: list[torch.Tensor]) -> None:
        self._own.allgather([everyone], [own.contiguous()]).wait()

    def _launch(self, tensor: torch.Tensor, run: Callable[[], None]) -> _Launched:
        begun, end = torch.Event(tensor.device), torch.Event(tensor.device)
        begun.record(torch.accelerator.current_stream(tensor.device))
        self._stream = self._stream or torch.Stream(tensor.device)
        self._stream.wait_event(begun)
        with self._stream:
            promise = card.native().promise(tensor.device.index)
        end.record(self._stream)
        self._promises.append(promise)
        before, self._before = self._before, threading.Event()
        given = begun, promise, before, self._before, run
        threading.Thread(target=self._carry_out, args=given, name=NAME, daemon=True).start()
        return _Launched(end)

    def _carry_out(
        self, begun: Any, promise: Any, before: threading.Event, after: threading.Event, run: Callable[[], None]
    ) -> None:
        before.wait()
        begun.synchronize()
        try:
            run()
        except RuntimeError:  # a rank is gone: the kernel hangs, until it is aborted
            if not self._is_aborted:
                return
        promise.keep()
        after.set()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return card.host_view(tensor) if tensor.device.type == card.NAME else tensor


def register() -> None:
    """The card's collectives are these."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, Group, devices=[card.NAME])
