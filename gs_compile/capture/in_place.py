"""in_place: which values share memory, what changes it, and which changes units cannot make.

A unit runs for each micro-batch, and again in its backward. So it may change its own values in place, and copies of
what it reads, but nothing that outlives it or that other units read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from keyword import iskeyword
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from gs_compile.capture.graph import block_of, origin, source_line
from gs_compile.capture.internals import tree_leaves
from gs_compile.capture.operations import arguments_of, is_free, named, operation, spelling, tensor_spec
from gs_compile.errors import MutationError

IN_PLACE_OPERATORS = frozenset(
    "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul".split()
)


def mutated(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors a node changes in place, as by ``x.add_``, ``x[i] = y``, ``x += y`` and ``out=``."""
    if node.op not in ("call_method", "call_function"):
        return []
    name, arguments = spelling(node), arguments_of(node)
    ends = name.split(".")[0].endswith("_") and not name.endswith("__") and not iskeyword(name[:-1])  # operator.and_
    changed: Any
    if (written := _written(node)) is not None:
        changed = written
    elif node.target in (functional.batch_norm, functional.instance_norm):  # running statistics, in training
        is_measured = arguments.get("training", arguments.get("use_input_stats"))
        changed = [arguments["running_mean"], arguments["running_var"]] if is_measured else []
    elif node.target in (functional.embedding, functional.embedding_bag):  # rows longer than `max_norm`
        changed = arguments["weight"] if arguments["max_norm"] is not None else []
    elif ends or name in IN_PLACE_OPERATORS or arguments.get("inplace"):
        changed = [*node.args, *node.kwargs.values()][0]
    else:
        changed = node.kwargs.get("out")
    return [each for each in tree_leaves(changed) if isinstance(each, fx.Node)] if changed else []


def _written(node: fx.Node) -> list[Any] | None:
    """The arguments that an operator of a library writes to, by its schema; None: it names none."""
    operator = getattr(node.target, "default", node.target)
    schema = getattr(operator, "_schema", None)
    if schema is None or not schema.is_mutable:
        return None
    given = named(operator, node.args, node.kwargs)
    return [given.get(each.name) for each in schema.arguments if each.alias_info and each.alias_info.is_write]


def storage_of(node: fx.Node) -> int | None:
    """A number for the memory of a value; None: it is not known."""
    storage: int | None = node.meta.get("storage")
    return storage


def in_memory_of(value: fx.Node) -> Set[fx.Node]:
    """All values that share memory with this one, itself among them."""
    storage = storage_of(value)
    return {value, *(each for each in value.graph.nodes if storage is not None and storage_of(each) == storage)}


def changed(nodes: Iterable[fx.Node]) -> Set[int | None]:
    """The memory that these operations change in place, as numbered by `storage_of`."""
    return {storage_of(each) for node in nodes for each in mutated(node)} - {None}


def is_changed(value: fx.Node) -> bool:
    """Whether a later operation changes a value's memory in place."""
    return storage_of(value) in changed(node for node in value.graph.nodes if value < node)


def change_copies(graph: fx.Graph) -> None:
    """Have changes in place from the first block on change copies of what another block, or what is between them, has
    made, as the log determinant of a flow in ``log_det += each``: the values before and after are then two, and
    each may be handed on. What somebody reads by an older name later stays as it is.
    """
    held = defaultdict[int | None, list[fx.Node]](list)  # by memory
    for node in graph.nodes:
        held[storage_of(node)].append(node)
    latest: fx.Node | None = None  # of a block
    for change in list(graph.nodes):
        latest = change if block_of(change) is not None else latest
        values = mutated(change)
        memory = storage_of(values[0]) if len(values) == 1 else None
        if latest is not None and memory is not None and _may_be_copied(values[0], change, held[memory], latest):
            later = [each for each in held[memory] if not each < change]
            held[memory] = [each for each in held[memory] if each < change]
            held[fresh := -len(held)] = [_copied_for(change, values[0]), *later]  # no address is negative
            for each in held[fresh]:
                each.meta["storage"] = fresh


def _may_be_copied(value: fx.Node, change: fx.Node, held: Sequence[fx.Node], latest: fx.Node) -> bool:
    """Whether a change is to be that of a copy. held: what is in the value's memory, in the order of the graph; latest:
    the last node of a block by then.
    """
    spec, block, maker = tensor_spec(value), block_of(change), held[0]
    is_fit = spec is not None and spec.is_sized and spec.is_dense
    is_own = is_free(maker) or (latest < maker if block is None else block_of(maker) == block)
    older = (user for each in held if each is not value and each < change for user in each.users)
    return is_fit and not is_own and not any(change < user for user in older)


def _copied_for(change: fx.Node, value: fx.Node) -> fx.Node:
    """A copy of a value, for what changes it and all that reads it later, which reads the result if there is one."""
    with value.graph.inserting_before(change):
        copied = value.graph.call_function(torch.clone, (value,))
    copied.meta = {**origin(change), "spec": value.meta["spec"], "runs": value.meta.get("runs"), "batch_numbers": {}}
    if storage_of(change) == storage_of(value):
        value.replace_all_uses_with(change, delete_user_cb=lambda user: change < user)
    value.replace_all_uses_with(copied, delete_user_cb=lambda user: not user < change)
    return copied


def refuse_changes(
    readers: Mapping[fx.Node, Sequence[fx.Node]],
    at: Mapping[fx.Node, int],
    crossing: Mapping[fx.Node, Set[int]],
    wanted: Iterable[fx.Node],
) -> None:
    """Raise `MutationError` for a change in place that would be visible outside the model, or not visible inside.

    at: the unit of each node. crossing: values that other units read, with these units. wanted: the model's results.
    """
    nodes = next(iter(readers)).graph.nodes
    free = {storage_of(node): node for node in nodes if is_free(node)}
    _refuse_in_regions(nodes)
    for change, storage in ((node, storage_of(each)) for node in nodes for each in mutated(node)):
        place = source_line(change) or operation(change)
        if storage is None:
            continue
        if storage in free:  # even if no result needs it
            raise MutationError(
                f"the model changes its input or buffer `{free[storage].name}` in place ({place}): micro-batches and "
                "recomputation would do it again; make it a result of forward, or freeze it (eval mode)"
            )
        if operation(change).startswith("_foreach"):  # torch's trace loses its gradients
            raise MutationError(f"the model changes several tensors in place at once ({place}): do so one by one")
        if change not in readers:
            continue
        for value in wanted:
            if storage_of(value) == storage and at[value] != at[change]:
                raise MutationError(
                    f"the model returns `{value.name}`, which a later unit changes in place at {place}; use the "
                    "out-of-place form there"
                )
        seen = [value for value in crossing if storage_of(value) == storage]
        read = [value for value in seen if at[value] != at[change] and at[change] in crossing[value]]
        for value in seen:
            if len(read) > 1 or _is_seen_elsewhere(change, value, at):
                stacked = ", as torch.stack of a list instead of x[i] = y" if operation(change) == "setitem" else ""
                raise MutationError(
                    f"`{value.name}` is read by several units and changed in place at {place}; use the "
                    f"out-of-place form there{stacked}"
                )


def _refuse_in_regions(nodes: Iterable[fx.Node]) -> None:
    """Raise `MutationError` for a change of what a separately compiled region reads: torch cannot trace it."""
    for body in (body for node in nodes if operation(node) == "invoke_subgraph" for body in node.meta["bodies"]):
        given = {storage_of(each) for each in body.graph.nodes if is_free(each)} - {None}
        for change in body.graph.nodes:
            if not given.isdisjoint(map(storage_of, mutated(change))):
                raise MutationError(
                    "a region that is compiled by itself (torch.compiler.nested_compile_region) changes what it is "
                    f"given in place ({source_line(change) or operation(change)}): use the out-of-place form there, or "
                    "leave nested_compile_region out, as equal layers are compiled once anyway"
                )


def _is_seen_elsewhere(change: fx.Node, value: fx.Node, at: Mapping[fx.Node, int]) -> bool:
    """Whether another unit reads `value` on the wrong side of `change`: other units see only its last version."""
    readers = [user for user in value.users if user in at and at[user] != at[value]]
    if at[change] == at[value]:
        return any(reader < change for reader in readers)
    return value < change and any(change < reader and at[reader] != at[change] for reader in readers)
