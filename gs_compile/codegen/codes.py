"""codes: the code that equal units of all captures share, and what makes it.

Units have equal code where their graphs and the settings are equal; for other lengths it is made with what it has in
common with those that are there.
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
    """The code that equal layers of all captures share: of each, by its lengths. Any thread may ask for some."""

    def __init__(self) -> None:
        self._found: dict[Hashable, dict[tuple[int, ...], InPieces]] = {}
        self._guard = threading.Lock()

    def get(self, key: Hashable, lengths: tuple[int, ...], make: Callable[[SharedCode | None], InPieces]) -> InPieces:
        """The code at some lengths; made where there is none, with what it has in common with those of others."""
        with self._guard:
            codes = self._found[key] = self._found.pop(key, {})  # the latest last
            let_oldest_go(self._found, MOST_CODES)
            if lengths not in codes:
                codes[lengths] = make(next(iter(codes.values())).common if codes else None)
                let_oldest_go(codes, MOST_MODELS)
            return codes[lengths]


_codes = Codes()


def codes_of(units: Sequence[UnitGraph], keys: Sequence[Hashable], options: Options) -> dict[Unit, InPieces]:
    """The code of units with these keys, prologue first and epilogue last."""
    *inner, head = zip(units, keys, strict=True)
    codes = {unit.unit: code_of(unit, key, options) for unit, key in inner}
    codes[EPILOGUE] = code_of(*head, options, {key: codes[unit.unit] for unit, key in inner})
    return codes


def code_of(
    unit: UnitGraph, key: Hashable, options: Options, beside: Mapping[Hashable, InPieces] | None = None
) -> InPieces:
    """The code of a class of units, with what it has in common with the same class at other lengths.

    beside: of the head, the code of the other units, by their keys: it may take as much memory.
    """
    expert, chosen = options.expert, options.expert.compiler
    compiler: Compiler = best_compiler(unit.device_type) if chosen == "auto" or unit.is_meta else chosen
    generator = Generator(compiler, options.mode)
    size: int | None = 0
    if beside is not None and not unit.is_meta:  # pieces of the head have as much memory as layers have in theirs
        size = expert.piece_tokens
    elif isinstance(unit.unit, int) and not (unit.is_joint or unit.is_meta):
        size = expert.layer_tokens or 0
    others = (frozenset(beside), expert.layer_tokens) if beside else None
    full_key = (key, generator, global_settings(), size, others, unit.is_meta)
    distinct = {id(code): code for code in (beside or {}).values()}.values()
    lengths = tuple(unit.symbols.values())
    return _codes.get(full_key, lengths, lambda common: InPieces(unit, generator, common, distinct, size))


def let_oldest_go(found: dict[Any, Any], most: int) -> None:
    """Leave the entries that were put in last, `most` of them."""
    while len(found) > most:
        del found[next(iter(found))]


def global_settings() -> Hashable:
    """The settings that code depends on beside its graph; Dynamo guards on it, so a change comes with a new capture."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return (torch.get_default_dtype(), deterministic, torch.get_float32_matmul_precision(), torch.get_num_threads())
