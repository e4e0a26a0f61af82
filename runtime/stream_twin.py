"""stream_twin: a CPU that behaves as a device with memory and streams of its own: what a GPU's faults are found with.

[1] What is launched runs later, in the thread of its stream, after a delay drawn from a seed; so do events.
[2] Memory that is freed is filled with 0xFF (not a number) in the order of the stream it was taken on, and handed out
    again at once, as a caching allocator does; `copy` keeps memory until the copy has run.
[3] Copies from and to host memory need pinned memory.
[4] An observer is told of every access and every wait, so that a test can see which accesses no wait orders.

Tensors of the twin are a subclass of torch's: an operation on them returns at once, with its outputs' memory.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

from gs_compile.runtime.stream import Device, Reading
from gs_compile.runtime.stream_twin_queue import Block, Observer, Span, State, TwinEvent, TwinStream

Tensor = torch.Tensor
HOST_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}


class TwinTensor(torch.Tensor):
    """A tensor in the twin's memory. `raw` sees the same bytes now; `block` owns them."""

    raw: Tensor
    block: Block
    twin: Twin

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, TwinTensor))
        return first.twin.dispatch(func, args, kwargs)


class Twin(Device):
    """The device; `streams` end with `close`. A seed draws the delays, up to `delay_seconds` each."""

    has_own_memory = True

    def __init__(self, seed: int = 0, delay_seconds: float = 1e-3, observer: Observer | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.state = State(seed, delay_seconds, observer or Observer())
        self.pinned: dict[int, int] = {}
        self.streams = [TwinStream(self.state, "compute")]
        self._local = threading.local()
        self._free: dict[tuple[int, TwinStream], list[Block]] = defaultdict(list)
        self._freed: queue.SimpleQueue[Block] = queue.SimpleQueue()  # told by destructors, on any thread
        self._leaving: list[tuple[Block, list[TwinEvent]]] = []
        self._lock = threading.RLock()
        self._fake = FakeTensorMode()

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        self.state.check()

    # Order -----------------------------------------------------------------------------------------------------------

    def new_stream(self) -> TwinStream:
        self.streams.append(TwinStream(self.state, str(len(self.streams))))
        return self.streams[-1]

    def current_stream(self) -> TwinStream:
        return getattr(self._local, "stream", self.streams[0])

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def record(self, stream: Any) -> TwinEvent:
        event = TwinEvent(self.state)
        self.state.observer.recorded(stream, event)
        stream.launch(event.happen)
        return event

    def seconds(self, start: Any, end: Any) -> tuple[float, float]:
        return start.seconds, end.seconds

    def synchronize(self) -> None:
        self.record(self.current_stream()).synchronize()

    def launch(self, name: str, run: Callable[[], None], reads: Sequence[Span], writes: Sequence[Span]) -> None:
        stream = self.current_stream()
        self.state.observer.launched(stream, name, reads, writes)
        stream.launch(run)

    # Memory ----------------------------------------------------------------------------------------------------------

    def memory_nbytes(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> Tensor:
        like = torch.empty_strided(shape, stride or torch.empty(shape, device="meta").stride(), device="meta")
        nbytes = like.untyped_storage().nbytes() // like.itemsize * dtype.itemsize
        with self._lock:
            block = self._take(-(-max(nbytes, 1) // 512) * 512)
        handle = block.bytes[: max(nbytes, 1)]  # lives as long as any tensor in this memory
        weakref.finalize(handle, self._freed.put, block)
        storage = torch.frombuffer(handle, dtype=torch.uint8).untyped_storage()
        return self.wrap(torch.empty(0, dtype=dtype).set_(storage, 0, shape, like.stride()), block)

    def wrap(self, raw: Tensor, block: Block) -> TwinTensor:
        tensor: TwinTensor = torch.Tensor._make_subclass(TwinTensor, raw)
        tensor.raw, tensor.block, tensor.twin = raw, block, self
        return tensor

    def _take(self, nbytes: int) -> Block:  # [2]
        while not self._freed.empty():
            block = self._freed.get()
            self._leaving.append((block, [self.record(stream) for stream in block.used_on]))
        for entry in list(self._leaving):
            block, events = entry
            if all(event.query() for event in events):
                self._leaving.remove(entry)
                block.used_on.clear()
                for event in events:
                    block.stream.wait_event(event)
                self.state.observer.launched(block.stream, "free", (), [block.span])
                block.stream.launch(block.poison)
                self._free[len(block.bytes), block.stream].append(block)
        key = nbytes, self.current_stream()
        return self._free[key].pop() if self._free[key] else Block(*key)

    def copy(self, target: Tensor, source: Tensor) -> None:  # [3]
        for tensor in (target, source):
            if isinstance(tensor, TwinTensor):
                tensor.block.used_on.add(self.current_stream())
            elif not self.is_pinned(tensor):
                raise RuntimeError(f"an asynchronous copy of {tensor.nbytes} bytes of pageable memory")
        self._launch_op(torch.ops.aten.copy_.default, (target, source), {}, [target], [source])

    def read(self, number: Tensor) -> Reading:
        arrived = torch.empty((), dtype=torch.float64)
        self._launch_op(torch.ops.aten.copy_.default, (arrived, number), {}, [], [number])
        event = self.record(self.current_stream())

        def wait() -> float:
            event.synchronize()
            return float(arrived)

        return wait

    def pin(self, address: int, nbytes: int) -> None:
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def is_pinned(self, tensor: Tensor) -> bool:
        start, stop = span_of(tensor)
        return any(address <= start and stop <= address + nbytes for address, nbytes in list(self.pinned.items()))

    # Operations ------------------------------------------------------------------------------------------------------

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Launch one operation of torch's on the current stream; its outputs are tensors of this device."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.is_view:
            base = next(tensor for tensor in tensors if isinstance(tensor, TwinTensor))
            return tree_map_only(Tensor, lambda raw: self.wrap(raw, base.block), func(*_raw(args), **_raw(kwargs)))
        if kwargs.get("device") == torch.device("meta"):
            return func(*_raw(args), **_raw(kwargs))  # a shape, no values
        written = _written(func, args, kwargs)
        is_read = func in HOST_READS
        if is_read or any(not isinstance(tensor, TwinTensor) for tensor in written):
            self.launch(str(func), lambda: None, _spans(tensors), [])
            self.synchronize()
            found = func(*_raw(args), **_raw(kwargs))
            return found if is_read else written[0]
        if written:
            self._launch_op(func, args, kwargs, written, tensors)
            return tuple(written) if len(func._schema.returns) > 1 else written[0] if func._schema.returns else None
        with self._fake:
            fake = tree_map_only(Tensor, self._fake.from_tensor, _raw((args, kwargs)))
            like = func(*fake[0], **fake[1])
        outputs = tree_map_only(Tensor, lambda each: self.empty(each.shape, each.dtype, each.stride()), like)
        made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        self._launch_op(func, args, kwargs, made, tensors, outputs=made)
        return outputs

    def _launch_op(
        self, func: Any, args: Any, kwargs: Any, writes: Any, reads: Any, outputs: Sequence[Tensor] = ()
    ) -> None:
        arguments, targets = tree_map(_late, _drawn(func, args, kwargs)), [_late(output) for output in outputs]

        def run() -> None:  # holds no memory of the device: what is freed is reused, whatever is still queued
            now_args, now_kwargs = tree_map_only(_Late, lambda late: late(), arguments)
            found = func(*now_args, **now_kwargs)
            for target, result in zip(targets, _tensors(found) if targets else (), strict=True):
                target().copy_(result)

        self.launch(str(func), run, _spans(reads), _spans(writes))


class _Late:
    """A tensor of the twin when its operation runs, whoever's memory that is by then."""

    def __init__(self, tensor: TwinTensor) -> None:
        raw = tensor.raw
        self.bytes, self.dtype, self.shape, self.stride = tensor.block.bytes, raw.dtype, raw.shape, raw.stride()
        self.offset = raw.storage_offset()

    def __call__(self) -> Tensor:
        storage = torch.frombuffer(self.bytes, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


def span_of(tensor: Tensor) -> Span:
    """The bytes that a tensor's elements lie in."""
    raw = tensor.raw if isinstance(tensor, TwinTensor) else tensor
    if raw.numel() == 0:
        return Span(0, 0)
    last = sum((size - 1) * stride for size, stride in zip(raw.shape, raw.stride(), strict=True))
    return Span(raw.data_ptr(), raw.data_ptr() + (last + 1) * raw.itemsize)


def _late(leaf: Any) -> Any:
    return _Late(leaf) if isinstance(leaf, TwinTensor) else leaf


def _raw(tree: Any) -> Any:
    return tree_map_only(TwinTensor, lambda tensor: tensor.raw, tree)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _spans(tensors: Sequence[Tensor]) -> list[Span]:
    return [span_of(tensor) for tensor in tensors]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes to."""
    schema = func._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
    names = [argument.name for argument in schema if argument.alias_info is not None and argument.alias_info.is_write]
    return [tensor for name in names for tensor in _tensors(given.get(name))]


def _drawn(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments; random numbers are those of the moment of launching, from the same generator."""
    generator = kwargs.get("generator")
    if generator is None:
        return args, kwargs
    then = torch.Generator()
    then.set_state(generator.get_state())
    func(*tree_map_only(Tensor, torch.clone, _raw(args)), **_raw(kwargs))  # the same number of draws
    return args, {**kwargs, "generator": then}
