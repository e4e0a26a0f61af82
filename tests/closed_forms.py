"""The bytes that a step of the tiny model moves, by lane and kind, from first principles (arXiv 2512.17570, 3.3).

Everything is on SSD but for what is said. `units`: the elements of each unit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gs_compile.placement.kinds import nbytes_of
from gs_compile.placement.placement import Placement
from gs_compile.placement.shards import QUANTUM
from gs_compile.program.ir import Value
from gs_compile.runtime.codecs import CODECS

Units = Mapping[Any, int]
Form = dict[tuple[str, str], int]

# How often a step, and in the horizontal order a micro-batch, needs the parameters of a unit that is no layer: the
# prologue as a layer once forward and once backward, the epilogue once, as its backward follows at once, and what
# prologue and epilogue share with each of them.
LOADS = {"e": 2, "h": 1, "t": 3}
STATE = {"model": 8, "split": 10, "whole": 12}  # bytes of AdamW's moments, and of bf16's masters or their rests
ITEMSIZE = {"model": 4, "split": 2, "whole": 2}


def units_of(model: torch.nn.Module, num_ranks: int = 1) -> dict[Any, int]:
    """Trained tensors in whole quanta, what prologue and epilogue share in a unit of its own; a rank's share in whole
    quanta.
    """
    trained = {name: each.numel() for name, each in model.named_parameters() if each.requires_grad}
    return _by_unit(trained, num_ranks)


def frozen_of(model: torch.nn.Module, codec: str, num_ranks: int = 1, skipped: Sequence[str] = ()) -> dict[Any, int]:
    """The same of frozen ones in fp32: what their codec makes of them, but for modules that are skipped."""
    frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
    plain = {name for name in frozen if not set(skipped).isdisjoint(name.split("."))}
    nbytes = {name: each.nbytes if name in plain else CODECS[codec].nbytes(each.shape) for name, each in frozen.items()}
    return _by_unit({name: _whole(each, 4) // 4 for name, each in nbytes.items()}, num_ranks)


def _by_unit(tensors: Mapping[str, int], num_ranks: int) -> dict[Any, int]:
    numel = Counter[Any]()
    for name, each in tensors.items():
        layer = re.search(r"\.h\.(\d)\.", name)
        unit = int(layer[1]) if layer else {"wte": "t", "wpe": "e", "ln_f": "h"}[name.split(".")[1]]
        numel[unit] += _whole(each, QUANTUM)
    return {unit: _whole(each, num_ranks * QUANTUM) // num_ranks for unit, each in numel.items()}


def units_of_parts(model: torch.nn.Module, parts: Mapping[str, Any]) -> dict[Any, int]:
    """The same of a model whose parameters' names begin with parts of it; `parts`: the unit of each."""
    numel = Counter[Any]()
    for name, values in model.named_parameters():
        (unit,) = (unit for part, unit in parts.items() if name.startswith(f"{part}."))
        numel[unit] += _whole(values.numel(), QUANTUM)
    return dict(numel)


def _whole(numel: int, quantum: int) -> int:
    return -(-numel // quantum) * quantum


def spared(placement: Placement) -> Form:
    """What a step need not move, as the one before has kept it, or its own forward."""
    stay = Counter([*placement.carried_values, *placement.retained_values])
    w = sum(nbytes_of(placement, value) * _loads_spared(value, number) for value, number in stay.items())
    x = sum(nbytes_of(placement, value) for value in placement.held_values)
    collected = () if placement.separate else ("d2h",)
    form = {("ssd_read", "w"): w} | {(lane, "x"): x for lane in ("ssd_read", "ssd_write", *collected)}
    return {key: nbytes for key, nbytes in form.items() if nbytes}


def both(form: Form, other: Form) -> Form:
    """The bytes of two together."""
    return dict(Counter(form) + Counter(other))


def _loads_spared(value: Value, number: int) -> int:
    """Of a unit that stays once or twice; what prologue and epilogue share stays between these, too."""
    return number + (value.unit == "t")


def vertical(
    units: Units,
    x: int | Sequence[int],
    n: int,
    *,
    masters: str = "model",
    checkpoint: float = 0.0,
    alpha: float,
    separate_device: bool,
) -> Form:
    """A step of n micro-batches, whose checkpoints have x bytes each, or those of each boundary, in order; `checkpoint`:
    the share in host memory.
    """
    num_layers, numel, loads = _num_layers(units), sum(units.values()), _loads(units) * ITEMSIZE[masters]
    x = [x] * (num_layers + 1) if isinstance(x, int) else x
    checkpoints = [each for each in x[:-1] for _ in range(n)]
    assert not checkpoint or len(set(x)) == 1, "which of them are in host memory is not told"
    on_ssd = sum(checkpoints[int(len(checkpoints) * checkpoint) :])
    made_anew = numel * 2 if masters == "whole" and alpha == 1.0 else 0  # from masters, before the first use
    form = _of_states(numel, masters) | {("ssd_read", "w"): loads - made_anew}
    form |= {(lane, "x"): on_ssd for lane in ("ssd_read", "ssd_write", "d2h")}  # collected for the SSD
    if separate_device:
        boundaries = sum(x) * (n - 1)  # between stages, one micro-batch stays on the device
        form |= {
            ("h2d", "w"): loads,
            ("d2h", "dw"): numel * 4,
            ("d2h", "x"): sum(checkpoints) + (n - 1) * x[-1],  # the epilogue's inputs too
            ("h2d", "x"): sum(checkpoints) + boundaries,
            ("d2h", "dx"): boundaries,
            ("h2d", "dx"): boundaries,
        }
    return {key: nbytes for key, nbytes in form.items() if nbytes}


def horizontal(units: Units, x: int, n: int, *, masters: str, gradient: float, separate_device: bool) -> Form:
    """The same, one micro-batch through all layers after the other; `gradient`: gradient sums are in host memory, or 0."""
    numel, loads, checkpoints = sum(units.values()), n * _loads(units) * ITEMSIZE[masters], _num_layers(units) * n * x
    form = _of_states(numel, masters) | {("ssd_read", "w"): loads}
    form |= {(lane, "x"): checkpoints for lane in ("ssd_read", "ssd_write", "d2h")}
    if not gradient:
        form |= {(lane, "dw"): (n - 1) * numel * 4 for lane in ("ssd_read", "ssd_write")}
    if separate_device:
        form |= {("h2d", "w"): loads, ("h2d", "x"): checkpoints}
        form |= {("h2d", "dw"): (n - 1) * numel * 4, ("d2h", "dw"): n * numel * 4}  # (2 n - 1) times together
    return form


def of_a_rank(units: Units, x: int, n: int, num_ranks: int, less: Form, frozen: Units) -> Form:
    """Of a rank's shares, in one memory, all updates early: what it reads, the others get from it, as it is stored."""
    form = vertical(units, x, n, alpha=0.0, separate_device=False)
    form["ssd_read", "w"] += _loads(frozen) * ITEMSIZE["model"]
    form["net", "w"] = form["ssd_read", "w"] * (num_ranks - 1)
    form["net", "dw"] = sum(units.values()) * 4 * (num_ranks - 1)
    return dict(Counter(form) - Counter(less))


def of_saved(placement: Placement) -> dict[str, int]:
    """By lane: what is saved goes to its home and comes back once; in one memory what goes to SSD is collected."""
    nbytes, _ = saved_items(placement)
    over_link = nbytes["host"] + nbytes["ssd"] if placement.separate else 0
    form = {"d2h": over_link or nbytes["ssd"], "h2d": over_link}
    form |= dict.fromkeys(("ssd_read", "ssd_write"), nbytes["ssd"])
    return {lane: each for lane, each in form.items() if each}


def saved_items(placement: Placement) -> tuple[Counter[str], Counter[str]]:
    """The bytes that are saved on each tier, item by item, and the items there."""
    nbytes, number = Counter[str](), Counter[str]()
    for unit, levels in enumerate(placement.activations.levels):
        for micro_batch in range(placement.layout.num_micro_batches):
            if (share := placement.activations.share_of(Value("a", unit, micro_batch))) is not None:
                nbytes[share.tier] += levels[share.level - 1].nbytes[micro_batch]
                number[share.tier] += 1
    return nbytes, number


def _num_layers(units: Units) -> int:
    return sum(isinstance(unit, int) for unit in units)


def _loads(units: Units) -> int:
    return sum(numel * LOADS.get(unit, 2) for unit, numel in units.items())


def _of_states(numel: int, masters: str) -> Form:
    """Updated parameters, and the states of their updates."""
    return {("ssd_write", "w"): numel * ITEMSIZE[masters]} | {
        (lane, "s"): numel * STATE[masters] for lane in ("ssd_read", "ssd_write")
    }
