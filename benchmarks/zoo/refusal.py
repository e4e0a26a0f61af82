"""refusal: an error as one line of the table: its type and what it says first, without the paths of a machine."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

from benchmarks.common import ROOT
from gs_compile.capture.given_up import GIVEN_UP

PACKAGES = Path(sysconfig.get_paths()["purelib"])
MOST = 500  # characters


def refusal(error: BaseException) -> str:
    """The type of an error, its first sentence, and Dynamo's place and reason where it gives them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["without words"]
    words = lines[0].partition(". ")[0]
    if GIVEN_UP in lines[0] and GIVEN_UP not in words:
        words += f". {lines[0][lines[0].index(GIVEN_UP) :]}"
    for number, line in enumerate(lines):
        if line.startswith("Dynamo's reason:"):
            explained = [each for each in lines[number + 1 :] if each.startswith("Explanation:")]
            words = ". ".join([f"{words}; {line}", *explained[:1]])
            break
    return f"{type(error).__name__}: {without_paths(words)}"[:MOST]


def without_paths(words: str) -> str:
    """The words with files named as seen from where packages are installed, or from this repository."""
    for folder in (PACKAGES, ROOT):
        words = words.replace(f"{folder}/", "")
    return re.sub(r"/\S*/site-packages/", "", words)
