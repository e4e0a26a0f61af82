"""codes: a cache of code, which equal units of all captures share.

Units share code if their graphs and the settings are equal. Code for a new sequence length is made from what is common
to all lengths (`SharedCode`), if the cache has the same units at another length.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from gs_compile.capture.graph import UnitGraph
from gs_compile.capture.inductor import Compiler, Generator, best_compiler
from gs_compile.codegen.differentiate import SharedCode
from gs_compile.codegen.pieces import InPieces
from gs_compile.options import Options
from gs_compile.program.ir import EPILOGUE, Unit

MOST_CODES = 512  # a model has three for each size of the micro-batch
MOST_MODELS = 64  # of one capture: sequence lengths, and sizes of the last micro-batch


class Codes:
    """The code of each class of units, by its lengths. Thread-safe."""

    def __init__(self) -> None:
        self._found: dict[Hashable, dict[tuple[int, ...], InPieces]] = {}
        self._guard = threading.Lock()

    def get(self, key: Hashable, lengths: tuple[int, ...], make: Callable[[SharedCode | None], InPieces]) -> InPieces:
        """The code at these lengths; if there is none, `make` gets what is common to all lengths, if known."""
        with self._guard:
            codes = self._found[key] = self._found.pop(key, {})  # the latest last
            let_oldest_go(self._found, MOST_CODES)
            if lengths not in codes:
                codes[lengths] = make(next(iter(codes.values())).common if codes else None)
                let_oldest_go(codes, MOST_MODELS)
            return codes[lengths]


_codes = Codes()


def codes_of(units: Sequence[UnitGraph], keys: Sequence[Hashable], options: Options) -> dict[Unit, InPieces]:
    """The code of units, prologue first and epilogue last; keys: equal for units with equal code."""
    *inner, head = zip(units, keys, strict=True)
    codes = {unit.unit: code_of(unit, key, options) for unit, key in inner}
    codes[EPILOGUE] = code_of(*head, options, {key: codes[unit.unit] for unit, key in inner})
    return codes


def code_of(
    unit: UnitGraph, key: Hashable, options: Options, beside: Mapping[Hashable, InPieces] | None = None
) -> InPieces:
    """The code of a class of units.

    beside: for the head, the code of the other units, by their keys: the head may use as much memory as that.
    """
    expert, chosen = options.expert, options.expert.compiler
    compiler: Compiler = best_compiler(unit.device_type) if chosen == "auto" or unit.is_meta else chosen
    generator = Generator(compiler, options.mode)
    size: int | None = 0
    if beside is not None and not unit.is_meta:  # the head
        size = expert.piece_tokens
    elif isinstance(unit.unit, int) and not (unit.is_joint or unit.is_meta):
        size = expert.layer_tokens or 0
    others = (frozenset(beside), expert.layer_tokens) if beside else None
    full_key = (key, generator, global_settings(), size, others, unit.is_meta)
    distinct = {id(code): code for code in (beside or {}).values()}.values()
    lengths = tuple(unit.symbols.values())
    return _codes.get(full_key, lengths, lambda common: InPieces(unit, generator, common, distinct, size))


def let_oldest_go(found: dict[Any, Any], most: int) -> None:
    """Remove the oldest entries until `most` are left."""
    while len(found) > most:
        del found[next(iter(found))]


def global_settings() -> Hashable:
    """torch's settings that code depends on. Dynamo guards on them, so a change causes a new capture."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return (torch.get_default_dtype(), deterministic, torch.get_float32_matmul_precision(), torch.get_num_threads())
