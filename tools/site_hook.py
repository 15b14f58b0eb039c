"""MkDocs hook: the README is the site's first page, and files that pages link to outside of docs/ join the site."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)]*)?\)")


def locate_on_site(path: Path) -> str:
    """Return where the site has a file of the repository, relative to the site's root."""
    if path == README:
        return "index.md"
    return path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) else f"repository/{path.relative_to(ROOT).as_posix()}"


def list_outer_files() -> list[Path]:
    """Return the README and every file outside of docs/ that a page of the site links to."""
    pages = [README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
    outer = [page for page in pages if not page.is_relative_to(DOCS)]
    for page in pages:  # grows while it is read: linked pages have links too
        for link, _ in LINK.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / link).resolve()
            if path.is_file() and not path.is_relative_to(DOCS) and path not in outer:
                outer.append(path)
                if path.suffix == ".md":
                    pages.append(path)
    return outer


def list_folder(folder: str) -> list[str]:
    """Return the pages of a folder of docs/, its README first."""
    pages = sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / folder).glob("*.md") if path.name != "template.md")
    return sorted(pages, key=lambda page: not page.endswith("README.md"))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace each folder of the navigation by its pages."""
    config.nav = [
        {title: list_folder(entry) if isinstance(entry, str) and entry.endswith("/") else entry for title, entry in item.items()}
        for item in config.nav or []
    ]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for path in list_outer_files():
        files.append(File.generated(config, locate_on_site(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = Path(page.file.abs_src_path or "")
    here = Path(page.file.src_uri).parent

    def move(link: re.Match[str]) -> str:
        target = locate_on_site((source.parent / link[1]).resolve())
        return f"]({os.path.relpath(target, here)}{link[2] or ''})"

    return LINK.sub(move, markdown)
