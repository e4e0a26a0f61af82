"""stream_twin: a CPU that behaves as a device with memory and streams of its own: what a GPU's faults are found with.

[1] What is launched runs later, in the thread of its stream, after a delay drawn from a seed; so do events.
[2] Memory that is freed is filled with 0xFF (not a number) in the order of the stream it was taken on, and handed out
    again at once, as a caching allocator does, whatever other streams still do with it. `reserved_nbytes` is what such
    an allocator takes from the system that cuts and joins its memory as it likes.
[3] Copies from and to host memory need pinned memory.
[4] An observer is told of every access and every wait, so that a test can see which accesses no wait orders.

Tensors of the twin are a subclass of torch's: an operation on them returns at once, with its outputs' memory.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections import defaultdict
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from gs_compile.runtime.stream import Device

POISON = 0xFF
HOST_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}


class TwinEvent:
    """A point in a stream."""

    def __init__(self, twin):
        self.twin = twin
        self.happened = threading.Event()

    def happen(self):
        self.seconds = time.perf_counter()
        self.happened.set()

    def query(self):
        if not self.happened.is_set():
            return False
        self.twin.observer.thread_waited(self)
        return True

    def synchronize(self):
        self.happened.wait()
        assert not self.twin.errors, self.twin.errors
        self.twin.observer.thread_waited(self)


class TwinStream:
    """A queue with a thread of its own."""

    def __init__(self, twin, name):
        self.twin = twin
        self._random = random.Random(f"{twin.seed} {name}")
        self._tasks = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"twin {name}", daemon=True)
        self._thread.start()

    def launch(self, task):
        self._tasks.put(task)

    def wait_event(self, event):
        self.twin.observer.stream_waits(self, event)
        self.launch(event.happened.wait)

    def synchronize(self):
        self.twin.record(self).synchronize()

    def close(self):
        self._tasks.put(None)
        self._thread.join()

    def _work(self):  # [1]
        while (task := self._tasks.get()) is not None:
            if self.twin.delay_seconds and self._random.random() < 0.3:
                time.sleep(self._random.random() * self.twin.delay_seconds)
            try:
                with torch.no_grad():
                    task()
            except BaseException as error:  # noqa: BLE001  it fails whoever waits
                self.twin.errors.append(error)


class Block:
    """Memory of the device: one tensor's, or nobody's."""

    def __init__(self, nbytes, stream):
        self.bytes = np.full(nbytes, POISON, dtype=np.uint8)
        self.stream = stream  # on which it is taken, again and again


class TwinTensor(torch.Tensor):
    """A tensor in the twin's memory. `raw` sees the same bytes now; `block` owns them."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, TwinTensor))
        return first.twin.dispatch(func, args, kwargs or {})


class Twin(Device):
    """The device; `streams` end with `close`. A seed draws the delays, up to `delay_seconds` each."""

    has_own_memory = True

    def __init__(self, seed, delay_seconds, observer):
        super().__init__(torch.device("cpu"))
        self.seed, self.delay_seconds, self.observer = seed, delay_seconds, observer
        self.errors = []  # on its streams
        self.pinned = {}
        self.streams = []
        self.new_stream()
        self._local = threading.local()
        self._free = defaultdict(list)
        self._freed = queue.SimpleQueue()  # told by destructors, on any thread
        self.in_use_nbytes = self.reserved_nbytes = 0
        self._lock = threading.RLock()
        self._fake = FakeTensorMode()
        self._known = {}  # outputs without values, by operation and arguments

    def close(self):
        for stream in self.streams:
            stream.close()
        assert not self.errors, self.errors

    def new_stream(self):
        self.streams.append(TwinStream(self, len(self.streams)))
        return self.streams[-1]

    def current_stream(self):
        return getattr(self._local, "stream", self.streams[0])

    @contextmanager
    def on(self, stream):
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def record(self, stream):
        event = TwinEvent(self)
        self.observer.recorded(stream, event)
        stream.launch(event.happen)
        return event

    @property
    def clock(self):
        return self

    def seconds(self, start, end):
        return start.seconds, end.seconds

    def synchronize(self):
        self.record(self.current_stream()).synchronize()

    def launch(self, name, run, reads, writes):
        stream = self.current_stream()
        self.observer.launched(stream, name, list(map(span_of, reads)), list(map(span_of, writes)))
        stream.launch(run)

    def empty(self, shape, dtype, stride=None):
        like = torch.empty_strided(shape, stride or torch.empty(shape, device="meta").stride(), device="meta")
        nbytes = like.untyped_storage().nbytes() // like.itemsize * dtype.itemsize
        with self._lock:
            block = self._take(-(-max(nbytes, 1) // 512) * 512)
        handle = block.bytes[: max(nbytes, 1)]  # lives as long as any tensor in this memory
        weakref.finalize(handle, self._let_go, block)
        return self.wrap(in_memory(handle, dtype, 0, shape, like.stride()), block)

    def _let_go(self, block):
        self.observer.mark(block)  # what this thread knows to be over is before the next use
        self._freed.put(block)

    def wrap(self, raw, block):
        tensor = torch.Tensor._make_subclass(TwinTensor, raw)
        tensor.raw, tensor.block, tensor.twin = raw, block, self
        return tensor

    def _take(self, nbytes):  # [2]
        while not self._freed.empty():
            block = self._freed.get()
            self.in_use_nbytes -= len(block.bytes)
            start = block.bytes.ctypes.data
            self.observer.freed(block.stream, block, (start, start + len(block.bytes)))
            block.stream.launch(partial(block.bytes.fill, POISON))
            self._free[len(block.bytes), block.stream].append(block)
        self.in_use_nbytes += nbytes
        self.reserved_nbytes = max(self.reserved_nbytes, self.in_use_nbytes)
        key = nbytes, self.current_stream()
        return self._free[key].pop() if self._free[key] else Block(*key)

    def copy(self, target, source):  # [3]
        for tensor in (target, source):
            if not isinstance(tensor, TwinTensor) and not any(
                at <= tensor.data_ptr() < at + nbytes for at, nbytes in list(self.pinned.items())
            ):
                raise RuntimeError(f"an asynchronous copy of {tensor.nbytes} bytes of pageable memory")
        self._launch_op(torch.ops.aten.copy_.default, (target, source), {}, [target], [source])

    def read(self, number):
        arrived = torch.empty((), dtype=torch.float64)
        self._launch_op(torch.ops.aten.copy_.default, (arrived, number), {}, [], [number])
        event = self.record(self.current_stream())

        def wait():
            event.synchronize()
            return float(arrived)

        return wait

    def pin(self, address, nbytes):
        self.pinned[address] = nbytes

    def unpin(self, address):
        del self.pinned[address]

    def dispatch(self, func, args, kwargs):
        """Launch one operation of torch's on the current stream; its outputs are tensors of this device."""
        tensors = tensors_of((args, kwargs))
        if func.is_view:
            base = next(tensor for tensor in tensors if isinstance(tensor, TwinTensor))
            return tree_map_only(Tensor, lambda raw: self.wrap(raw, base.block), func(*_raw(args), **_raw(kwargs)))
        if kwargs.get("device") == torch.device("meta"):
            return func(*_raw(args), **_raw(kwargs))  # a shape, no values
        written = _written(func, args, kwargs)
        is_read = func in HOST_READS
        if is_read or any(not isinstance(tensor, TwinTensor) for tensor in written):
            self.launch(str(func), lambda: None, tensors, [])
            self.synchronize()
            found = func(*_raw(args), **_raw(kwargs))
            return found if is_read else written[0]
        if written:
            self._launch_op(func, args, kwargs, written, tensors)
            return tuple(written) if len(func._schema.returns) > 1 else written[0] if func._schema.returns else None
        like = self._like(func, *_raw((args, kwargs)))
        outputs = tree_map_only(Tensor, lambda each: self.empty(each.shape, each.dtype, each.stride()), like)
        made = tensors_of(outputs)
        self._launch_op(func, args, kwargs, made, tensors, outputs=made)
        return outputs

    def _like(self, func, args, kwargs):
        """What an operation gives back, without values: found once for arguments of the same kinds."""
        leaves, spec = tree_flatten((args, kwargs))
        key = func, spec, tuple(map(_kind, leaves))
        with self._lock:  # a fake mode is not for several threads
            if key not in self._known:
                with self._fake:
                    fake = tree_map_only(Tensor, self._fake.from_tensor, (args, kwargs))
                    self._known[key] = func(*fake[0], **fake[1])
            return self._known[key]

    def _launch_op(self, func, args, kwargs, writes, reads, outputs=()):
        arguments, targets = tree_map_only(TwinTensor, _Late, ((args, kwargs), list(outputs)))

        def run():  # holds no memory of the device: what is freed is reused, whatever is still queued
            now_args, now_kwargs = tree_map_only(_Late, lambda late: late(), arguments)
            found = func(*now_args, **now_kwargs)
            for target, result in zip(targets, tensors_of(found) if targets else (), strict=True):
                target().copy_(result)

        self.launch(str(func), run, reads, writes)


class _Late:
    """A tensor of the twin when its operation runs, whoever's memory that is by then."""

    def __init__(self, tensor):
        raw = tensor.raw
        self.place = tensor.block.bytes, raw.dtype, raw.storage_offset(), raw.shape, raw.stride()

    def __call__(self):
        return in_memory(*self.place)


def in_memory(memory, dtype, offset, shape, stride):
    """A tensor in memory of numpy's; the offset is in elements."""
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


def span_of(tensor):
    """Where the bytes that a tensor's elements lie in begin and end."""
    raw = _raw(tensor)
    if raw.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(raw.shape, raw.stride(), strict=True))
    return raw.data_ptr(), raw.data_ptr() + (last + 1) * raw.itemsize


def tensors_of(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _kind(leaf):
    """What outputs without values depend on."""
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _raw(tree):
    return tree_map_only(TwinTensor, lambda tensor: tensor.raw, tree)


def _written(func, args, kwargs):
    """The arguments that an operation writes to."""
    schema = func._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
    names = [argument.name for argument in schema if argument.alias_info is not None and argument.alias_info.is_write]
    return tensors_of([given.get(name) for name in names])
