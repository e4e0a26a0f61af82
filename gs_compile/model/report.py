"""report: the first step of every capture, for those who listen.

TORCH_LOGS="gs_compile"     one line: layers, classes, micro-batches, sizes
TORCH_LOGS="+gs_compile"    and the program
TORCH_TRACE=folder          artifacts gs_compile_program, gs_compile_layers and gs_compile_loss, which tlparse shows
"""

from __future__ import annotations

import logging

from gs_compile.capture.internals import add_artifact
from gs_compile.codegen.compiled import Compilation
from gs_compile.model.inspection import Inspection

log = logging.getLogger(__name__)


def report(compilation: Compilation) -> None:
    """Log the latest step of `compilation`, and add its artifacts to torch's structured trace where one is written."""
    inspection = Inspection(compilation, (compilation,))
    log.info("%s", inspection.headline)
    log.debug("%s", inspection.program())
    add_artifact("gs_compile_program", lambda: str(inspection.program()), compilation.compile_id)
    add_artifact("gs_compile_layers", lambda: inspection.uniformity, compilation.compile_id)
    add_artifact("gs_compile_loss", lambda: inspection.derivation, compilation.compile_id)
