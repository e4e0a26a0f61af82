"""floats: Python floats that change from call to call, such as a temperature, become tensors of the graph.

Dynamo captures a model with the floats of the call as constants. If one changes, Dynamo captures again with that float
as an input: a tensor without dimensions, fp64 on the CPU, and its ``item()``. Here operations read the tensor instead
of the number, if that gives the same bits: then one capture serves all numbers. A float that must be a number, such as
the probability of a dropout, is guarded by Dynamo, and each value has its own capture.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import guard_scalar

from gs_compile.capture.graph import origin

# torch computes these, of a tensor and a number, in the tensor's dtype, or in fp32 if that is narrower. A number
# divided by a tensor is not among them: torch multiplies the reciprocal by the number.
_FUNCTIONS = {
    *(operator.add, operator.sub, operator.mul, operator.iadd, operator.isub, operator.imul),
    *(torch.add, torch.sub, torch.mul),
}
_DIVISIONS = {operator.truediv, operator.itruediv, torch.div, torch.true_divide}
_METHODS = set("add add_ sub sub_ mul mul_ div div_".split())
_OF_NUMBERS = {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg}


def as_tensors(module: fx.GraphModule) -> None:
    """Make operations of a captured graph read floats that are inputs as tensors. Guard floats for which that is not
    possible, and those that a graph inside reads, such as a function's backward.
    """
    for inside in module.modules():
        if inside is not module and isinstance(inside, fx.GraphModule):
            _fix(inside)
    made_from: dict[fx.Node, set[fx.Node]] = {}  # for each number, the inputs that it follows from
    for node in module.graph.nodes:
        read = node.all_input_nodes
        if node.target == "item" and _is_open(node) and read[0].op == "placeholder":
            made_from[node] = {node}
        elif node.target in _OF_NUMBERS and _is_open(node) and all(each in made_from for each in read):
            made_from[node] = set().union(*(made_from[each] for each in read))
    for number, inputs in made_from.items():
        if not all(user in made_from or _takes_tensor(user, number) for user in number.users):
            for each in inputs:
                guard_scalar(each.meta["example_value"])
    for number in filter(_is_open, made_from):
        for user in [each for each in number.users if each not in made_from]:
            _give(user, number)
    for number in reversed(made_from):
        if not number.users:
            module.graph.erase_node(number)
    module.recompile()


def _fix(module: fx.GraphModule) -> None:
    """Replace the floats that a graph inside another one reads by their numbers, which are guarded."""
    for node in [each for each in module.graph.nodes if each.target == "item" and _is_open(each)]:
        known: dict[fx.Node, Any] = {node: guard_scalar(node.meta["example_value"])}
        known |= {each: each for user in node.users for each in user.all_input_nodes if each is not node}
        for user in list(node.users):
            user.args = fx.node.map_arg(user.args, known.__getitem__)
        module.graph.erase_node(node)
    module.recompile()


def _is_open(node: fx.Node) -> bool:
    """Whether a node is a float that no guard has fixed."""
    example = node.meta.get("example_value")
    return isinstance(example, torch.SymFloat) and bool(example.node.expr.free_symbols)


def _takes_tensor(user: fx.Node, number: fx.Node) -> bool:
    """Whether an operation gives the same bits if a number is a tensor."""
    known: Collection[Any] = _METHODS if user.op == "call_method" else _FUNCTIONS | _DIVISIONS
    if user.target not in known or user.kwargs or len(user.args) != 2:
        return False
    if user.target in _DIVISIONS and user.args[1] is not number:
        return False
    made = user.meta.get("example_value")
    others = [each.meta.get("example_value") for each in user.all_input_nodes if each is not number]
    if len(others) != 1 or not isinstance(others[0], torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    is_wide = made.dtype in (torch.float32, torch.float64)
    return made.dtype == others[0].dtype and (is_wide or (made.is_floating_point() and others[0].dim() > 0))


def _give(user: fx.Node, number: fx.Node) -> None:
    """Make an operation read the tensor of a number, in the dtype in which torch computes."""
    tensor = _tensor(number, user)
    if user.meta["example_value"].dtype != torch.float64:
        tensor = made(user, torch.Tensor.float, tensor)
    if user.target in (operator.add, operator.mul) and user.args[0] is number:  # torch takes the number as the second
        user.args = user.args[::-1]
    user.replace_input_with(number, tensor)


def _tensor(number: fx.Node, user: fx.Node) -> fx.Node:
    """The fp64 tensor of a number, computed just before `user`."""
    if number.target == "item":
        (source,) = number.all_input_nodes
        return source
    args: list[Any] = list(number.args)
    for place, each in enumerate(args):
        if isinstance(each, fx.Node):
            args[place] = _tensor(each, user) if _is_open(each) else float(each.meta["example_value"])
    if number.target is operator.truediv and not isinstance(args[0], fx.Node):
        args[0] = made(user, torch.full, (), args[0], dtype=torch.float64)
    return made(user, number.target, *args)


def made(user: fx.Node, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node just before `user`, which reads it, and in the same module of the model."""
    with user.graph.inserting_before(user):
        node = user.graph.call_function(function, args, kwargs)
    given = fx.node.map_arg((args, kwargs), lambda each: each.meta["example_value"])
    mode = user.meta["example_value"].fake_mode
    node.meta = origin(user)
    with mode:
        node.meta["example_value"] = function(*given[0], **given[1])
    return node
