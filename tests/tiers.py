"""Placements of the toy, and its steps in a row on the reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from reference import reference
from torch import Tensor
from toy import TieredToy, frozen_quanta, steps, tensors

from gs_compile.options import Ratios
from gs_compile.passes.lower import StepSpec, flush, lower
from gs_compile.passes.vertical import vertical
from gs_compile.placement.boundaries import BoundaryNbytes, shortest
from gs_compile.placement.cut import cut
from gs_compile.placement.levels import Level, Share, Shares
from gs_compile.placement.liveness import live_ranges, peak
from gs_compile.placement.placement import Decision, Layout, Placement, StepContext
from gs_compile.placement.shards import QUANTUM, sharded
from gs_compile.placement.workload import UnitSize
from gs_compile.program.ir import TIERS, Op, Program, StepShape, Unit, Value

X_NBYTES, SIDE_NBYTES, SAVED_NBYTES = 1000, 10, 3000


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a placement follows from."""

    parameter_ratio: float = 0.0
    optimizer_ratio: float = 0.0
    checkpoint_ratio: float = 0.0
    last_checkpoint_ratio: float | None = None  # of the last stack, where it has one of its own
    alpha: float = 0.0
    most_numel: int = 1 << 30
    separate: bool = True
    has_master: bool = True
    is_pair: bool = False  # the parameters are narrow, and not made anew from a master
    has_state: bool = True
    clip: bool = False
    accumulates: bool = False
    gradient_ratio: float | None = None
    device_parameter: float = 0.0
    device_checkpoint: float = 0.0
    speculative: bool = False
    world: int = 1
    layer_updates: int = 1
    carried: tuple[Unit, ...] = ()
    retained: tuple[Unit, ...] = ()
    ahead: int = 0
    lookahead: int = 0
    shares: tuple[Share, ...] = ()
    reads_input: bool = False  # of level 1; level 2 does not, and saves twice as much


RESIDENT = Options(parameter_ratio=1.0, optimizer_ratio=1.0, checkpoint_ratio=1.0, separate=False)
PLAIN = StepShape()
RATIOS = (0.0, 0.3, 1.0)


@st.composite
def options(draw: st.DrawFn) -> Options:
    clip, separate = draw(st.booleans()), draw(st.booleans())
    checkpoint = draw(st.sampled_from(RATIOS))
    on_device = draw(st.sampled_from((0.0, (1 - checkpoint) / 2, 1 - checkpoint))) if separate else 0.0
    saved = [
        Share(draw(st.integers(1, 2)), tier, draw(st.sampled_from((0.0, 0.2, 0.3))) * (1 - checkpoint - on_device))
        for tier in (("device", "host", "ssd") if separate else ("host", "ssd"))
    ]
    return Options(
        parameter_ratio=draw(st.sampled_from(RATIOS)),
        optimizer_ratio=draw(st.sampled_from(RATIOS)),
        checkpoint_ratio=checkpoint,
        last_checkpoint_ratio=draw(st.sampled_from((None, 0.0, 0.3)))
        if not any(share.part for share in saved)
        else None,
        alpha=1.0 if clip else draw(st.sampled_from((0.0, 0.25, 0.5, 1.0))),
        most_numel=draw(st.sampled_from((2 * QUANTUM, 1 << 30))),
        separate=separate,
        has_master=(has_master := draw(st.booleans())),
        is_pair=not has_master and draw(st.booleans()),
        has_state=draw(st.booleans()),
        clip=clip,
        device_parameter=draw(st.sampled_from((0.0, 0.6, 1.0))) if separate else 0.0,
        layer_updates=draw(st.sampled_from((1, 4))),
        device_checkpoint=on_device,
        carried=("t", "e", 0, 1)[: draw(st.sampled_from((0, 1, 4)))],
        retained=draw(st.sampled_from(((), (1,), (2, 1, 0, "t")))),
        ahead=draw(st.sampled_from((0, 1, 4))),
        lookahead=draw(st.sampled_from((0, 0, 1, 4))),
        shares=tuple(share for share in saved if share.part),
        reads_input=draw(st.booleans()),
    )


@st.composite
def tiered_steps(draw: st.DrawFn) -> tuple[int, int, StepShape]:
    """`steps`, and some with a unit "t" that others read."""
    num_layers, num_micro_batches, shape = draw(steps(max_layers=4, max_micro_batches=3))
    tied = draw(st.sampled_from([frozenset(), frozenset({"e", "h", *shape.joints}), frozenset({"h"})]))
    frozen = shape.frozen | ({"t"} if tied and draw(st.booleans()) else frozenset())
    units: list[Unit] = ["e", *range(num_layers), "h"]
    first = next(u for u in units if u not in frozen or (u in tied and "t" not in frozen))
    return num_layers, num_micro_batches, replace(shape, tied=tied, frozen=frozen, first_grad=first)


@cache
def with_gradient(num_layers: int, shape: StepShape) -> frozenset[Unit | None]:
    """The units that a step of this shape, in training, makes a gradient for."""
    ops = vertical(num_layers, 1, shape=replace(shape, training=True)).ops
    return frozenset(value.unit for op in ops for value in op.into if value.kind == "dw")


def x_nbytes(num_layers: int, shape: StepShape, first: int = X_NBYTES) -> BoundaryNbytes:
    """Of each boundary: each further stack hands on half as much."""
    above = range(num_layers + 1)
    return shortest([first >> sum(joint < layer for joint in shape.joints) for layer in above])


@cache
def place(num_layers: int, num_micro_batches: int, shape: StepShape = PLAIN, options: Options = RESIDENT) -> Placement:
    """The placement of a toy; what gets no gradient is not trained. Nothing lives on a device that is the host."""
    options = options if options.separate else replace(options, device_parameter=0.0, device_checkpoint=0.0)
    units: list[Unit] = ["e", *range(num_layers), "h", *(["t"] if shape.tied else [])]
    state = 8 * (options.has_state + options.has_master)

    def placed(unit: Unit) -> Any:
        sizes = [quanta * QUANTUM for _, quanta in tensors(unit)]
        rest = [quanta * QUANTUM for quanta in frozen_quanta(unit)]
        trained, frozen = (sizes, rest) if unit in with_gradient(num_layers, shape) else ([], sizes + rest)
        is_narrow = options.has_master or options.is_pair
        may_reside, itemsize = is_narrow or not trained, 4 if is_narrow else 8
        whole = UnitSize(unit, tuple(trained), tuple(frozen), itemsize, 8, state, options.has_master)
        size = sharded(whole, options.world)
        return cut(
            size,
            {
                "parameter": options.parameter_ratio,
                "optimizer": options.optimizer_ratio,
                "device": options.device_parameter if may_reside else 0.0,
            },
            alpha=options.alpha,
            most_numel=options.most_numel,
            separate=options.separate,
            device_numel=int(options.device_parameter * size.numel) if may_reside else 0,
        )

    levels = tuple(Level((k * SAVED_NBYTES,) * num_micro_batches, options.reads_input and k == 1) for k in (1, 2))
    layout = Layout(
        num_layers=num_layers,
        x_nbytes=(x_nbytes(num_layers, shape),) * num_micro_batches,
        side_nbytes=((SIDE_NBYTES,),) * num_micro_batches,
        dside_nbytes=((2 * SIDE_NBYTES,),) * num_micro_batches,
        levels=(levels,) * num_layers,
        joints=shape.joints,
        separate=options.separate,
        clip=options.clip,
        accumulates=options.accumulates,
        world=options.world,
    )
    ratios = Ratios(
        checkpoint=options.checkpoint_ratio,
        parameter=min(options.parameter_ratio, 1.0 - options.device_parameter),
        optimizer=options.optimizer_ratio,
        device_checkpoint=options.device_checkpoint,
        device_parameter=options.device_parameter,
        gradient=options.gradient_ratio,
    )
    every, last = (ratios,), options.last_checkpoint_ratio
    if last is not None:
        own = replace(ratios, checkpoint=min(last, 1.0 - options.device_checkpoint))
        every = (ratios,) * (len(layout.stacks) - 1) + (own,)
    decision = Decision(
        ratios=every,
        alpha=options.alpha,
        shares=Shares(share for share in options.shares if options.separate or share.tier != "device"),
        speculative=options.speculative,
        layer_updates=options.layer_updates,
        carried=options.carried,
        retained=options.retained,
        held=tuple(layer for layer in range(num_layers) if layer in options.retained),
        ahead=options.ahead,
        lookahead=options.lookahead,
    )
    return Placement(tuple(map(placed, units)), layout, decision)


def stages(program: Program, *wanted: str, computation: bool = True, frees: bool = False) -> str:
    """The lines of some stages, `forward 1` or `fill`, with or without those that compute and those that free."""
    kept, on = [], False
    for line in program.text(fold=False).splitlines(keepends=True):
        if line.startswith("# "):
            on = line.removeprefix("# ").split("   ")[0].strip() in wanted
        if on and (frees or not line.startswith("free")) and (computation or " = forward" not in line):
            kept.append(line)
    return "".join(kept)


def lowered(step: Sequence[Any], placement: Placement | None = None, **chosen: Any) -> list[Program]:
    """Every snapshot of a step: numbers of layers and micro-batches, and its shape if it is not plain.

    chosen: fields of its context and of what is lowered.
    """
    num_layers, num_micro_batches, shape = (*step, PLAIN)[:3]
    context = StepContext(**{each.name: chosen.pop(each.name) for each in fields(StepContext) if each.name in chosen})
    return lower(StepSpec(num_layers, num_micro_batches, shape=shape, placement=placement, context=context, **chosen))


def after(snapshots: Iterable[Program], made_by: str) -> Program:
    return next(program for program in snapshots if program.made_by == made_by)


def train(
    num_layers: int,
    num_micro_batches: int,
    shape: StepShape,
    placement: Placement,
    made_by: str = "free",
    modes: Sequence[bool] = (True, True),
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Steps in a row and what brings them to an end: what each gave, and the parameters and states after all.

    `modes`: of each step, whether it trains or evaluates. Each step is the program that the pass `made_by` makes. Of a
    durable placement all are committed, and at the end the copies that commits keep are those of what was trained.
    """
    on_device = made_by == "overlap"
    late, redo, warm, durable = False, True, False, placement.durability > 0
    results = []
    toy = TieredToy(num_layers, num_micro_batches, shape, placement=placement)
    home = toy.home(on_device)
    for number, training in enumerate((*modes, None)):
        if training is None:
            context = StepContext(late=True, redo=redo, seals=durable)
            snapshots = flush(placement, context) if late else []
        else:
            mode = replace(shape, training=training)
            toy = TieredToy(num_layers, num_micro_batches, mode, seed=number, placement=placement)
            context = StepContext(
                late=late, redo=redo, warm=warm and training, copies=durable, seals=durable and number > 0
            )
            spec = StepSpec(num_layers, num_micro_batches, shape=mode, placement=placement, context=context)
            snapshots = lower(spec)
        if snapshots:
            late = bool(training) and placement.has_late
            values = reference(after(snapshots, made_by), toy, home | toy.given())
            results.append({value.name: content for value, content in values.items() if value.kind in ("loss", "y")})
            there = {**home, **values}
            redo = not placement.speculative or not late or bool(there[_scale(on_device)] != 1.0)
            warm = bool(training and placement.carried_values) and not (placement.speculative and late and redo)
            homes = placement.homes(late=late, redo=redo, warm=warm and not on_device)
            late = late and any(value.kind == "dw" for value in homes)
            if on_device:  # no memory is reclaimed there
                homes = {value._replace(tier="device") for value in homes | placement.homes(late=False)}
            elif not late:
                homes -= {_scale(on_device)}
            home = {value: there[value] for value in homes}
    copied = [pair for unit in placement.units for group in unit.trained() for pair in unit.copies(group)]
    assert not durable or not copied or all(torch.equal(home[part], home[copy]) for part, copy in copied)
    return [result for result in results if result], toy.whole(home, on_device)


def _scale(on_device: bool) -> Value:
    return Value("scale", tier="device" if on_device else "host")


def in_order(placement: Placement, gradient_ratio: float | None = None, schedule: str = "horizontal") -> Placement:
    """The same in the horizontal order, with so many gradient sums in host memory."""
    ratios = tuple(replace(each, gradient=gradient_ratio) for each in placement.decision.ratios)
    return placement.laid_out(schedule=schedule).decided(ratios=ratios)


def peaks_of(ops: Sequence[Op], placement: Placement) -> dict[str, int]:
    """The most bytes alive at a time on each tier."""
    ranges = live_ranges(ops, placement)
    return {tier: peak(ranges, tier, len(ops)) for tier in TIERS}
