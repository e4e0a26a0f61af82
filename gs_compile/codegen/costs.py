"""costs: what the functions of a unit cost: counted on a graph, or known from the graphs of two other batch sizes.

Graphs of one unit for several numbers of samples differ in their sizes alone, of which each is the same in all or in
proportion to the samples. Two graphs show whether that is so, and then say what a larger third one would count. Where
they do not, as with a first sample that is treated apart, each number of samples has its graph traced.
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

    nbytes: the most bytes that it has alive inside, beside its inputs, the results of a forward and the gradient of x.
    """

    flops: float
    nbytes: int


class Counts(NamedTuple):
    """What is counted on something that has several sizes: what all sizes have in common, and a size's own numbers."""

    structure: tuple[Any, ...]
    numbers: tuple[int, ...]


def counted(graph: fx.GraphModule, held: Collection[int], *, compiled: bool = False) -> Counts:
    """A graph's counts: operations of each node, then bytes of each memory. held, compiled: as of `lifetimes`."""
    nodes, alive = list(graph.graph.nodes), lifetimes(graph, held, compiled=compiled)
    flops = [int(node_flops(node)) if node.op == "call_function" else 0 for node in nodes]
    structure = tuple(str(node.target) for node in nodes), tuple((each.made, each.last) for each in alive)
    return Counts(structure, (*flops, *(each.nbytes for each in alive)))


def cost_of(counts: Counts) -> Cost:
    """The cost of a graph, from what `counted` gives."""
    targets, spans = counts.structure
    flops, nbytes = counts.numbers[: len(targets)], counts.numbers[len(targets) :]
    alive = [Lifetime(made, last, each) for (made, last), each in zip(spans, nbytes, strict=True)]
    return Cost(float(sum(map(float, flops))), most_alive(alive))


@dataclass
class AllSizes:
    """What is known of one unit by its number of samples: its own sizes, and of each function traced what it counts.

    parts: of those that run on some tokens at a time, by their place and code; their samples are tokens.
    """

    units: dict[int, Counts] = field(default_factory=dict)
    functions: dict[str, dict[int, Counts]] = field(default_factory=dict)
    parts: dict[tuple[Any, ...], AllSizes] = field(default_factory=dict)

    def of(self, unit: UnitGraph, samples: int) -> Costs | None:
        """None where the unit was another one when it had as many samples before."""
        sizes = _sizes(unit)
        return Costs(self, samples) if self.units.setdefault(samples, sizes) == sizes else None


@dataclass(frozen=True)
class Costs:
    """The costs of a unit's functions for one number of samples."""

    known: AllSizes
    samples: int

    def cost(self, name: str, count: Callable[[], Counts]) -> Cost:
        """The cost of a function. count: what counts it on its own graph, which is traced for that."""
        found = self.known.functions.setdefault(name, {})
        return cost_of(found.get(self.samples) or self._extended(found) or found.setdefault(self.samples, count()))

    def of_part(self, place: int, part: UnitGraph, tokens: int) -> Costs | None:
        return self.known.parts.setdefault((place, *_sizes(part).structure), AllSizes()).of(part, tokens)

    def _extended(self, counts: dict[int, Counts]) -> Counts | None:
        """What follows from the last two numbers of samples that were traced, if the unit is as they say, too."""
        traced, units = sorted(counts)[-2:], self.known.units
        if len(traced) < 2 or self.samples < traced[1]:
            return None
        if extended({each: units[each] for each in traced}, self.samples) != units[self.samples]:
            return None
        return extended({each: counts[each] for each in traced}, self.samples)


def extended(two: Mapping[int, Counts], samples: int) -> Counts | None:
    """The counts for a third number of samples; None where those of two others do not tell them."""
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
    """What a unit is made of, the sizes of all that it takes and makes, and the numbers in its code."""
    nodes = list(unit.module.graph.nodes)
    specs = [each for each in tree_leaves([node.meta.get("spec") for node in nodes]) if isinstance(each, TensorSpec)]
    kinds = tuple((each.dtype, each.requires_grad, len(each.shape)) for each in (*unit.specs, *specs))
    sizes = tuple(size for each in (*unit.specs, *specs) for size in (*each.shape, *each.stride))
    numbers = (each for node in nodes for each in tree_leaves((node.args, node.kwargs)) if type(each) is int)
    return Counts((tuple(str(node.target) for node in nodes), kinds, unit.results), (*sizes, *numbers))
