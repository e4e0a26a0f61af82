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

from benchmarks.common import save
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
            found["cases"] = {key: found["cases"][key] for key in CASES if key in found["cases"]}  # in this order
            save(found, arguments.output)
    if arguments.output == RESULTS:
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
