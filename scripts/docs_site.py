"""What the documentation site has beyond `docs/`; ``mkdocs build --strict`` calls these hooks.

Owns the links that leave `docs/`, and what language models read: `llms.txt` with a copy of each page's Markdown
(https://llmstxt.org).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

_site: dict[str, Any] = {}

# ------------------------------------------------ Hooks of mkdocs, in the order in which they are called


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keep the order of the pages for `llms.txt`."""
    _site.clear()
    _site["nav"] = nav
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that leave `docs/` into the names of the files, as the site does not have these."""
    root = Path(config.docs_dir)

    def named(link: re.Match[str]) -> str:
        text, path = link[1], link[2]
        target = (root / page.file.src_path).parent / path
        if target.resolve().is_relative_to(root) or not target.exists():
            return link[0]  # mkdocs follows it, or says that it leads nowhere
        if PurePosixPath(path).suffix == ".md":
            return f"{text} (`{target.resolve().relative_to(root.parent)}`)"
        return f"`{text}`"

    markdown = re.sub(
        r"^(```\w+) title=(\S+)$", r'\1 title="\2"', markdown, flags=re.MULTILINE
    )  # as its highlighter reads it
    written = re.sub(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)", named, markdown)
    _site[page.file.src_uri] = written
    return written


def on_post_build(config: MkDocsConfig) -> None:
    """Write `llms.txt`, and each page's Markdown beside its HTML."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for part in _site["nav"].items:
        lines += ["", f"## {part.title}", ""]
        for page in _pages(part):
            path = page.file.src_uri
            text = _site[path]
            lines.append(f"- [{page.title}]({path}): {first_sentence(text)}")
            target = Path(config.site_dir) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _pages(part: Any) -> Iterator[Page]:
    if isinstance(part, Section):
        for child in part.children:
            yield from _pages(child)
    elif isinstance(part, Page):
        yield part


def first_sentence(text: str) -> str:
    """Return the first sentence of a page's first paragraph, with links as their text."""
    prose = re.sub(r"^(```.*?^```|\|.*?|#.*?)$", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraph = " ".join(next(part for part in prose.split("\n\n") if part.strip()).split())
    paragraph = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", paragraph)
    return re.split(r"(?<=[.!?])\s", paragraph, maxsplit=1)[0].rstrip(":")
