"""split: cuts the graph into prologue, layers and epilogue.

A layer ends after a block, at the first place at which exactly one tensor is passed on (`residual_stream`). So a
residual addition after a block is in its layer, and anything else between two blocks belongs to the later one. What
depends on the last layer, or is only read by what does, is the epilogue; the rest is the prologue (`arrange`).

    prologue "e"  --x0-->  layer 0  --x1-->  ...  layer L-1  --xL-->  epilogue "h"
        \\------------ side inputs: masks, rotary tables ------/------/

If a model has several stacks, one layer is their joint. It replaces the prologue for the layers above it: these have
side inputs only from the joint, which passes on what they need from below.

Exactly one tensor goes from a layer to the next, its checkpoint; several of one dtype are packed into one (`packed`).
What layers make for the epilogue, such as routers' logits for a loss, is a tap: it goes there outside the checkpoints,
and its gradient comes back. What a loss computes from the taps of all samples at once is not a part of the epilogue,
which only reads it (`whole_batch`). Anything else that crosses is refused by name. A layer is a block, or a part of one
if the schedule cuts blocks (`BlockCut`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import fx

from gs_compile.capture.arrange import arrange, needed_by, postpone_sums
from gs_compile.capture.extract import extract
from gs_compile.capture.graph import (
    BlockCut,
    Captured,
    OutputSpec,
    Source,
    TensorSpec,
    UnitGraph,
    at_line,
    layer_name,
    source_line,
)
from gs_compile.capture.in_place import is_changed, refuse_changes, storage_of
from gs_compile.capture.loss import Separated
from gs_compile.capture.operations import is_free, operation
from gs_compile.capture.packed import pack, together
from gs_compile.capture.reached import reached_from
from gs_compile.capture.residual_stream import is_like
from gs_compile.capture.stacks import stacks
from gs_compile.capture.whole_batch import Whole, makers, placeholder
from gs_compile.errors import GROUPED, CaptureError, SeparationError, UniformityError
from gs_compile.program.ir import EPILOGUE, PROLOGUE, Unit, Value


@dataclass(frozen=True)
class Split:
    """The units in order, prologue first and epilogue last, and what the step returns."""

    units: tuple[UnitGraph, ...]
    outputs: tuple[OutputSpec, ...]
    sides: Mapping[Unit, tuple[TensorSpec, ...]]  # side inputs, by the unit that makes them: prologue and joints
    taps: tuple[Unit, ...]  # which layer makes each of them, in the order of its results
    count: UnitGraph | None  # computes a micro-batch's part of each total, before the step
    block_cut: BlockCut | None = None  # None: a layer is a block
    whole: Whole | None = None  # what is computed from the taps of all micro-batches

    @property
    def num_layers(self) -> int:
        return len(self.units) - 2

    @property
    def joints(self) -> frozenset[int]:
        """The layers that begin another stack."""
        return frozenset(unit for unit in self.sides if isinstance(unit, int))

    @property
    def layers_per_block(self) -> int:
        return len(self.block_cut.names) if self.block_cut else 1

    @cached_property
    def made(self) -> tuple[OutputSpec, ...]:
        """The outputs that a step computes; the others are arguments, constants, or left out."""
        return tuple(output for output in self.outputs if output.spec is not None)

    @cached_property
    def by_unit(self) -> Mapping[Unit, UnitGraph]:
        return {graph.unit: graph for graph in self.units}

    def inner(self, num_micro_batches: int) -> frozenset[Value]:
        """Results that are hidden states: a program does not keep these only to return them."""
        return frozenset(Value("x", o.unit, j) for o in self.made if o.kind == "x" for j in range(num_micro_batches))

    @cached_property
    def idle(self) -> frozenset[int]:
        """The inputs of the captured graph that require a gradient and never get one. Empty if no output has a
        gradient, as in an evaluation: then it is not known.
        """
        if not any(output.spec and output.spec.requires_grad for output in self.made):
            return frozenset()
        sources = (unit.sources[place] for unit in self.units for place in unit.differentiable)
        asking = {source.index for source in sources if source.kind == "input"}
        return frozenset(asking - self.reached())

    def reached(self, made: frozenset[int] | None = None) -> frozenset[int]:
        """The inputs that get a gradient if these of the outputs `made` do, by index; None: if all of them do."""
        made = frozenset(range(len(self.made))) if made is None else made
        if made not in self._reached:
            outputs = [self.made[number] for number in made]
            of_whole = set(self.whole.taps.values()) if self.whole else set()
            self._reached[made] = reached_from(self.units, outputs, self.taps, of_whole)
        return self._reached[made]

    @cached_property
    def _reached(self) -> dict[frozenset[int], frozenset[int]]:
        return {}


def split(
    separated: Separated, captured: Captured, block_cut: BlockCut | None = None, tapped: Set[int] = frozenset()
) -> Split:
    """Cut the graph of `separated` into units; with `block_cut`, also every block into several layers.

    tapped: indices of outputs that the epilogue returns, wherever they are made, so that they can have a gradient.
    """
    return _Cut(separated, captured, block_cut, tapped).run()


class _Cut:
    def __init__(self, separated: Separated, captured: Captured, block_cut: BlockCut | None, tapped: Set[int]) -> None:
        self.separated = separated
        self.graph = separated.module.graph
        self.batch = captured.names("batch")
        self.parameters = captured.names("parameter")
        self.wanted = [value for value in separated.outputs if isinstance(value, fx.Node)]
        self.readers = postpone_sums(self.wanted, self.graph)
        *_, last = self.readers
        self.at, self.num_layers, self.returned = dict[fx.Node, int](), 0, dict[fx.Node, fx.Node]()
        made_by_block = last in self.wanted and any(last in stack[-1] for stack in stacks(self.readers))
        self._return_copies([last] if made_by_block else [])
        self.at, self.num_layers, self.origins = arrange(self.readers, self.batch, one=block_cut is not None)
        if not self.returned:  # by what follows the last block, such as an addition
            self._return_copies(sorted(self._unread(last))[-1:])
        asked = (each for number, each in enumerate(separated.outputs) if number in tapped)
        below = [each for each in asked if isinstance(each, fx.Node) and self.at[each] <= self.num_layers]
        self._return_copies(below)
        if not torch.is_grad_enabled():
            self._refuse_a_cache({entry.name for entry in captured.inputs if entry.is_made})
        self.block_cut: BlockCut | None = None  # until each block is known to pass on one tensor
        self.carried = self._carried()
        if block_cut:
            self.at = block_cut.units(self.readers, self.at, self.carried)
            self.block_cut, self.num_layers = block_cut, len(block_cut.names) * self.num_layers
            self.carried = self._carried()
        wholes = {node: refusal for node, refusal in separated.wholes.items() if node in self.readers}
        self.whole = self._cut_out(wholes) if wholes else None
        self.sides = self._sides()
        self.emitted: dict[int, list[fx.Node]] = defaultdict(list)  # by unit, what it makes only for the outputs
        self.main: fx.Node | None = None  # the loss

    def run(self) -> Split:
        outputs = tuple(map(self._output, self.separated.outputs))
        units = tuple(map(self._unit, range(self.num_layers + 2)))
        sides = {self._name(at): tuple(node.meta["spec"] for node in made) for at, made in self.sides.items()}
        count = None
        if totals := self.separated.totals:
            nodes = [node for node in needed_by(totals, self.graph) if not is_free(node)]
            count = extract(PROLOGUE, nodes, [("total", node) for node in totals], lambda node: node.meta["source"])
        taps = tuple(self._name(self.at[node]) for node in self.taps)
        return Split(units, outputs, sides, taps, count, self.block_cut, self.whole)

    def _refuse_a_cache(self, made: Set[str]) -> None:
        """Raise if layers have their own input each, as a cache of earlier tokens, which grows with each call."""
        given = [node for node in self.readers if node.name in self.batch - made]
        read = [{self.at[reader] for reader in self.readers[node]} for node in given]
        alone = {unit for units in read if len(units) == 1 for unit in units}
        layers = {unit for unit in alone if unit <= self.num_layers and unit not in self.origins}
        if len(layers) > 1:
            raise UniformityError(f"{len(layers)} layers have their own input each, such as a cache of earlier tokens")

    # What crosses ----------------------------------------------------------------------------------------------------

    def _crossing(self) -> dict[fx.Node, set[int]]:
        """The values that are made in one unit and read in others, with the readers' positions."""
        made = [node for node in self.readers if not is_free(node)]
        found = {node: {self.at[user] for user in node.users if user in self.at} - {self.at[node]} for node in made}
        return {node: positions for node, positions in found.items() if positions}

    def _carried(self) -> list[fx.Node]:
        """x0 ... xL: the values that go from each unit to the next."""
        refuse_changes(self.readers, self.at, self._crossing(), self.wanted)
        self._copy_entries()
        self.origins = {at: self._begun(at, origin) for at, origin in self.origins.items()}
        for at in filter(None, self.origins):
            self._given_on(at)
        self._pack()
        crossing, carried, epilogue = self._crossing(), [self.origins[0]], self.num_layers + 1
        self.taps: list[fx.Node] = []
        for position in range(1, epilogue):
            leaving = {node: readers for node, readers in crossing.items() if self.at[node] == position}
            if position in self.origins:  # anything else that it makes for others is their side input
                leaving = {self.origins[position]: {position + 1}}
            on = [node for node, readers in leaving.items() if position + 1 in readers]
            if len(on) > 1 and position == self.num_layers:
                like = [node for node in on if is_like(node, carried[-1].meta["spec"])]
                on = (like or on)[-1:]  # the others are tapped
            far = {node: readers for node, readers in leaving.items() if not readers <= {position + 1, epilogue}}
            above = [node for node, readers in leaving.items() if epilogue in readers]
            taps = [node for node in above if position < self.num_layers or node not in on[:1]]
            if len(on) != 1 or far or not all(isinstance(node.meta["spec"], TensorSpec) for node in taps):
                raise UniformityError(self._not_one(position, far or leaving))
            carried += on
            self.taps += taps
        return self._without_gaps(carried)

    def _pack(self) -> None:
        """Pack all that a layer passes to the next into one tensor, which the next unpacks."""
        for at, values in together(self._crossing(), self.at, self.num_layers, self.origins).items():
            made, taken = pack(values, [node for node in self.readers if self.at[node] == at + 1])
            self.at |= dict.fromkeys(made, at) | dict.fromkeys(taken, at + 1)
            self.origins = {unit: made[-1] if unit == at else each for unit, each in self.origins.items()}
            self.readers = needed_by(self.wanted, self.graph)

    def _without_gaps(self, carried: Sequence[fx.Node]) -> list[fx.Node]:
        """The values that units pass on, without gaps in memory: of one with gaps, the next unit reads a dense copy."""
        everywhere, copies = set(range(self.num_layers + 2)), dict[fx.Node, fx.Node]()
        for at, value in enumerate(carried):
            if not value.meta["spec"].is_dense:
                copies[value] = self._copied_at(at, value, everywhere - {at})
        self.returned |= {value: copied for value, copied in copies.items() if value in self.wanted}
        self.wanted = [copies.get(value, value) for value in self.wanted]
        self.readers = needed_by(self.wanted, self.graph)
        self.origins = {at: copies.get(value, value) for at, value in self.origins.items()}
        self.taps = [copies.get(value, value) for value in self.taps]
        return [copies.get(value, value) for value in carried]

    def _copy_entries(self) -> None:
        """Make units read copies of views of parameters that another unit makes: their memory ends with that unit."""
        memory = {storage_of(node) for node in self.readers if node.name in self.parameters} - {None}
        for node, readers in self._crossing().items():
            if storage_of(node) in memory:
                copied = self._copied_at(self.at[node], node, readers)
                self.origins = {at: copied if each is node else each for at, each in self.origins.items()}

    def _begun(self, at: int, origin: fx.Node) -> fx.Node:
        """What a unit that begins a stack passes to its first layer; a copy, if it is an input or made elsewhere."""
        return origin if self.at[origin] == at and not is_free(origin) else self._copied_at(at, origin, {at + 1})

    def _given_on(self, joint: int) -> None:
        """Make units above a joint read the joint's copy of what the layer below passes on; taps stay as they are."""
        above, epilogue = set(range(joint + 1, self.num_layers + 2)), {self.num_layers + 1}
        made = {node: readers for node, readers in self._crossing().items() if self.at[node] == joint - 1}
        for node, readers in made.items():
            is_tap = readers == epilogue and any(joint in others for others in made.values())
            if readers & above and not is_tap:
                self._copied_at(joint, node, above)

    def _copied_at(self, at: int, value: fx.Node, units: Set[int]) -> fx.Node:
        """A copy of `value` that the unit `at` makes, for its readers in `units`.

        It is made last, so that one tensor can have all that the unit is given (`packed`).
        """
        copied = self._copy(value)
        self.at[copied] = at
        for node in (node for node in self.readers if self.at[node] in units):
            node.replace_input_with(value, copied)
        min(copied.users, default=copied.next).prepend(copied)
        self.readers = needed_by(self.wanted, self.graph)
        return copied

    def _unread(self, last: fx.Node) -> list[fx.Node]:
        """Outputs that the last layer makes and nothing after it reads: the graph's last, and hidden states."""
        spec = self.origins[max(self.origins)].meta["spec"]
        made = [value for value in self.wanted if self.at[value] == self.num_layers and not self.readers[value]]
        return [value for value in made if value is last or is_like(value, spec)]

    def _return_copies(self, values: Sequence[fx.Node]) -> None:
        """Make the epilogue return copies of outputs that other units make."""
        copies = {value: self._copy(value) for value in values}
        self.returned |= copies
        self.at |= dict.fromkeys(copies.values(), self.num_layers + 1)
        self.wanted = [copies.get(value, value) for value in self.wanted]
        self.readers = needed_by(self.wanted, self.graph)

    def _cut_out(self, wholes: Mapping[fx.Node, str]) -> Whole:
        """Make the epilogue read what is computed from all samples at once, and remove its computation."""
        fit = self.separated.samples.intersection(self.taps)
        found = dict[str, int]()
        for node, refusal in wholes.items():
            taps, inputs = makers(node.all_input_nodes[0], self.at, range(1, self.num_layers + 1))
            is_fit = fit.issuperset(taps) and self.parameters.isdisjoint(each.name for each in inputs)
            if not is_fit or is_changed(node.all_input_nodes[0]):
                raise SeparationError(refusal)
            found |= {tap.name: self.taps.index(tap) for tap in taps}
        values = [node.all_input_nodes[0].name for node in wholes]
        read = {node: placeholder(self.graph, f"whole_{k}", Source("whole", k), node) for k, node in enumerate(wholes)}
        self.returned |= {node: self._copy(read[node]) for node in wholes if node in self.wanted}
        outputs = [self.returned.get(value, value) for value in self.wanted]
        self.wanted = [*outputs, *(tap for tap in self.taps if tap.name in found)]
        self.readers = needed_by(self.wanted, self.graph)
        self.at = {node: self.at.get(node, self.num_layers + 1) for node in self.readers}
        return Whole(tuple(values), found)

    def _copy(self, value: fx.Node) -> fx.Node:
        spec = value.meta["spec"]
        is_dense = not isinstance(spec, TensorSpec) or spec.is_dense
        given: dict[str, Any] = {} if is_dense else {"memory_format": torch.contiguous_format}
        with self.graph.inserting_after(value):
            copied = self.graph.call_function(torch.clone, (value,), given)
        copied.meta = {"spec": spec if is_dense else spec.contiguous, "storage": None}
        return copied

    def _not_one(self, position: int, leaving: dict[fx.Node, set[int]]) -> str:
        """The message for a layer that passes on `leaving`, each read at these positions, instead of one tensor."""

        def name(position: int) -> str:
            return "the epilogue" if position > self.num_layers else layer_name(position - 1, self.block_cut)

        if not leaving:
            return f"{name(position)} passes nothing on to what follows; its block does not feed the model's output"
        found = "; ".join(
            f"`{node.name}` {node.meta['spec']} read by {', '.join(map(name, sorted(readers)))}"
            f"{f' at {line}' if (line := source_line(node)) else ''}"
            for node, readers in leaving.items()
        )
        return (
            f"{name(position)} must pass exactly one tensor, to the next layer; found {found}. Carry it inside the "
            "hidden state, have all that goes on be of one floating dtype, or compute it in the embedding so that it "
            "becomes a side input"
        )

    def _sides(self) -> dict[int, list[fx.Node]]:
        """Side inputs: what each unit that begins a stack makes, or gets from below, for others; also batch inputs."""
        sides: dict[int, list[fx.Node]] = {}
        crossing, above, end = self._crossing(), list[fx.Node](), self.num_layers + 1
        for at in sorted(self.origins, reverse=True):
            found = [node for node in above if self.at[node] < end and not self._is_batch(node)]
            for node, readers in crossing.items():
                is_read = node not in self.taps and any(at < reader <= end for reader in readers)
                if self.at[node] <= at and is_read and not (node is self.carried[at] and readers <= {at + 1}):
                    if not isinstance(node.meta["spec"], TensorSpec):
                        raise CaptureError(
                            f"`{node.name}` goes from the embedding to the blocks, and is not a tensor{at_line(node)}: "
                            "make a tensor of it, or compute it in the blocks"
                        )
                    found.append(node)
            in_layers = [node for node in self.readers if at < self.at[node] < end]
            read = chain.from_iterable(node.all_input_nodes for node in in_layers)
            sides[at] = above = list(dict.fromkeys((*found, *filter(self._is_batch, read))))
            end = at
        return dict(sorted(sides.items()))

    def _is_batch(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and node.name in self.batch

    # Outputs and units -----------------------------------------------------------------------------------------------

    def _output(self, value: Any) -> OutputSpec:
        if not isinstance(value, fx.Node):
            return OutputSpec("constant", value=value)
        if value.op == "placeholder" and value.meta["source"].kind == "input":
            return OutputSpec("input", index=value.meta["source"].index)
        kind = self.separated.kinds[value]
        runs = (value.meta.get("runs") if kind == "local" else None) or (1,)
        value = self.returned.get(value, value)
        self._refuse_unsized(value)
        spec = value.meta["spec"]
        position = self.num_layers + 1 if is_free(value) else self.at[value]
        unit = self._name(position)
        dim = spec.batch_dims[0] if kind == "local" else 0
        combine: Any = {"local": "concat", "sum": "sum", "same": "same"}[kind]
        is_loss = not spec.shape and spec.requires_grad and unit == EPILOGUE and combine == "sum"
        if self.main is None and is_loss and self.separated.has_loss:
            self.main = value
            return OutputSpec(combine, "loss", unit, spec=spec)
        if value in self.carried:
            return OutputSpec(combine, "x", self.carried.index(value), dim=dim, spec=spec, runs=runs)
        emitted = self.emitted[position]
        if value not in emitted:
            emitted.append(value)
        return OutputSpec(combine, "y", unit, emitted.index(value), dim, spec, runs=runs)

    def _refuse_unsized(self, node: fx.Node) -> None:
        """Raise for a result of a unit whose size depends on values: no memory is planned for it."""
        spec = node.meta["spec"]
        if not isinstance(spec, TensorSpec) or not spec.is_sized:
            raise CaptureError(
                f"`{node.name}` leaves its block, or the model, and its size depends on values{at_line(node)}: use it "
                f"in its block, or replace the entries that it leaves out by zeros; {GROUPED}"
            )

    def _name(self, position: int) -> Unit:
        return PROLOGUE if position == 0 else EPILOGUE if position > self.num_layers else position - 1

    def _unit(self, position: int) -> UnitGraph:
        is_first, is_last = position == 0, position > self.num_layers
        sees_batch = is_last or position in self.origins
        results: list[tuple[str, fx.Node]] = [] if is_last else [("x", self.carried[position])]
        results += [("side", node) for node in self.sides.get(position, ())]
        sides = self.sides[max((at for at in self.sides if at < position), default=0)]
        results += [("tap", node) for node in self.taps if self.at[node] == position]
        if is_last and self.main is not None:
            results.append(("loss", self.main))
        results += [("y", node) for node in self.emitted[position]]

        def source(node: fx.Node) -> Source:
            if not is_first and node is self.carried[position - 1]:
                return Source("x")
            if is_last and node in self.taps:
                return Source("tap", self.taps.index(node))
            if not is_first and node in sides and not (sees_batch and self._is_batch(node)):
                return Source("side", sides.index(node))
            everywhere: Source = node.meta["source"]
            if everywhere.kind == "total" and not is_last:
                raise SeparationError(_of_totals(next((u for u in node.users if self.at.get(u) == position), node)))
            return everywhere

        nodes = [node for node in self.readers if self.at[node] == position and not is_free(node)]
        for _, node in results:
            self._refuse_unsized(node)
        found = extract(self._name(position), nodes, results, source)
        return replace(found, is_joint=position > 0 and position in self.origins)


def _of_totals(node: fx.Node) -> str:
    return (
        f"`{node.name}` ({operation(node)}) reads a sum of the inputs over the whole batch{at_line(node)}, which only "
        "the head and the loss can read: compute it outside of the model and pass it as an input, or set "
        "micro_batch_size to the whole batch"
    )
