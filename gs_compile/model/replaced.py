"""replaced: other entries of a mapping, such as the attributes of an object, for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(entries: MutableMapping[str, Any], **others: Any) -> Iterator[None]:
    """Inside the block a mapping, such as `vars(holder)`, has other entries; afterwards those from before, or none."""
    before = {name: entries[name] for name in others if name in entries}
    entries.update(others)
    try:
        yield
    finally:
        for name in others.keys() - before.keys():
            del entries[name]
        entries.update(before)
