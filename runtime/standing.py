"""standing: which collective the main thread of this process waits in, read from its stack by another thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType

import torch.distributed as dist

FROM_ONE = frozenset(("send", "recv", "isend", "irecv", "batch_isend_irecv"))  # they wait for a single rank


def is_in(code: CodeType) -> bool:
    """Whether the main thread runs a function."""
    return any(frame.f_code is code for frame in _frames())


def collective_of(name: int) -> str:
    """The collective of torch.distributed that the main thread is in together with rank `name`, with the user's line;
    "": none.
    """
    frames = _frames()
    frame = next((each for each in frames if _module(each) == dist.distributed_c10d.__name__), None)
    if frame is None or frame.f_code.co_name in FROM_ONE or name not in _ranks_of(frame):
        return ""
    caller = next((each for each in frames if not _module(each).startswith("torch.")), frame)
    return f"torch.distributed.{frame.f_code.co_name} ({caller.f_code.co_filename}:{caller.f_lineno})"


def _frames() -> Iterator[FrameType]:
    """The innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _ranks_of(frame: FrameType) -> list[int]:
    """The ranks of the group that a collective was given; none where it has no such argument."""
    if "group" not in frame.f_locals or not dist.is_initialized():
        return []
    try:
        return dist.get_process_group_ranks(frame.f_locals["group"] or dist.group.WORLD)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # it has ended, or is none
        return []
