"""checks: a model's own checks of values, in units' code.

``assert``, ``if ...: raise`` and others come from Dynamo as ``torch._assert_async`` (`tracing`). No node reads its
result, so a graph that is cut by what its outputs need would lose it. Therefore what comes after a check reads one of
its values through it. Checks run for each micro-batch, on values of that micro-batch alone, also where a loss reads the
batch's totals instead. Checks of inputs alone run before the model, on all samples (`ahead`).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import fx

from gs_compile.capture.arrange import needed_by
from gs_compile.capture.graph import TensorSpec, block_of, source_lines
from gs_compile.capture.in_place import changed, storage_of
from gs_compile.capture.operations import has_samples, is_free
from gs_compile.capture.shares import ShareEditor
from gs_compile.errors import CaptureError, CheckError

MADE_UP = 2.0  # the fraction that stands for a micro-batch of made-up values, which are not checked
OF_A_CHECK = "of_a_check"  # in the meta of nodes that only a check needs


@torch.library.custom_op("greedysnake::checked", mutates_args=())
def _checked(value: torch.Tensor, condition: torch.Tensor, fraction: torch.Tensor, words: str) -> torch.Tensor:
    """A copy of `value`; raises as `require` does."""
    require(condition, fraction, words)
    return value.clone(memory_format=torch.contiguous_format)


@_checked.register_fake
def _(value: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


_checked.register_autograd(lambda _, gradient: (gradient, None, None, None))

CHECKED = torch.ops.greedysnake.checked.default


def require(condition: torch.Tensor, fraction: torch.Tensor | float, words: str) -> None:
    """Raise `CheckError` if an element of `condition` is false.

    `fraction`: the micro-batch's part of the samples. `words`: the model's message, and the line. On an accelerator the
    host waits for the condition.
    """
    if not bool(condition.all()) and float(fraction) <= 1:
        found, do = "the batch", ""
        if float(fraction) < 1:
            found, do = "a micro-batch", "; where it does for the whole batch alone, set micro_batch_size to that"
        raise CheckError(f"what the model checks does not hold for {found}{words}: look at the inputs of this call{do}")


def place_checks(shares: ShareEditor, outputs: Sequence[Any]) -> None:
    """Route values that `outputs` need through the checks of the graph.

    Raises `CaptureError` for a check after which nothing is needed.
    """
    graph = shares.graph
    checks = graph.find_nodes(op="call_function", target=torch._assert_async)
    live = set(needed_by([each for each in outputs if isinstance(each, fx.Node)], graph))
    conditions = [each.args[0] for each in checks if isinstance(each.args[0], fx.Node)]
    for node in needed_by(conditions, graph).keys() - live:
        node.meta[OF_A_CHECK] = True
    for check in checks:
        if isinstance(check.args[0], fx.Node):
            value, readers = _place(check, live)
            checked = shares.checked(value, CHECKED, check, words_of(check))
            for reader in readers:
                reader.replace_input_with(value, checked)
            live.add(checked)
        graph.erase_node(check)


def _place(check: fx.Node, live: Set[fx.Node]) -> tuple[fx.Node, list[fx.Node]]:
    """The value to route through the check, and the readers that are to read it so.

    If the next reader is in another block than the check, all later readers do: blocks pass on one tensor.
    """
    graph = check.graph
    taken = changed(graph.nodes)
    for reader in (node for node in graph.nodes if check < node and (node in live or node.op == "output")):
        values = [each for each in reader.all_input_nodes if each in live and each < check and _is_computed(each)]
        values = [each for each in values if storage_of(each) not in taken]
        if values and reader.op != "output" and block_of(reader) == block_of(check):
            return max(values, key=lambda each: (has_samples(each), not _requires_grad(each))), [reader]
        if values:
            value = max(values, key=lambda each: (block_of(each) == block_of(check), _requires_grad(each)))
            return value, [user for user in value.users if check < user]
    raise CaptureError(
        f"no output of the model comes after its check{words_of(check)}: move the check before an output, or out of "
        "the model"
    )


def _is_computed(node: fx.Node) -> bool:
    """Whether a value is an input tensor or computed; not a parameter, buffer or constant."""
    return isinstance(node.meta.get("spec"), TensorSpec) and (has_samples(node) or not is_free(node))


def _requires_grad(node: fx.Node) -> bool:
    return bool(node.meta["spec"].requires_grad)


def words_of(check: fx.Node) -> str:
    """The model's message, and its line; if that is in a file of helpers, also the line that calls it."""
    own = check.args[1] if len(check.args) > 1 else ""
    caller, line = ["", "", *source_lines(check)][-2:]
    called = f", called at {caller}" if caller.partition(":")[0] != line.partition(":")[0] and caller else ""
    return f" ({own})" * bool(own) + f", at {line}" * bool(line) + called
