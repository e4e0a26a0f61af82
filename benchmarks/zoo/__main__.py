"""Tries architectures of other packages: each trains two steps on SSD and in memory, and is held to plain PyTorch.

make zoo                                              # all of them; docs/models.md
.venv-zoo/bin/python -m benchmarks.zoo torch timm/vit # those whose names begin so; the others keep their results
python -m benchmarks.zoo --page                       # writes the page from the results alone
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.zoo.page import PAGE, RESULTS, page
from benchmarks.zoo.registry import CASES

PACKAGES = ("torch", "transformers", "litgpt", "x-transformers", "timm", "torchtune")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__.splitlines()[0])
    parser.add_argument("prefixes", nargs="*", help="beginnings of names, such as transformers/gpt; all without any")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=300.0, help="after which a case has failed")
    parser.add_argument("--page", action="store_true", help="try nothing, and write the page")
    arguments = parser.parse_args()
    found = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"cases": {}}
    if not arguments.page:
        from benchmarks.zoo.run import results

        chosen = [case for key, case in CASES.items() if key.startswith(tuple(arguments.prefixes or [""]))]
        found["versions"] = {name: version(name).partition("+")[0] for name in PACKAGES}
        for number, (case, result) in enumerate(results(chosen, arguments.seconds), 1):
            found["cases"][case.key] = result
            print(f"{number} of {len(chosen)}, {case.key}: {result['result']} {result.get('why', '')}", flush=True)
            save(found, arguments.output)
    if arguments.output == RESULTS:
        PAGE.write_text(page(found))


def save(found: dict[str, Any], output: Path) -> None:
    """Writes the results in the order of the registry, without cases that it has no more."""
    found["cases"] = {key: found["cases"][key] for key in CASES if key in found["cases"]}
    unfinished = output.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(found, indent=1) + "\n")
    unfinished.replace(output)


if __name__ == "__main__":
    main()
