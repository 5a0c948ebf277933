"""What the documentation site has beyond `docs/`; ``mkdocs build --strict`` calls these hooks.

Owns the page of all keys, which is made from the spec's schema, the links that leave `docs/`, and what language models
read: `llms.txt` with a copy of each page's Markdown (https://llmstxt.org).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

from hermes_rl.spec.schema import spec_json_schema

REFERENCE = "spec-reference.md"
_site: dict[str, Any] = {}

# ------------------------------------------------ The page of all keys


def reference() -> str:
    """Return the page: a table for the top of a spec, for each section, and for the arguments of each reward."""
    schema = spec_json_schema()
    sections = schema["$defs"]
    # `atropos` lists its keys on the spot: it gets a section as the others have.
    atropos = schema["properties"]["atropos"]
    sections["atropos"] = {"description": atropos["description"], **atropos["anyOf"][0]}
    schema["properties"]["atropos"] = {"$ref": "#/$defs/atropos", "description": atropos["description"]}
    titles = _titles(schema)
    lines = [
        "# Every key of a spec",
        "",
        "This page has every key of a spec with its type and default. It is made from the JSON Schema, which "
        "`hermes-rl schema` prints; how the sections go together is in [the spec](spec.md).",
        "",
        "A key with `null` is as good as absent. Where a type is not text, `${VAR}` may stand for the whole value; "
        "where it is a template, `{{ }}` may. `[]` is each item of a list, and `NAME` a name of your own.",
        "",
        "## The top of a spec",
        "",
        *_table(schema, titles),
    ]
    for name, title in titles.items():
        lines += [f"## {title}", "", _prose(sections[name]["description"]), "", *_table(sections[name], titles)]
    lines += [
        "## Arguments of the shipped rewards",
        "",
        "The [table of rewards](rewards.md#choose-a-shipped-reward) says when each is 1.",
        "",
    ]
    for name in sorted(sections):
        if name.startswith("args_"):
            described = _prose(sections[name].get("description", ""))
            lines += [f"### {name.removeprefix('args_')}", "", described, "", *_table(sections[name], titles)]
    return "\n".join(lines) + "\n"


def _titles(schema: dict[str, Any]) -> dict[str, str]:
    """Return each section with the shortest path of keys that leads to it, in the order of the spec's top."""
    titles: dict[str, str] = {}
    level = [("", schema)]
    while level:
        above, level = level, []
        for path, section in above:
            for key, value in section.get("properties", {}).items():
                for name, suffix in _sections_in(value):
                    if name not in titles:
                        titles[name] = f"{path}{key}{suffix}"
                        level.append((f"{titles[name]}.", schema["$defs"][name]))
    top = list(schema["properties"])
    return dict(sorted(titles.items(), key=lambda item: top.index(re.split(r"[.\[]", item[1])[0])))


def _sections_in(value: dict[str, Any], suffix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the sections that a value may be or hold, each with what stands behind the key on the way to it."""
    if (name := _section(value)) is not None:
        yield name, suffix
    for choice in (*value.get("anyOf", ()), *value.get("oneOf", ())):
        yield from _sections_in(choice, suffix)
    if "items" in value:
        yield from _sections_in(value["items"], f"{suffix}[]")
    for inner in (value.get("additionalProperties"), *value.get("patternProperties", {}).values()):
        if isinstance(inner, dict):
            yield from _sections_in(inner, f"{suffix}.NAME")


def _section(value: dict[str, Any]) -> str | None:
    name = value.get("$ref", "").rpartition("/")[2]
    return name if name and name != "variable" else None


def _table(section: dict[str, Any], titles: dict[str, str]) -> list[str]:
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    for key, value in section.get("properties", {}).items():
        kinds = " or ".join(dict.fromkeys(_kinds(value, titles))) or "anything"
        cells = (f"`{key}`", kinds, _default(key, value, section), _prose(value.get("description", "")))
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return [*rows, ""]


def _prose(description: str) -> str:
    """Return a description as Markdown: `<name>` is no tag of HTML."""
    return description.replace("``", "`").replace("<", "&lt;")


def _default(key: str, value: dict[str, Any], section: dict[str, Any]) -> str:
    if key in section.get("required", ()):
        return "required"
    default = value.get("default")
    if default in (None, []) or isinstance(default, dict):
        return ""  # absent, or the defaults of the section's own table
    return _code(default)


def _code(value: object) -> str:
    """Return a value as YAML has it in flow style; a text stands without its quotes."""
    return f"`{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}`"


def _kinds(value: dict[str, Any], titles: dict[str, str]) -> Iterator[str]:
    """Yield what a value may be, in words; null and `${VAR}` are left to the page's top."""
    name = _section(value)
    if name is not None:
        yield f"[{titles[name]}](#{_anchor(titles[name])})"
    elif choices := (*value.get("anyOf", ()), *value.get("oneOf", ())):
        for choice in choices:
            yield from _kinds(choice, titles)
    elif "enum" in value or "const" in value:
        yield from map(_code, value.get("enum", [value.get("const")]))
    elif "{{" in value.get("pattern", "").replace("\\", ""):
        yield "template"
    elif value.get("type") == "array":
        inner = list(dict.fromkeys(_kinds(value.get("items") or {}, titles)))
        yield f"list of {' or '.join(inner)}" if inner else "list"
    elif value.get("type") == "object":
        held = value.get("additionalProperties")
        inner = list(dict.fromkeys(_kinds(held, titles))) if isinstance(held, dict) else []
        yield f"mapping to {' or '.join(inner)}" if inner else "mapping"
    elif value.get("type") not in ("null", None):
        yield _bounded({"string": "text"}.get(value["type"], value["type"]), value)


def _bounded(kind: str, value: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign}&nbsp;{value[name]:g}" for name, sign in signs.items() if name in value]
    return f"{kind} {', '.join(bounds)}" if bounds else kind


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\s-]", "", title).strip().lower()


# ------------------------------------------------ Hooks of mkdocs, in the order in which they are called


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of all keys, which is not committed."""
    files.append(File.generated(config, REFERENCE, content=reference()))
    _site.clear()
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keep the order of the pages for `llms.txt`."""
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
