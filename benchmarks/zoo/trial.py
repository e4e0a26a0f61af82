"""trial: one case, trained three times from the same values: by plain PyTorch, with everything on SSD, and in memory.

AdamW's epsilon is larger than usual: a gradient that is nothing but rounding would otherwise move a value by a whole
step. Its first moments are compared too, which show a gradient of the wrong size.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

import gs_compile
from benchmarks.zoo.case import Case, Example
from benchmarks.zoo.refusal import refusal
from gs_compile.codegen.compiled import Compilation, compilations_of
from gs_compile.errors import GreedySnakeError, LaneError, ProgramError, ReleasedParameterError, StorageError
from gs_compile.model.residency import is_offloaded, residency_of, restore, stash
from gs_compile.model.tiered_optimizer import TieredOptimizer
from gs_compile.options import Options

STEPS, SEED = 2, 0
NOISE = 0.02  # on first values
SETTINGS = {"lr": 1e-2, "eps": 1e-3}
TOLERANCE = 1e-5
PLACEMENTS = {"SSD": 0.0, "memory": 1.0}  # and the ratio of everything that is in memory
FAULTS = (LaneError, ProgramError, ReleasedParameterError, StorageError)  # that no model is refused with

Values = dict[str, torch.Tensor]


def run(case: Case) -> dict[str, Any]:
    """The result of a case, as it is in zoo.json."""
    try:
        plain = _plain(_built(case))
    except Exception as error:  # noqa: BLE001 (whatever a package raises is its result)
        return {"result": "does not run", "why": refusal(error)}
    ours = Ours(_built(case))
    found: dict[str, Values] = {}
    for placement, ratio in PLACEMENTS.items():
        try:
            found[placement] = ours.train(ratio)
        except Exception as error:  # noqa: BLE001 (an error of any kind is a result)
            refused = isinstance(error, GreedySnakeError) and not isinstance(error, FAULTS)
            return {"result": "refused" if refused else "failed", "why": refusal(error)}
    return {**verdict(plain, found), **ours.facts()}


def _built(case: Case) -> Example:
    """The case's model, its values moved a little: what begins as zero would keep gradients from what is below it.

    Dropout is off, since micro-batches draw other random numbers than a batch.
    """
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(SEED)
    example = case.make()
    for module in example.model.train().modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    with torch.no_grad():
        for parameter in example.model.parameters():
            if parameter.is_floating_point():
                parameter += NOISE * torch.randn_like(parameter)
    return example


def _plain(example: Example) -> Values:
    """What two steps in memory learn, by torch alone."""
    parameters = _trained(example.model)
    optimizer = torch.optim.AdamW(parameters.values(), **SETTINGS)
    values = _losses(example, optimizer)
    for name, parameter in parameters.items():
        values[name] = parameter.detach()
        if "exp_avg" in (state := optimizer.state[parameter]):
            values[f"{name}.exp_avg"] = state["exp_avg"]
    return values


class Ours:
    """A model on the tiers: captured once, and trained from its first values in each placement."""

    def __init__(self, example: Example) -> None:
        self.example = example
        self.parameters = dict(example.model.named_parameters())  # those that are not trained are on the tiers too
        self.first = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.options: dict[str, Any] = {}
        self.kept: list[str] = []  # the parameters that are not on the tiers

    def train(self, ratio: float) -> Values:
        """What the steps learn with this share of everything in memory."""
        with tempfile.TemporaryDirectory(prefix="zoo-") as storage:
            optimizer = gs_compile.AdamW(_trained(self.example.model).values(), **SETTINGS)
            self.options |= {
                "micro_batch_size": 2,
                "outputs": self.example.outputs,
                "storage": storage,
                "host_memory": "1GiB",
                "expert": {
                    "compiler": "eager",
                    "recompute": "all",
                    "alpha": 0.0,
                    "ratios": {"parameter": ratio, "checkpoint": ratio, "optimizer": ratio},
                },
            }
            self._compile()
            try:
                values = _losses(self.example, optimizer)
                optimizer.synchronize()
                return values | self._learned(optimizer)
            finally:
                self._end(optimizer)

    def facts(self) -> dict[str, Any]:
        """How many blocks are streamed, of how many kinds, and which parameters stayed in memory."""
        made = next(iter(self._compilations()[-1].models.values()))
        streamed = made.split.num_layers - len(made.split.joints)  # which are no blocks
        return {"streamed": streamed, "kinds": made.uniform.num_kinds, "kept": self.kept}

    def _compilations(self) -> list[Compilation]:
        return next((compilations_of[p] for p in self.parameters.values() if p in compilations_of), [])

    def _compile(self) -> None:
        """Compiles the model; what was captured before is used again, with other options."""
        if not self._compilations():
            self.example.model.compile(backend="greedysnake", options=self.options)
            return
        for compilation in self._compilations():
            compilation.options = Options.of(self.options)
        for name, parameter in self.parameters.items():
            if name not in self.kept:
                stash(parameter)

    def _learned(self, optimizer: TieredOptimizer) -> Values:
        """The parameters and the first moments of their gradients."""
        self.kept = [name for name, parameter in self.parameters.items() if not is_offloaded(parameter)]
        values: Values = {}
        for name, parameter in self.parameters.items():
            if name in self.kept:
                values[name], state = parameter.detach().clone(), optimizer.state.get(parameter, {})
            else:
                values[name] = residency_of(parameter).value(parameter, master=True).clone()
                state = optimizer.stored_state(parameter) or {}
            if "exp_avg" in state and not state["exp_avg"].is_meta:  # as of one that has had no gradient
                values[f"{name}.exp_avg"] = state["exp_avg"].clone()
        return values

    def _end(self, optimizer: TieredOptimizer) -> None:
        """Ends the run and gives all parameters their first values."""
        if optimizer.engine is not None:
            with suppress(GreedySnakeError):  # a run that has failed is closed
                optimizer.engine.tiers.close()
            optimizer.engine = None
        for name, parameter in self.parameters.items():
            restore(parameter, self.first[name].clone())


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _losses(example: Example, optimizer: torch.optim.Optimizer) -> Values:
    """The losses of the steps, which draw the same random numbers if they draw any."""
    torch.manual_seed(SEED)
    values = {}
    for step in range(STEPS):
        loss = example.loss(example.model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values[f"loss of step {step}"] = loss.detach().clone()
    return values


# The verdict ----------------------------------------------------------------------------------------------------------


def verdict(plain: Values, found: Mapping[str, Values]) -> dict[str, Any]:
    """The largest difference from plain PyTorch, and whether both placements learn the same bits."""
    differences = {
        name: _difference(value, found["SSD"][name]) for name, value in plain.items() if name in found["SSD"]
    }
    missing = [name for name in plain if name not in found["SSD"] and plain[name].any()]
    worst = max(differences, key=lambda name: differences[name])
    bits = [name for name, value in found["SSD"].items() if not torch.equal(value, found["memory"][name])]
    wrong = []
    if not differences[worst] <= TOLERANCE:
        wrong.append(f"{worst} differs from plain PyTorch's by {differences[worst]:.1e}")
    if bits:
        wrong.append(f"{bits[0]} has other bits on SSD than in memory")
    if missing:
        wrong.append(f"{missing[0]} was not learned")
    result = {"result": "wrong", "why": "; ".join(wrong)} if wrong else {"result": "trains"}
    return {**result, "difference": float(f"{differences[worst]:.1e}")}


def _difference(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference of two entries, relative to the largest entry where that is more than one."""
    if wanted.numel() == 0:
        return 0.0
    scale = max(1.0, float(wanted.abs().max()))
    return float((wanted.double() - found.double()).abs().nan_to_num(nan=torch.inf).max()) / scale
