"""The card's C++ as a module, built once a machine in the cache folder of torch's extensions.

Where there is no compiler, or another torch than the card was tried with, `missing` says so in words, and its tests
are skipped; a build that fails where both are there fails them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sysconfig
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

TRIED = ("2.13",)  # the interfaces of C++ that it stands on change from release to release
NAME = "greedysnake_card"
SOURCES = Path(__file__).parent / "csrc"


def missing() -> str:
    """What is not there to build the card, in words; empty where all is."""
    release = ".".join(torch.__version__.split(".")[:2])
    if release not in TRIED:
        return f"the card is of C++ interfaces of torch {', '.join(TRIED)}, and this is {torch.__version__}"
    if not shutil.which(os.environ.get("CXX", "c++")):
        return "no C++ compiler was found: install g++, or set CXX"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "the headers of Python are not there: install python3-dev"
    return ""


def load() -> ModuleType:
    """The module; other processes that build it are waited for.

    It is built from copies, against torch where it really is: of sources, or an environment, at another path, in another
    checkout, ninja would build it again.
    """
    for path in ("_TORCH_PATH", "TORCH_LIB_PATH"):
        setattr(cpp_extension, path, str(Path(getattr(cpp_extension, path)).resolve()))
    scripts = sysconfig.get_path("scripts")  # ninja's, where it was installed with the tests
    folder = Path(cpp_extension._get_build_directory(NAME, verbose=False))
    with (folder.parent / f"{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with its process, whatever ends that
        (folder / "lock").unlink(missing_ok=True)  # torch's own, of a process that was killed: it would wait for ever
        for source in SOURCES.iterdir():
            copy = folder / source.name
            if not copy.exists() or copy.read_bytes() != source.read_bytes():
                shutil.copyfile(source, copy)
        before = os.environ["PATH"]
        os.environ["PATH"] = os.pathsep.join([before, scripts])
        try:
            card = str(folder / "card.cpp")  # which includes the others
            return cpp_extension.load(NAME, [card], extra_cflags=["-O0", "-g0"], build_directory=str(folder))
        finally:
            os.environ["PATH"] = before
