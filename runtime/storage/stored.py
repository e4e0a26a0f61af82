"""stored: the entries of a manifest: files, parts, units, parameters.

unit         [ group a          | group b     ]      each element once in w, each trained one once in s
group        w [ part | part ]    s [ part   ]       of a narrow trained part in memory only the master is stored
part         rows of chunks, one for each file       a file has blocks, each with a checksum
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Interval, Len

FOLDER = "greedysnake-run"
FORMAT = 2
REST = "rest"  # the part that holds the tensors that are not on the tiers
BUFFER = "buffer "  # a prefix of names among these
# Names of extents; in a durable run they begin with the run's name
OURS = re.compile(r"(([0-9a-f]{8})-[0-9a-f]{4}-)?(rest|(dw|[sc]?[ws]|[ax])(\d+|e|h|t)[-_0-9a-z]*)(\.\d+)?")
FOLDERS = re.compile(rf"{FOLDER}(-[0-9]+)?(\.[0-9]+)?")

T = TypeVar("T")


class FirstError:
    """Makes validation of a list stop at the first wrong entry, of which there may be a million."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), "fail_fast": True}


Many = Annotated[tuple[T, ...], FirstError()]
Count = Annotated[int, Interval(ge=0, le=1 << 60)]
Unit = Annotated[int, Interval(ge=0, le=1 << 20)] | Literal["e", "h", "t"]


@dataclass(frozen=True)
class StoredFile:
    """One drive's share of a part. sums: of each block, 16 hex digits, one after the other."""

    folder: str
    name: str
    nbytes: Count
    sums: str


@dataclass(frozen=True)
class StoredPart:
    """`nbytes` of values, in `num_rows` rows of a chunk for each file. value: such as "s3a", or `REST`."""

    value: str
    nbytes: Count
    chunks: Many[Count]
    num_rows: Count
    files: Many[StoredFile]


@dataclass(frozen=True)
class StoredRange:
    """A `Part` of the placement: elements, and where they lived."""

    letter: str
    tier: Literal["device", "host", "ssd"]
    start: Count
    stop: Count


@dataclass(frozen=True)
class StoredGroup:
    """A `Group` of the placement."""

    letter: str
    when: Literal["early", "late", "never"]
    w: Many[StoredRange]
    s: Many[StoredRange]

    @property
    def numel(self) -> int:
        return sum(each.stop - each.start for each in self.w)


@dataclass(frozen=True)
class StoredUnit:
    """A `UnitPlacement`, and the type of the parameters."""

    unit: Unit
    dtype: str
    groups: Many[StoredGroup]
    itemsize: Count
    gradient_itemsize: Count
    state_itemsize: Count | Annotated[float, Interval(ge=0, le=1 << 60)]  # not whole where moments have 8 bits
    has_master: bool
    state: Many[str]  # dtypes of the components, the master's first

    def numel(self, *when: str) -> int:
        return sum(group.numel for group in self.groups if not when or group.when in when)

    def parts(self) -> Iterator[tuple[str, int, bool]]:
        """The name and least bytes of every part, and whether a commit needs it: a narrow copy follows its master."""
        for group in self.groups:
            follows = self.has_master and group.when != "never"
            for each in group.w:
                nbytes = (each.stop - each.start) * self.itemsize
                yield f"w{self.unit}{each.letter}", nbytes, each.tier == "ssd" or not follows
            for each in group.s:
                yield f"s{self.unit}{each.letter}", int((each.stop - each.start) * self.state_itemsize), True


@dataclass(frozen=True)
class StoredParameter:
    """Where a parameter is in the whole space of its unit, all ranks' shares together; dtype: "" for the unit's; codec:
    in which it is stored, "" for none; components: of its state, () for the commit's; second: as of `Slice`; group: the
    optimizer's param group, of a trained one; missed: the steps before its first.
    """

    name: str
    unit: Unit
    offset: Count
    shape: Many[Count]
    trained: bool
    dtype: str = ""
    codec: str = ""
    components: Many[str] = ()
    second: Count = 0
    group: Count | None = None
    missed: Count = 0


@dataclass(frozen=True)
class StoredTensor:
    """A tensor beside the tiers, from `offset` of the part `REST` on: a parameter in memory, or its state."""

    name: str
    dtype: str
    shape: Many[Count]
    offset: Count


@dataclass(frozen=True)
class Manifest:
    """One commit of one rank, its `number`th. components: of optimizer state, the master aside; written: ISO 8601;
    together: the name that the run has on all ranks; never: names of trained parameters that no step has had a gradient
    for, None: of a commit that does not tell; drawn: "draws": the script draws random numbers between a step and its
    next call, "seeds": it gives torch a seed there, and the commit was made ahead of it; num_batches: that the run has
    trained, which differ from `step` where an optimizer's state was loaded; norm: the optimizer's `max_grad_norm`, if
    the run has changed it.
    """

    format: Count
    run: str
    step: Count
    num_skipped: Count
    written: str
    versions: dict[str, str]
    optimizer: str
    components: Many[str]
    groups: Many[dict[str, Any]]
    random: dict[str, str]
    states: dict[str, Any]
    user: Any
    plan: dict[str, Any]
    units: Many[StoredUnit]
    parameters: Many[StoredParameter]
    parts: Many[StoredPart]
    rest: Many[StoredTensor]
    rank: Count
    world: Annotated[int, Interval(ge=1, le=1 << 20)]
    number: Count = 0
    together: str = ""
    never: Many[str] | None = None
    drawn: Literal["", "draws", "seeds"] = ""
    num_batches: Count | None = None
    norm: Annotated[tuple[float | None, ...], Len(max_length=1)] = ()

    @property
    def position(self) -> int:
        """The batches that the run has trained, including skipped ones."""
        return self.step if self.num_batches is None else self.num_batches

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(file.nbytes for file in self.files())

    def files(self) -> Iterator[StoredFile]:
        return chain.from_iterable(part.files for part in self.parts)
