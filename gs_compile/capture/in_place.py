"""in_place: which values share memory, what changes it, and which changes units cannot make.

A unit runs for each micro-batch, and again in its backward. So it may change its own values in place, and copies of
what it reads, but nothing that outlives it or that other units read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from keyword import iskeyword
from typing import Any

from torch import fx
from torch.nn import functional

from gs_compile.capture.graph import source_line
from gs_compile.capture.internals import tree_leaves
from gs_compile.capture.operations import arguments_of, is_free, named, operation, spelling
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
                raise MutationError(
                    f"`{value.name}` is read by several units and changed in place at {place}; use the "
                    "out-of-place form there"
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
