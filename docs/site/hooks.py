"""What mkdocs calls as it builds the site: `make site`. docs/site/pages.py has what it adds.

llms.txt lists the pages for language models, and each page's Markdown is beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pages
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

texts: dict[str, str] = {}  # of all pages


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    if missing := pages.undocumented():
        raise PluginError(f"public, but without a docstring or not in docs/reference: {', '.join(missing)}")
    for page, text in pages.made().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Have links lead to the site's pages."""
    texts[page.file.src_uri] = pages.linked(markdown, page.file.src_uri)
    return texts[page.file.src_uri]


def on_post_build(config: Any, **_: Any) -> None:
    """Write llms.txt, and every page's Markdown."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for section in config.nav:
        ((title, entries),) = section.items()
        lines += ["", f"## {title}", ""]
        for entry in entries:
            ((name, uri),) = entry.items()
            (site / uri).write_text(pages.plain(texts[uri]))
            lines.append(f"- [{name}]({uri}): {pages.first_sentence(texts[uri])}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
