"""Small models, and what Dynamo and the first passes make of them: each pass can be tested alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from gs_compile.capture.dynamo import capture
from gs_compile.capture.graph import Captured, UnitGraph
from gs_compile.capture.loss import Separated, loss
from gs_compile.capture.specialize import specialize
from gs_compile.capture.split import Split, split
from gs_compile.model.backend import greedysnake
from gs_compile.passes.baselines.halve import HALVES

WIDTH, TOKENS, WORDS = 8, 5, 11


@dataclasses.dataclass(frozen=True)
class Case:
    """A captured model and the arguments of one call, in the order of the captured graph's inputs."""

    captured: Captured
    args: tuple[Any, ...]

    @property
    def sizes(self) -> dict[str, int]:
        return {e.name: int(a) for e, a in zip(self.captured.inputs, self.args, strict=True) if e.role == "size"}

    def named(self, start: int = 0, length: int | None = None) -> dict[str, Any]:
        """The arguments by name, with the batch cut to samples start ... start + length."""
        stop = None if length is None else start + length
        return {
            entry.name: arg[(*[slice(None)] * entry.dim, slice(start, stop))] if entry.role == "batch" else arg
            for entry, arg in zip(self.captured.inputs, self.args, strict=True)
        }

    def specialized(self, micro_batch_size: int) -> fx.GraphModule:
        module = specialize(self.captured, micro_batch_size, self.sizes)
        module.recompile()
        return module

    def separated(self, micro_batch_size: int, *, alone: bool = False) -> Separated:
        module = self.specialized(micro_batch_size)
        kept = [True] * len(module.graph.output_node().args[0])
        return loss(module, self.captured, kept=kept, alone=alone)

    def split(self, micro_batch_size: int = 2, *, alone: bool = False, halved: bool = False) -> Split:
        block_cut = HALVES if halved else None
        return split(self.separated(micro_batch_size, alone=alone), self.captured, block_cut)


class Each(nn.Module):
    """Blocks beside each other, of what is computed before, with an output each."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.linear, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.linear(x)
        return [block(y) for block in self.blocks]


def captured(model: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any) -> Case:
    """Call `model` once under Dynamo; what `capture` raises for it arrives inside Dynamo's own error."""
    cases: list[Case] = []

    def record(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found = capture(module, example_inputs)

        def run(*inputs: Any) -> Any:
            cases.append(Case(found, inputs))
            return module.forward(*inputs)

        return run

    record.__module__ = greedysnake.__module__  # by which it is known as this package's
    torch._dynamo.reset()
    torch.compile(model, backend=record, dynamic=dynamic)(*args, **kwargs)
    (case,) = cases
    return case


def run(module: fx.GraphModule, named: dict[str, Any]) -> Any:
    """Run a specialized graph on arguments by name."""
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    return module(*(named[name] for name in names))


def run_units(cut: Split, case: Case, start: int, length: int) -> list[Any]:
    """The outputs of one micro-batch, computed unit by unit; without totals, for what needs none."""
    arguments = list(case.named(start, length).values())
    x: Any = None
    side: tuple[Any, ...] = ()
    layer_inputs: list[Any] = []
    taps: list[Any] = []
    made: dict[Any, list[Any]] = {}
    loss_value: Any = None
    for unit in cut.units:
        values = {"x": [x], "side": side, "tap": taps, "input": arguments}
        given = [values[source.kind][source.index] for source in unit.sources]
        before = [value.detach().clone() for value in given]
        results = unit.module(*given)
        torch.testing.assert_close(given, before, rtol=0, atol=0, equal_nan=True)  # checkpoints stay what they were
        by_kind = {kind: [r for r, k in zip(results, unit.results, strict=True) if k == kind] for kind in unit.results}
        made[unit.unit] = by_kind.get("y", [])
        taps += by_kind.get("tap", [])
        if unit.unit in cut.sides:
            side = tuple(by_kind.get("side", []))
        if "x" in by_kind:
            (x,) = by_kind["x"]
            layer_inputs.append(x)
        (loss_value,) = by_kind.get("loss", [loss_value])
    outputs = []
    for output in cut.outputs:
        match output.combine, output.kind:
            case "input", _:
                outputs.append(arguments[output.index])
            case "constant", _:
                outputs.append(output.value)
            case _, "loss":
                outputs.append(loss_value)
            case _, "x":
                outputs.append(layer_inputs[output.unit])
            case _:
                outputs.append(made[output.unit][output.index])
    return outputs


def text(module: fx.GraphModule, captured: Captured) -> str:
    """One line a node; parameters and inputs go by the user's names."""
    paths = {entry.name: entry.path for entry in captured.inputs}
    names = {node: paths.get(node.name, node.name) for node in module.graph.nodes}

    def show(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(show, value))}{',' if len(value) == 1 else ''})"
        return str(value)

    lines = [f"inputs {', '.join(names[node] for node in module.graph.nodes if node.op == 'placeholder')}"]
    for node in module.graph.nodes:
        arguments = ", ".join([*map(show, node.args), *(f"{k}={show(v)}" for k, v in node.kwargs.items())])
        if node.op == "output":
            lines.append(f"return {arguments}")
        elif node.op == "get_attr":
            lines.append(f"{node.name} = attribute {node.target}")
        elif node.op != "placeholder":
            lines.append(f"{node.name} = {getattr(node.target, '__name__', node.target)}({arguments})")
    return "\n".join(lines)


def texts(units: Sequence[UnitGraph], captured: Captured) -> str:
    return "\n\n".join(
        f"# {unit.unit} returns {' '.join(unit.results)}\n{text(unit.module, captured)}" for unit in units
    )


# Models ---------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """One residual layer."""

    def __init__(self, width: int = WIDTH, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Tiny(nn.Module):
    """Embedding, a stack of blocks, a head; `criterion(logits, labels)` makes what it returns."""

    def __init__(
        self,
        criterion: Callable[..., Any] = token_loss,
        blocks: Sequence[nn.Module] | None = None,
        classes: int = WORDS,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()] if blocks is None else blocks)
        self.head = nn.Linear(WIDTH, classes)
        self.criterion = criterion

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.criterion(self.head(x), labels)


def batch(size: int = 5, tokens: int = TOKENS, *, ignored: bool = True, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """ids and labels; with `ignored`, labels of -100 unevenly and in the third and fourth sample everywhere."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (size, tokens), generator=generator)
    labels = torch.randint(WORDS, (size, tokens), generator=generator)
    if ignored:
        labels[0, :3] = -100
        labels[2:4] = -100
    return ids, labels


def compiled(model: nn.Module, **options: Any) -> Any:
    """`model` on the backend, layers uncompiled."""
    torch._dynamo.reset()
    options = {"micro_batch_size": 2, "expert": {"compiler": "eager"}, **options}
    return torch.compile(model, backend=greedysnake, options=options)


def leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def assert_same_step(model: nn.Module, *args: torch.Tensor, tolerance: float = 1e-6, **options: Any) -> None:
    """Outputs and gradients of the first output on the backend equal plain PyTorch's on the whole batch."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = leaves(model(*args))
    expected_grads = torch.autograd.grad(expected[0], parameters, allow_unused=True)
    found = leaves(compiled(model, **options)(*args))
    assert len(found) == len(expected)
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad(found[0], parameters, allow_unused=True)
    for ours, plain in zip(grads, expected_grads, strict=True):
        assert (ours is None) == (plain is None) or not torch.any(ours if plain is None else plain)
        if ours is not None and plain is not None:
            torch.testing.assert_close(ours, plain, rtol=10 * tolerance, atol=tolerance)
