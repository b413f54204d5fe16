"""What mkdocs.yml asks of us while the site is built: pages made from the code, and links that lead out of docs/.

Pages of the reference are never written by hand, so they cannot say what the code does not.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path, PurePosixPath
from posixpath import relpath
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent.parent
OUT = re.compile(r"\]\(((?:\.\./)+examples(?:/[^)#]*)?)\)")  # links to examples, which have a page here


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is made from the code."""
    for path, content in reference.pages(ROOT).items():
        if files.get_file_from_path(path) is not None:
            raise PluginError(f"docs/{path} is generated; there must be no such file")
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """A link to a file of examples/ leads to where the site shows it."""

    def here(found: re.Match[str]) -> str:
        path = found[1].lstrip("./")
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: there is no {path}")
        to = relpath(reference.EXAMPLES, PurePosixPath(page.file.src_uri).parent.as_posix())
        anchor = "" if (ROOT / path).is_dir() else f"#{reference.anchor(path)}"
        return f"]({to}{anchor})"

    return OUT.sub(here, markdown)
