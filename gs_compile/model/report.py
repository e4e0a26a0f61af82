"""report: the first step of every capture, for those who listen.

TORCH_LOGS="gs_compile"     one line: layers, classes, micro-batches, sizes
TORCH_LOGS="+gs_compile"    and the program
TORCH_TRACE=folder          artifacts gs_compile_program, gs_compile_layers and gs_compile_loss, which tlparse shows
"""

from __future__ import annotations

import logging

from torch._logging import trace_structured

from gs_compile.codegen.compiled import Compilation
from gs_compile.model.inspection import Inspection

log = logging.getLogger(__name__)


def report(compilation: Compilation) -> None:
    """Log the latest step of `compilation`, and add its artifacts to torch's structured trace where one is written."""
    inspection = Inspection(compilation, (compilation,))
    log.info("%s", inspection.headline)
    log.debug("%s", inspection.program())
    _artifact(compilation, "program", inspection.program())
    _artifact(compilation, "layers", inspection.uniformity)
    _artifact(compilation, "loss", inspection.derivation)


def _artifact(compilation: Compilation, name: str, content: object) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"gs_compile_{name}", "encoding": "string"},
        payload_fn=lambda: str(content),
        compile_id=compilation.compile_id,
    )
