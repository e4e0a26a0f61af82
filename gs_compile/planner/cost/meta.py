"""meta: a model captured without its weights, for any micro-batch size.

The model is copied to the meta device: of its parameters and buffers only shapes are looked at. A stack of blocks that
are alike is captured with two of them, so that depth costs nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gs_compile.capture.call import captured_call
from gs_compile.codegen.compiled import Compilation, SpecializedModel
from gs_compile.codegen.parameters import kept_dtype
from gs_compile.errors import CaptureError, GreedySnakeError, InspectionError
from gs_compile.options import Options
from gs_compile.program.ir import Schedule

SAMPLES = 2  # of the batch that is captured: a dimension of one would be taken for a constant
DEPTH = 2  # blocks of a shortened stack: the fewest that can be seen to be alike


@dataclass(frozen=True)
class MetaCapture:
    """A captured model of `num_layers` layers, which may be more than were captured: they are alike then.

    In the single schedule a layer is half a block, and a micro-batch the whole batch.
    """

    compilation: Compilation
    sizes: Mapping[str, int]  # symbolic sizes beside the batch
    num_layers: int

    def specialized(self, micro_batch_size: int) -> SpecializedModel:
        """The captured model at one micro-batch size; raises `CaptureError` where its code fixes the batch size."""
        if not self.compilation.captured.batch_symbols:
            raise CaptureError(
                f"the model's code fixes the batch size, so it cannot run in micro-batches of {micro_batch_size}; take "
                "the size from the input's shape"
            )
        return self.compilation.layout(micro_batch_size, self.sizes, alone=self.compilation.halved)


def meta_capture(
    model: nn.Module,
    *,
    sequence: int,
    precision: str = "model",
    inputs: Mapping[str, torch.Tensor] | None = None,
    schedule: Schedule = "vertical",
) -> MetaCapture:
    """The capture of `model` called with `sequence` tokens and labels a sample, or with tensors like `inputs`.

    The model is neither changed nor read. Raises `InspectionError` where Dynamo cannot capture it without weights, and
    whatever the backend would refuse it with.
    """
    expert = {"compiler": "eager", "schedule": schedule}
    options = Options.of({"outputs": "loss", "precision": precision, "expert": expert})
    given = _tokens(model, sequence) if inputs is None else {name: _widened(value) for name, value in inputs.items()}
    copied = _meta_copy(getattr(model, "_orig_mod", model), options, {}).train()
    stack = _stack(copied)
    if stack is not None:
        blocks = list(stack)
        del stack[DEPTH:]
        with suppress(GreedySnakeError):  # code that counts its blocks, for one, is captured whole
            captured, sizes = captured_call(copied, given)
            compilation = Compilation(captured, options)
            found = MetaCapture(compilation, sizes, len(blocks) * compilation.layers_of_a_block)
            if _is_alike(found.specialized(1)):
                return found
        stack.extend(blocks[DEPTH:])
    captured, sizes = captured_call(copied, given)
    compilation = Compilation(captured, options)
    num_layers = MetaCapture(compilation, sizes, 0).specialized(1).split.num_layers
    return MetaCapture(compilation, sizes, num_layers)


# What forward is called with ----------------------------------------------------------------------------------------


def _tokens(model: nn.Module, sequence: int) -> dict[str, Any]:
    """Token ids, and labels, for what forward asks for; no cache of what is only of use in generation."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]
    names += [p.name for p in parameters if p.name in ("input_ids", "labels", "targets") and p.name not in names]
    if not names:
        raise InspectionError(
            f"{type(model).__name__}.forward has no required argument, and none called input_ids: give `inputs`, "
            "tensors by name with the batch along dimension 0"
        )
    options = {p.name: False for p in parameters if p.name == "use_cache"}
    return options | {name: torch.zeros(SAMPLES, sequence, dtype=torch.long, device="meta") for name in names}


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one for the batch that is captured."""
    return torch.empty((SAMPLES, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")


# Copying without weights ----------------------------------------------------------------------------------------------


def _meta_copy(module: nn.Module, options: Options, made: dict[int, Any]) -> nn.Module:
    """The module on the meta device, in the dtype it is trained in; `made`: copies by the id of the original."""
    if id(module) in made:
        return made[id(module)]  # type: ignore[no-any-return]

    def tensor(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            is_parameter = isinstance(value, nn.Parameter)
            dtype = kept_dtype(value, options) if is_parameter else value.dtype
            like = torch.empty(value.shape, dtype=dtype, device="meta")
            made[id(value)] = nn.Parameter(like, value.requires_grad) if is_parameter else like
        return made[id(value)]

    made[id(module)] = copied = module.__new__(type(module))
    fields: dict[str, Any] = {name: tensor(value) for name, value in vars(module).items()}
    for name in ("_parameters", "_buffers"):
        fields[name] = {key: tensor(value) for key, value in fields[name].items()}
    children = fields["_modules"].items()
    fields["_modules"] = {key: child and _meta_copy(child, options, made) for key, child in children}
    vars(copied).update(fields, _compiled_call_impl=None)
    return copied


# Shortening -----------------------------------------------------------------------------------------------------------


def _stack(model: nn.Module) -> nn.ModuleList | nn.Sequential | None:
    """The one list of more than `DEPTH` modules that are alike, not inside another; None without, or with several."""
    found = list(_stacks(model))
    return found[0] if len(found) == 1 else None


def _stacks(module: nn.Module) -> Iterator[nn.ModuleList | nn.Sequential]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > DEPTH and _are_alike(list(child)):
            yield child
        else:
            yield from _stacks(child)


def _are_alike(blocks: Sequence[nn.Module]) -> bool:
    """Whether nothing that can be seen tells one block from the next, but for numbers that count the blocks."""
    rows = [list(block.modules()) for block in blocks]
    if len({len(row) for row in rows}) > 1 or len({id(m) for row in rows for m in row}) < sum(map(len, rows)):
        return False
    return all(_are_modules_alike(modules) for modules in zip(*rows, strict=True))


def _are_modules_alike(modules: Sequence[nn.Module]) -> bool:
    first = modules[0]
    if any(type(module) is not type(first) or vars(module).keys() != vars(first).keys() for module in modules):
        return False
    for name, value in vars(first).items():
        values = [vars(module)[name] for module in modules]
        if name == "_modules":
            same = all(list(other) == list(value) for other in values)
        elif name in ("_parameters", "_buffers"):
            same = all(_described(other) == _described(value) for other in values)
        else:
            counts = all(type(v) is int and v == i + values[0] for i, v in enumerate(values))
            same = counts or all(other is value or _is_equal(other, value) for other in values)
        if not same:
            return False
    return True


def _described(tensors: Mapping[str, torch.Tensor | None]) -> list[Any]:
    return [(k, None if t is None else (t.shape, t.dtype, t.requires_grad)) for k, t in tensors.items()]


def _is_equal(left: Any, right: Any) -> bool:
    with suppress(RuntimeError):  # of tensors in a list, which have no one answer
        return type(left) is type(right) and isinstance(left, PLAIN) and bool(left == right)
    return False


PLAIN = (bool, int, float, str, tuple, list, dict, set, frozenset, torch.dtype, torch.device, torch.Size)


def _is_alike(found: SpecializedModel) -> bool:
    """Whether the blocks that were captured can stand for more of them."""
    layers_of_a_block = 1 + found.split.halved
    num_captured, num_classes = found.split.num_layers, len(found.uniform.layer_classes)
    return (num_captured, num_classes) == (DEPTH * layers_of_a_block, layers_of_a_block)
