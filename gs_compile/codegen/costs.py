"""costs: what a unit's functions cost: counted on a graph, or extrapolated from the graphs of two other batch sizes.

A unit's graphs for several numbers of samples usually differ only in their sizes, each of which is either constant or
proportional to the number of samples. Two graphs show whether that is so; if it is, they give the counts of a larger
third one without tracing it. If it is not, as when the first sample is treated differently, each graph is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from gs_compile.capture.flops import node_flops
from gs_compile.capture.graph import TensorSpec, UnitGraph
from gs_compile.capture.internals import tree_leaves
from gs_compile.capture.memory import Lifetime, lifetimes, most_alive


class Cost(NamedTuple):
    """The cost of one function of a unit.

    nbytes: its peak of live bytes, without its inputs, the results of a forward and the gradient of x.
    """

    flops: float
    nbytes: int


class Counts(NamedTuple):
    """What is counted at one size: a part that is the same for all sizes, and the numbers of this one."""

    structure: tuple[Any, ...]
    numbers: tuple[int, ...]


def counted(graph: fx.GraphModule, held: Collection[int], *, compiled: bool = False) -> Counts:
    """A graph's counts: the operations of each node, then the bytes of each memory. held, compiled: see `lifetimes`."""
    nodes, alive = list(graph.graph.nodes), lifetimes(graph, held, compiled=compiled)
    flops = [int(node_flops(node)) if node.op == "call_function" else 0 for node in nodes]
    structure = tuple(str(node.target) for node in nodes), tuple((each.made, each.last) for each in alive)
    return Counts(structure, (*flops, *(each.nbytes for each in alive)))


def cost_of(counts: Counts) -> Cost:
    """The cost of a graph, from its counts."""
    targets, spans = counts.structure
    flops, nbytes = counts.numbers[: len(targets)], counts.numbers[len(targets) :]
    alive = [Lifetime(made, last, each) for (made, last), each in zip(spans, nbytes, strict=True)]
    return Cost(float(sum(map(float, flops))), most_alive(alive))


@dataclass
class AllSizes:
    """What is known about one unit, by the number of samples: its sizes, and the counts of each traced function.

    parts: the same for each part that runs on some tokens at a time, by its place and code; its samples are tokens.
    """

    units: dict[int, Counts] = field(default_factory=dict)
    functions: dict[str, dict[int, Counts]] = field(default_factory=dict)
    parts: dict[tuple[Any, ...], AllSizes] = field(default_factory=dict)

    def of(self, unit: UnitGraph, samples: int) -> Costs | None:
        """The costs for so many samples; None: another unit was seen with as many."""
        sizes = _sizes(unit)
        return Costs(self, samples) if self.units.setdefault(samples, sizes) == sizes else None


@dataclass(frozen=True)
class Costs:
    """The costs of a unit's functions for one number of samples."""

    known: AllSizes
    samples: int

    def cost(self, name: str, count: Callable[[], Counts]) -> Cost:
        """The cost of a function. count: traces its graph and counts."""
        found = self.known.functions.setdefault(name, {})
        return cost_of(found.get(self.samples) or self._extended(found) or found.setdefault(self.samples, count()))

    def of_part(self, place: int, part: UnitGraph, tokens: int) -> Costs | None:
        return self.known.parts.setdefault((place, *_sizes(part).structure), AllSizes()).of(part, tokens)

    def _extended(self, counts: dict[int, Counts]) -> Counts | None:
        """The counts that follow from the last two numbers of samples that were traced, if the unit's sizes do too."""
        traced, units = sorted(counts)[-2:], self.known.units
        if len(traced) < 2 or self.samples < traced[1]:
            return None
        if extended({each: units[each] for each in traced}, self.samples) != units[self.samples]:
            return None
        return extended({each: counts[each] for each in traced}, self.samples)


def extended(two: Mapping[int, Counts], samples: int) -> Counts | None:
    """The counts for a third number of samples; None: they do not follow from these two."""
    (few, at_few), (many, at_many) = two.items()
    if at_few.structure != at_many.structure:
        return None
    numbers = []
    for less, more in zip(at_few.numbers, at_many.numbers, strict=True):
        if less != more and less * many != more * few:
            return None
        number, rest = (less, 0) if less == more else divmod(less * samples, few)
        if rest:
            return None
        numbers.append(number)
    return Counts(at_few.structure, tuple(numbers))


def _sizes(unit: UnitGraph) -> Counts:
    """A unit's structure, and as numbers the sizes of all that it takes and makes and the constants in its code."""
    nodes = list(unit.module.graph.nodes)
    specs = [each for each in tree_leaves([node.meta.get("spec") for node in nodes]) if isinstance(each, TensorSpec)]
    kinds = tuple((each.dtype, each.requires_grad, len(each.shape)) for each in (*unit.specs, *specs))
    sizes = tuple(size for each in (*unit.specs, *specs) for size in (*each.shape, *each.stride))
    numbers = (each for node in nodes for each in tree_leaves((node.args, node.kwargs)) if type(each) is int)
    return Counts((tuple(str(node.target) for node in nodes), kinds, unit.results), (*sizes, *numbers))
