"""numa: pages of host memory in turn on the memory nodes of a machine with several.

A page comes to the node of the thread that touches it first. What all cores work on, such as optimizer states, is read
and written with the bandwidth of all nodes only where its pages are on all of them.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

NODES = Path("/sys/devices/system/node")
MPOL_DEFAULT, MPOL_INTERLEAVE = 0, 3
CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}  # mbind and get_mempolicy, for which libc has no functions
WORD = 64  # bits of a word of a mask

_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long


def spread(address: int, nbytes: int) -> None:
    """Have pages that nobody has touched come in turn to the nodes of the cores that this process may use.

    Nothing is changed where these are of one node, where the process has a memory policy already (of `numactl`, say),
    or where the system refuses it: pages come to who touches them.
    """
    nodes = nodes_here()
    if len(nodes) > 1 and platform.machine() in CALLS and not has_policy():
        interleave(address, nbytes, nodes)


def nodes_here() -> list[int]:
    """The nodes of the cores that this process may use; none where the system does not say."""
    mine = os.sched_getaffinity(0)
    found = {int(each.parent.name.removeprefix("node")): each.read_text() for each in NODES.glob("node*/cpulist")}
    return sorted(node for node, text in found.items() if mine & _numbers(text))


def has_policy() -> bool:
    """Whether somebody has said where memory of this process comes from."""
    mode = ctypes.c_int(MPOL_DEFAULT)
    none = ctypes.c_void_p(None)
    _, number = CALLS[platform.machine()]
    failed = _syscall(ctypes.c_long(number), ctypes.byref(mode), none, ctypes.c_ulong(0), none, ctypes.c_ulong(0))
    return bool(failed) or mode.value != MPOL_DEFAULT


def interleave(address: int, nbytes: int, nodes: Sequence[int]) -> bool:
    """Have the pages from `address`, the start of one, come to `nodes` in turn; whether the system does it."""
    words = (ctypes.c_uint64 * (max(nodes) // WORD + 1))()
    for node in nodes:
        words[node // WORD] |= 1 << node % WORD
    number, _ = CALLS[platform.machine()]
    num_bits = ctypes.c_ulong(WORD * len(words) + 1)  # the kernel reads one less
    given = ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_int(MPOL_INTERLEAVE), words, num_bits
    return not _syscall(ctypes.c_long(number), *given, ctypes.c_uint(0))


def _numbers(text: str) -> set[int]:
    """Those of a list as the kernel writes it, such as ``0-3,8``."""
    ends = (part.partition("-") for part in text.strip().split(",") if part)
    return {number for first, _, last in ends for number in range(int(first), int(last or first) + 1)}
