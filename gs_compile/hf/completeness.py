"""completeness: whether a quantized checkpoint has every tensor of each matrix, by the headers of its files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from safetensors import safe_open

from gs_compile.errors import OptionError

DECODE = (
    "Have transformers decode the checkpoint, as by quantization_config=FineGrainedFP8Config(dequantize=True), and "
    "with frozen= its matrices are encoded in the first call"
)
OF_A_BYTE = {"U8", "I8", "F8_E4M3", "F8_E5M2"}  # dtypes of one byte, as headers call them
ORDINARY = {"scales"}  # names that other modules' tensors have, too


def missing_of(found: Mapping[str, bool], needed: Sequence[str]) -> list[str]:
    """The needed tensors that a matrix lacks.

    found: its tensors, and whether their elements have one byte: a single weight with wider ones is not quantized.
    """
    if found.keys() == {"weight"} and not found["weight"]:
        return []
    return [name for name in needed if name not in found]


def refuse_partial(files: Sequence[str], needed: Sequence[str]) -> None:
    """Raise OptionError, before anything is read, if a matrix lacks a tensor that decoding needs.

    files: in the safetensors format; others are checked when they are read. needed: the ends of these tensors' names.
    """
    ends = {end if end.startswith("_") else f".{end}": end for end in needed}
    found: defaultdict[str, dict[str, bool]] = defaultdict(dict)
    place: dict[str, str] = {}
    for path in (path for path in files if path.endswith(".safetensors")):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                if (end := next(filter(name.endswith, ends), None)) is not None:
                    matrix = name.removesuffix(end)
                    found[matrix][ends[end]] = file.get_slice(name).get_dtype() in OF_A_BYTE
                    place[matrix] = path
    partial = {name: missing_of(each, needed) for name, each in found.items() if each.keys() - ORDINARY}
    partial = {name: missing for name, missing in partial.items() if missing}
    if partial:
        matrix, missing = next(iter(partial.items()))
        full = {end: f"{matrix}{separated}" for separated, end in ends.items()}
        raise OptionError(
            f"{place[matrix]} has {full[next(iter(found[matrix]))]}, and no file of the checkpoint has "
            f"{' and '.join(full[end] for end in missing)}, without which its values are not known ({len(partial)} "
            f"such matrices in all). Make or download the checkpoint again, whole. Or, where it has them by other "
            f"names: {DECODE}"
        )
