"""The step program as a torch.fx graph, for tools that read such graphs.

Its nodes call the functions below, one for each verb. They have no code: an interpreter gives them their meaning.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import has_side_effect

from gs_compile.errors import ProgramError
from gs_compile.program.ir import VERBS, Op, Program, Value


def graph_module(program: Program) -> GraphModule:
    """`program` as a graph. Its inputs are the values that are there before the step: batches, parameters, states,
    gradients from outside.

    Nodes are named as the values are (x1_0_device), call verbs with the keywords `unit=`, `micro_batch=` and
    `into=`, and carry verb, kind, unit, micro_batch, tier and stage in `meta`, next to the whole operation (`op`) and
    value. The output is a dictionary, by name, of what the program does not free.
    """
    graph = Graph()
    env = {value: _standing_for(value, graph.placeholder(_identifier(value))) for value in _inputs(program)}
    inputs = set(env.values())
    for op in program.ops:
        env.update(zip(op.results, _call(graph, op, env), strict=True))
        if op.verb == "free":
            del env[op.reads[0]]
    graph.output({value.name: node for value, node in env.items() if node not in inputs})
    graph.lint()
    return GraphModule(torch.nn.Module(), graph, class_name="Step")


def _inputs(program: Program) -> Iterator[Value]:
    """The values that are read and never defined, in the order of first use."""
    known: set[Value] = set()
    for op in program.ops:
        for value in dict.fromkeys((*op.reads, *op.into)):
            if value not in known:
                yield value
        known.update(op.reads, op.into, op.results)


def _call(graph: Graph, op: Op, env: Mapping[Value, Node]) -> list[Node]:
    """The node of an operation, and one node for each of several results."""
    if op.micro_batch is not None:
        keywords: dict[str, Any] = {"unit": op.stage.unit, "micro_batch": op.micro_batch}
    else:  # those of the value that is made or freed
        keywords = {}
        for value in (*op.results, *op.reads)[:1]:
            keywords = {"unit": value.unit, "micro_batch": value.micro_batch}
    if op.into:
        keywords["into"] = tuple(env[value] for value in op.into)
    reads = tuple(env[value] for value in op.reads)
    node = graph.create_node("call_function", TARGETS[op.verb], reads, keywords, name=_node_name(op))
    node.meta.update(verb=op.verb, stage=op.stage, op=op, unit=op.stage.unit, micro_batch=op.micro_batch)
    if len(op.results) == 1:
        return [_standing_for(op.results[0], node)]
    parts = []
    for index, value in enumerate(op.results):
        part = graph.create_node("call_function", operator.getitem, (node, index), name=_identifier(value))
        part.meta.update(verb=op.verb, stage=op.stage)
        parts.append(_standing_for(value, part))
    return parts


def _standing_for(value: Value, node: Node) -> Node:
    """The node, with its value described in its `meta`."""
    node.meta["value"] = value
    node.meta.update({name: getattr(value, name) for name in ("kind", "unit", "micro_batch", "tier", "part")})
    return node


def _node_name(op: Op) -> str:
    if len(op.results) == 1:
        return _identifier(op.results[0])
    if not op.values:
        return op.verb
    subject = _identifier(op.reads[0]) if op.micro_batch is None else f"{op.stage.unit}_{op.micro_batch}"
    return f"{op.verb}_{subject}"


def _identifier(value: Value) -> str:
    return value.name.replace(".", "_").replace("[", "_piece").replace("]", "")


def _verb(name: str) -> Callable[..., Any]:
    """A function that stands for a verb in a graph. It changes accumulators, so no clean-up may drop its calls."""

    def call(*reads: Any, **keywords: Any) -> Any:
        raise ProgramError(f"{name} is a word of a step program, not code")

    call.__name__ = call.__qualname__ = name
    call.__doc__ = VERBS[name]
    has_side_effect(call)
    return call


# Module attributes, because a graph's generated code and its pickle find a target by its name.
TARGETS: dict[str, Callable[..., Any]] = {name: _verb(name) for name in VERBS}
globals().update(TARGETS)
