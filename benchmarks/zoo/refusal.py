"""refusal: an error as one line of the table: its type and what it says first, without the paths of a machine."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = Path(sysconfig.get_paths()["purelib"])
MOST = 400  # characters


def refusal(error: BaseException) -> str:
    """The type of an error and its first sentences, and Dynamo's reason where there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["without words"]
    words = lines[0]
    for number, line in enumerate(lines):
        if line.startswith("Dynamo's reason:"):
            words += f"; {line}"
            explained = [each for each in lines[number + 1 :] if each.startswith("Explanation:")]
            words += f". {explained[0]}" if explained else ""
            break
    return f"{type(error).__name__}: {without_paths(words)}"[:MOST]


def without_paths(words: str) -> str:
    """The words with files named as seen from where packages are installed, or from this repository."""
    for folder in (PACKAGES, ROOT):
        words = words.replace(f"{folder}/", "")
    return re.sub(r"/\S*/site-packages/", "", words)
