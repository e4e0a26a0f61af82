"""activations: where a layer's checkpoint, and what else its forward saves, lives until its backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gs_compile.options import Ratios
from gs_compile.placement.levels import TOLERANCE, Item, Level, Levels, Share, Shares, is_chosen, items
from gs_compile.placement.stacks import Stacks, part_of, stack_of
from gs_compile.program.ir import Tier, Unit, Value


@dataclass(frozen=True)
class ActivationHomes:
    """The homes of the inputs of all layers, for all micro-batches, and of what each layer saves with its input.

    ratios, shares, held: those of the decision; stacks: those that the ratios belong to.
    levels: what each layer may save; () if there are no shares.
    """

    ratios: tuple[Ratios, ...]
    shares: Shares
    held: tuple[int, ...]
    levels: Levels
    stacks: Stacks
    num_micro_batches: int

    def home(self, value: Value) -> Tier:
        """The tier of a layer's input: that of its other saved activations. Inputs without such are spread evenly over
        the tiers, by the ratios; a held one is not on SSD.
        """
        if (share := self.share_of(value)) is not None:
            return share.tier
        home = self._home_by_ratios(value)
        return "host" if home == "ssd" and value.unit in self.held else home

    def _home_by_ratios(self, value: Value) -> Tier:
        stack, item = stack_of(value.unit, self.stacks), _item(value)
        left = 1.0 - self._saved(stack)
        if left <= TOLERANCE:  # a layer that can save nothing, or a batch whose items come to other whole numbers
            return max(self.shares.of(stack), key=lambda each: each.part).tier
        at, kept = self._places[stack][item], _checkpoints(self.ratios[stack])
        ratio = min(kept["host"] / left, 1.0)
        if is_chosen(at, ratio):
            return "host"
        elsewhere = at - int(at * ratio + TOLERANCE)  # items before it outside host memory: some are on the device
        on_device = min(kept["device"] / left / (1 - ratio), 1.0) if ratio < 1 else 0.0
        return "device" if is_chosen(elsewhere, on_device) else "ssd"

    @cached_property
    def held_values(self) -> frozenset[Value]:
        """The checkpoints that `held` keeps from SSD."""
        every = (Value("x", layer, j) for layer in self.held for j in range(self.num_micro_batches))
        return frozenset(x for x in every if self.share_of(x) is None and self._home_by_ratios(x) == "ssd")

    def share_of(self, value: Value) -> Share | None:
        """The share that the layer and micro-batch of a value belong to; None: level 0."""
        return self._items.get(_item(value)) if self.shares else None

    def level_of(self, value: Value) -> Level | None:
        """What is saved for the layer and micro-batch of a value; None: its input alone."""
        share = self.share_of(value)
        return None if share is None else self.levels[_item(value)[0]][share.level - 1]

    @property
    def levels_in_use(self) -> Mapping[Unit, frozenset[int]]:
        """The levels that each layer has for any of its micro-batches; empty: all layers save their input alone."""

        def levels(layer: int) -> frozenset[int]:
            shares = (self.share_of(Value("a", layer, j)) for j in range(self.num_micro_batches))
            return frozenset(share.level if share else 0 for share in shares)

        return {layer: levels(layer) for layer in range(self.stacks[-1].stop)} if self.shares else {}

    @cached_property
    def _items(self) -> Mapping[Item, Share]:
        return items(self.shares, self.levels, self.num_micro_batches, self.stacks) if self.shares else {}

    @cached_property
    def _places(self) -> Sequence[Mapping[Item, int]]:
        """The place of each item of level 0 among the items of level 0 of its stack, by stack."""
        every = ([(unit, j) for unit in layers for j in range(self.num_micro_batches)] for layers in self.stacks)
        return [{item: at for at, item in enumerate(x for x in of_stack if x not in self._items)} for of_stack in every]

    # Parts of all ----------------------------------------------------------------------------------------------------

    def _saved(self, stack: int, tier: Tier | None = None) -> float:
        """The part of a stack's items that is in any share, or in a share on `tier`."""
        return self.shares.of(stack).part(tier) / part_of(stack, self.stacks)

    def are_possible(self) -> bool:
        """Whether no stack has more checkpoints in memory than those of its items that are in no share."""
        left_over = (1.0 - self._saved(at) - sum(_checkpoints(each).values()) for at, each in enumerate(self.ratios))
        return all(left >= -1e-9 for left in left_over)

    def checkpoints(self, tier: Tier) -> float:
        """The part of all checkpoints that the ratios have on a tier."""
        parts = (_checkpoints(ratios)[tier] for ratios in self.ratios)
        return sum(part * part_of(stack, self.stacks) for stack, part in enumerate(parts))

    @property
    def in_memory(self) -> float:
        """The part of all activations that is not on SSD."""
        memory: tuple[Tier, ...] = ("device", "host")
        return sum(self.checkpoints(tier) + self.shares.part(tier) for tier in memory)

    @property
    def are_on_device(self) -> bool:
        """Whether some have their home on the device."""
        return bool(self.checkpoints("device")) or bool(self.shares.part("device"))

    # Other homes, as fields of a decision ----------------------------------------------------------------------------

    def recomputed(self) -> Mapping[str, Any]:
        """Layers save their inputs alone, on the tiers where their activations were."""
        every = enumerate(map(_checkpoints, self.ratios))
        kept = [{tier: part + self._saved(stack, tier) for tier, part in parts.items()} for stack, parts in every]
        return self._keeping(kept, Shares())

    def moved(self, source: Tier, target: Tier) -> Mapping[str, Any]:
        """All activations of one tier are on another, slower one."""
        kept: list[dict[Tier, float]] = [{**_checkpoints(each), "ssd": 0.0} for each in self.ratios]
        for parts in kept:
            parts[target] += parts.pop(source)
        return self._keeping(kept, self.shares.moved(source, target))

    def _keeping(self, kept: Iterable[Mapping[Tier, float]], shares: Shares) -> Mapping[str, Any]:
        """Checkpoints are on the tiers by the parts of `kept`, stack by stack."""
        ratios = tuple(
            replace(each, checkpoint=parts.get("host", 0.0), device_checkpoint=parts.get("device", 0.0))
            for each, parts in zip(self.ratios, kept, strict=True)
        )
        return {"ratios": ratios, "shares": shares}


def _checkpoints(ratios: Ratios) -> dict[Tier, float]:
    """The parts of a stack's checkpoints that are in memory, by tier."""
    return {"host": ratios.checkpoint or 0.0, "device": ratios.device_checkpoint or 0.0}


def _item(value: Value) -> Item:
    """The layer and micro-batch that an activation is of."""
    assert isinstance(value.unit, int)
    assert value.micro_batch is not None
    return value.unit, value.micro_batch
