"""MkDocs hooks: README.md is the first page, every decision has its page, links out of docs/ work.

Pages link to each other and to the repository's files as they do where the repository is browsed.
Files outside docs/ that a page links to are copied into the site, below `repository/`.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)")


def on_config(config: Any) -> Any:
    """List every decision in the navigation, the index first."""
    pages = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    for section in config.nav:
        if "Decisions" in section:
            section["Decisions"] += [f"decisions/{page}" for page in pages]
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add README.md, and what pages link to outside docs/."""
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    pages = [file for file in files if file.src_uri.endswith(".md")]
    while pages:
        page = pages.pop()
        for _, target in LINK.findall(page.content_string):
            source = _resolved(page.src_uri, target)
            uri = _uri(source)
            if (ROOT / source).is_file() and files.get_file_from_path(uri) is None:
                file = File.generated(config, uri, abs_src_path=str(ROOT / source))
                files.append(file)
                if uri.endswith(".md"):
                    pages.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Have links lead to where the files are in the site."""
    here = PurePosixPath(page.file.src_uri).parent

    def moved(match: re.Match[str]) -> str:
        uri = _uri(_resolved(page.file.src_uri, match[2]))
        return match[1] + os.path.relpath(uri, here)

    return LINK.sub(moved, markdown)


def _resolved(page_uri: str, target: str) -> str:
    """Return the path in the repository that a page of the site links to."""
    if page_uri == "index.md":
        folder = "."
    elif page_uri.startswith("repository/"):
        folder = str(PurePosixPath(page_uri).parent.relative_to("repository"))
    else:
        folder = str("docs" / PurePosixPath(page_uri).parent)
    return os.path.normpath(f"{folder}/{target}")


def _uri(source: str) -> str:
    """Return where a file of the repository is in the site."""
    if source == "README.md":
        return "index.md"
    return source.removeprefix("docs/") if source.startswith("docs/") else f"repository/{source}"
