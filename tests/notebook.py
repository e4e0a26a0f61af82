"""Run the code of a notebook, cell by cell in one process, without Jupyter: `python tests/notebook.py NAME.ipynb` keeps
what it prints and shows in the notebook.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

Output = dict[str, Any]


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of a fresh run; an error of a cell is raised."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, number = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            outputs = run("".join(cell["source"]), names, number)
            cell = {**cell, "execution_count": number, "outputs": outputs}
        cells.append(cell)
    return {**notebook, "cells": cells}


def run(source: str, names: dict[str, Any], number: int) -> list[Output]:
    """What a cell has printed, and what its last line shows, if that is an expression."""
    code = ast.parse(source)
    last = code.body.pop() if code.body and isinstance(code.body[-1], ast.Expr) else None
    place, printed, shown = f"cell {number}", io.StringIO(), None
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, place, "exec"), names)
            if isinstance(last, ast.Expr):
                shown = eval(compile(ast.Expression(last.value), place, "eval"), names)
    except Exception as error:
        error.add_note(f"{place} had printed:\n{printed.getvalue()}")
        raise
    outputs: list[Output] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if shown is not None:
        outputs.append({"data": data(shown), "metadata": {}, "output_type": "display_data"})
    return outputs


def data(shown: Any) -> dict[str, Any]:
    """By kind, as notebooks have it: text, and a picture if the value has one."""
    found: dict[str, Any] = {"text/plain": repr(shown).splitlines(keepends=True)}
    if hasattr(shown, "_repr_png_"):
        found["image/png"] = base64.b64encode(shown._repr_png_()).decode()
    return found


def main() -> None:
    path = Path(sys.argv[1])
    made = executed(json.loads(path.read_text()))
    path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
