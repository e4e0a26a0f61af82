"""Rows of a table that meet each pair of settings at least once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]


def covering(axes: Mapping[str, Sequence[Any]], meets: Callable[[Row], bool]) -> list[Row]:
    """The same rows every time, and few of them.

    Each begins with the first pair that no row has met yet. Its other axes are filled one by one, in an order drawn from
    a fixed seed, each with the setting that adds the most such pairs; of equal ones with the one that was used least.

    meets: whether the settings of a row can meet, some of its axes perhaps still empty: then they can be filled. Pairs
        that cannot meet are left out.
    """
    draw, used = random.Random(0), Counter[tuple[str, Any]]()
    settings = [(axis, setting) for axis, several in axes.items() for setting in several]
    different = (pair for pair in combinations(settings, 2) if pair[0][0] != pair[1][0])
    missing = {frozenset(pair): None for pair in different if meets(dict(pair))}
    rows = []
    while missing:
        row: Row = dict(next(iter(missing)))
        for axis in draw.sample(empty := [axis for axis in axes if axis not in row], len(empty)):

            def gain(setting: Any, axis: str = axis, row: Row = row) -> tuple[int, int]:
                added = sum(frozenset((each, (axis, setting))) in missing for each in row.items())
                return added, -used[axis, setting]

            row[axis] = max((setting for setting in axes[axis] if meets(row | {axis: setting})), key=gain)
        for pair in pairs(row):
            missing.pop(pair, None)
        used.update(row.items())
        rows.append({axis: row[axis] for axis in axes})
    return rows


def pairs(row: Row) -> list[frozenset[tuple[str, Any]]]:
    return [frozenset(pair) for pair in combinations(row.items(), 2)]
