"""Makes a release of a clean checkout: `make release VERSION=1.0.0`. It publishes nothing.

The version goes to all places that name it, and the date to the changelog; every check runs, the slow ones too; wheel,
sdist and site are built; then all is committed and tagged. Where a check fails the places are as they were.
"""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = {  # what the version stands in, of each file
    "pyproject.toml": r'(?m)^version = "(.+)"$',
    "gs_compile/version.py": r'(?m)^__version__ = "(.+)"$',
    "CITATION.cff": r"(?m)^version: (.+)$",
    "CHANGELOG.md": r"(?m)^## (.+ \(unreleased\))$",
}
CHECKS = ("lint", "types", "test", "slow", "dist", "site")


def written(root: Path, version: str, day: str) -> dict[Path, str]:
    """The texts with this version in them, by their files; raises ValueError where it has no place, or is none."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise ValueError(f"{version!r} is no version, such as 1.0.0 or 1.0.0rc1")
    found = {}
    for name, pattern in PLACES.items():
        text = (root / name).read_text()
        matches = [*re.finditer(pattern, text)]
        if len(matches) != 1:
            raise ValueError(f"{name} has {len(matches)} places for a version, not 1")
        start, stop = matches[0].span(1)
        word = f"{version} ({day})" if name == "CHANGELOG.md" else version
        found[root / name] = text[:start] + word + text[stop:]
    return found


def run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(version: str) -> None:
    if changed := run("git", "status", "--porcelain"):
        raise SystemExit(f"a release is made of a clean checkout; there are changes:\n{changed}")
    texts = written(ROOT, version, date.today().isoformat())
    before = {path: path.read_text() for path in texts}
    for path, text in texts.items():
        path.write_text(text)
    try:
        subprocess.run(["make", *CHECKS], cwd=ROOT, check=True)
    except BaseException:
        for path, text in before.items():
            path.write_text(text)
        raise
    run("git", "commit", "--quiet", "--message", f"Release {version}", *PLACES)
    run("git", "tag", "--annotate", f"v{version}", "--message", f"Release {version}")
    print(f"v{version} is tagged, with dist/ and site/. Publish: git push --follow-tags; twine upload dist/*")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
