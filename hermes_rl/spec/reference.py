"""Explain the keys of a spec, one by one and on a page, from its JSON Schema.

`docs/spec-reference.md` is the page; `hermes-rl explain` shows one key. Examples come from the shipped specs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import yaml

from hermes_rl.spec.json_schema import CompiledSchema
from hermes_rl.spec.load import shipped_specs
from hermes_rl.spec.schema import spec_json_schema

LONGEST_EXAMPLE = 200
"""Maximum characters of an example that is taken from a shipped spec."""


@cache
def _spec_schema() -> dict[str, Any]:
    schema = spec_json_schema()
    # `atropos` lists its keys on the spot: it gets a section as the others have.
    atropos = schema["properties"]["atropos"]
    schema["$defs"]["atropos"] = {"description": atropos["description"], **atropos["anyOf"][0]}
    schema["properties"]["atropos"] = {"$ref": "#/$defs/atropos", "description": atropos["description"]}
    return schema


# ------------------------------------------------ One key


@dataclass(frozen=True)
class Key:
    """A key of a spec: its place, such as `serve.max_staleness`, and the meaning of each key in it.

    `example` is a value, from a shipped spec if one has the key.
    """

    path: str
    kind: str
    default: str
    meaning: str
    example: Any
    keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def yaml(self) -> str:
        """The example as YAML, below its keys."""
        value = self.example
        for name in reversed(self.path.split(".")):
            value = {name.removesuffix("[]"): [value] if name.endswith("[]") else value}
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100)


def find_key(path: str) -> Key | None:
    """Return the key at a path, in which a name of the user's may stand for `NAME`, or None if there is none."""
    schema, names = _spec_schema(), [name.removesuffix("[]") for name in path.split(".")]
    match = _find(schema, names)
    if names[0] == "rewards" and names[2:3] == ["args"] and (section := schema["$defs"].get(f"args_{names[1]}")):
        match = _find(section, names[3:]) if names[3:] else match
        match = None if match is None else ([*names[:3], *match[0]], *match[1:])
    if match is None:
        return None
    names, value, owner = match
    kinds = [_plain(kind) for kind in dict.fromkeys(_type_descriptions(value, _section_titles(schema)))]
    title = ".".join(names)
    subsection: dict[str, Any] = next((schema["$defs"][name] for name, _ in _sections_in(value)), {})
    return Key(
        path=title,
        kind=" or ".join("section" if kind == title else kind for kind in kinds) or "anything",
        default=_plain(_default_text(names[-1], value, owner)).strip("`") or "none",
        meaning=_plain(value.get("description") or subsection.get("description", "")),
        example=_shortest_example(names, value),
        keys={key: _plain(each.get("description", "")) for key, each in subsection.get("properties", {}).items()},
    )


def key_paths() -> list[str]:
    """Return the path of every key; `NAME` is a name of the user's, and `[]` an item of a list."""
    schema = _spec_schema()
    titles = {"": schema, **{f"{title}.": schema["$defs"][name] for name, title in _section_titles(schema).items()}}
    return [f"{prefix}{key}" for prefix, section in titles.items() for key in section.get("properties", {})]


def reward_arguments(reward: str) -> list[Key]:
    """Return the arguments of a shipped reward."""
    names = _spec_schema()["$defs"].get(f"args_{reward}", {}).get("properties", {})
    return [key for name in names if (key := find_key(f"rewards.{reward}.args.{name}")) is not None]


def reward_example(reward: str) -> str:
    """Return a use of a shipped reward, as YAML: from a shipped spec, else with the arguments that it requires."""
    uses = [
        {name: use}
        for spec in _load_shipped_specs()
        for name, use in (spec.get("rewards") or {}).items()
        if isinstance(use, dict) and use.get("fn", name) == reward
    ]
    required = _spec_schema()["$defs"].get(f"args_{reward}", {}).get("required", ())
    arguments = {key.path.rpartition(".")[2]: key.example for key in reward_arguments(reward)}
    minimal_use = {reward: {"args": {name: arguments[name] for name in required}} if required else {}}
    value = min(uses, key=lambda use: len(str(use)), default=minimal_use)
    return yaml.safe_dump({"rewards": value}, sort_keys=False, allow_unicode=True, width=100)


_ITEM = "[]"


def _find(value: Mapping[str, Any], names: Sequence[str]) -> tuple[list[str], dict[str, Any], dict[str, Any]] | None:
    """Return the full path of a key with its schema and the schema of its section; None if there is no such key."""
    if "$ref" in value:
        return _find(_spec_schema()["$defs"][value["$ref"].rpartition("/")[2]], names)
    name, *rest = names
    held = (*value.get("patternProperties", {}).values(), value.get("additionalProperties"))
    child = value.get("properties", {}).get(name, held[0])
    if isinstance(child, dict):
        if not rest:
            return [name], child, dict(value)
        if (match := _find(child, rest)) is not None:
            first, *remaining = match[0]
            return ([f"{name}[]", *remaining] if first == _ITEM else [name, first, *remaining]), *match[1:]
    for choice in _alternatives(value):
        if (match := _find(choice, names)) is not None:
            return match
    match = _find(value["items"], names) if "items" in value else None
    return None if match is None else ([_ITEM, *match[0]], *match[1:])


def _alternatives(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for kind in ("anyOf", "oneOf", "allOf"):
        yield from value.get(kind, ())


def _plain(text: str) -> str:
    """Return Markdown of the page as text for a terminal."""
    text = re.sub(r"\[(\S+?)\]\(#[^)]*\)", r"\1", text).replace("&nbsp;", " ").replace("&lt;", "<")
    return " ".join(text.replace("``", "`").split())


@cache
def _load_shipped_specs() -> list[dict[str, Any]]:
    return [yaml.safe_load(path.read_text(encoding="utf-8")) for path in shipped_specs().values()]


def _shortest_example(names: Sequence[str], value: Mapping[str, Any]) -> Any:
    """Return the shortest value that a shipped spec has there, else the one of the description ("such as 3600"), else
    one that the schema allows.
    """
    used = [each for spec in _load_shipped_specs() for each in _values_at(spec, names)]
    used = [each for each in used if each not in (None, [], {}) and len(str(each)) <= LONGEST_EXAMPLE]
    used.sort(key=lambda each: len(str(each)))
    description = value.get("description", "")
    written: list[Any] = ["file.py:name"] if "file.py:" in description else []
    if match := re.search(r"such as (?:``?([^`]+)`|([^\s,;)]+))", description):
        text = match[1] or match[2].rstrip(".")
        written += [text, int(text) if text.isdigit() else text, [text]]
    return next(each for each in (*used, *written, *_possible_values(value)) if each != {} and _is_valid(each, value))


def _is_valid(example: Any, value: Mapping[str, Any]) -> bool:
    return bool(CompiledSchema({"$defs": _spec_schema()["$defs"], **value}).validator.is_valid(example))


def _values_at(value: Any, names: Sequence[str]) -> Iterator[Any]:
    """Yield the values of a spec at a path; NAME in the path matches every user-defined name."""
    if isinstance(value, list):
        for each in value:
            yield from _values_at(each, names)
    elif not names:
        yield value
    elif isinstance(value, dict):
        name = names[0].removesuffix("[]")
        children = [value[name]] if name in value else list(value.values()) if name == "NAME" else []
        for each in children:
            yield from _values_at(each, names[1:]) if names[1:] else [each]


def _possible_values(value: Mapping[str, Any]) -> Iterator[Any]:
    """Yield values that a schema may allow."""
    if "$ref" in value:
        section = _spec_schema()["$defs"][value["$ref"].rpartition("/")[2]]
        properties = section.get("properties", {})
        for chosen in (section.get("required", ()), *([name] for name in properties)):
            section_value = {
                name: next(
                    (each for each in _possible_values(properties[name]) if _is_valid(each, properties[name])), None
                )
                for name in chosen
            }
            yield section_value
        return
    if value.get("default") not in (None, []) and not isinstance(value["default"], dict):
        yield (not value["default"]) if isinstance(value["default"], bool) else value["default"]
    yield from value.get("enum", [value["const"]] if "const" in value else ())
    for choice in _alternatives(value):
        yield from _possible_values(choice)
    if "items" in value:
        yield from ([each] for each in _possible_values(value["items"]))
    held = value.get("additionalProperties")
    if isinstance(held, dict):
        yield from ({"NAME": each} for each in _possible_values(held))
    yield from (value["minimum"],) if "minimum" in value else ()
    yield from (True, 1, 0.5, "text", "{{ column }}", "file.py:name", {"key": "text"}, ["text"])


# ------------------------------------------------ The page of all keys


def reference_page() -> str:
    """Return the page: a table for the top of a spec, for each section, and for the arguments of each reward."""
    schema = _spec_schema()
    sections = schema["$defs"]
    titles = _section_titles(schema)
    lines = [
        "# Every key of a spec",
        "",
        "This page lists every key of a spec with its type and default. It is generated from the JSON Schema, "
        "which `hermes-rl schema` prints; [the spec](spec.md) explains how the sections work together.",
        "",
        "A key with `null` is the same as an absent key. If a type is not text, `${VAR}` may replace the complete "
        "value; if it is a template, `{{ }}` may. `[]` means each item of a list, and `NAME` a user-defined name.",
        "",
        "## The top of a spec",
        "",
        *_section_table(schema, titles),
    ]
    for name, title in titles.items():
        lines += [
            f"## {title}",
            "",
            _as_markdown(sections[name]["description"]),
            "",
            *_section_table(sections[name], titles),
        ]
    lines += [
        "## Arguments of the shipped rewards",
        "",
        "The [table of rewards](rewards.md#choose-a-shipped-reward) says when each is 1.",
        "",
    ]
    for name in sorted(sections):
        if name.startswith("args_"):
            description = _as_markdown(sections[name].get("description", ""))
            lines += [f"### {name.removeprefix('args_')}", "", description, "", *_section_table(sections[name], titles)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _section_titles(schema: dict[str, Any]) -> dict[str, str]:
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
    """Yield the sections that a value may be or contain, each with the path suffix that leads from the key to it."""
    if (name := _section_name(value)) is not None:
        yield name, suffix
    for choice in (*value.get("anyOf", ()), *value.get("oneOf", ())):
        yield from _sections_in(choice, suffix)
    if "items" in value:
        yield from _sections_in(value["items"], f"{suffix}[]")
    for value_schema in (value.get("additionalProperties"), *value.get("patternProperties", {}).values()):
        if isinstance(value_schema, dict):
            yield from _sections_in(value_schema, f"{suffix}.NAME")


def _section_name(value: dict[str, Any]) -> str | None:
    name = value.get("$ref", "").rpartition("/")[2]
    return name if name and name != "variable" else None


def _section_table(section: dict[str, Any], titles: dict[str, str]) -> list[str]:
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    for key, value in section.get("properties", {}).items():
        kinds = " or ".join(dict.fromkeys(_type_descriptions(value, titles))) or "anything"
        cells = (f"`{key}`", kinds, _default_text(key, value, section), _as_markdown(value.get("description", "")))
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return [*rows, ""]


def _as_markdown(description: str) -> str:
    """Return a description as Markdown, with `<name>` escaped because it is not an HTML tag."""
    return description.replace("``", "`").replace("<", "&lt;")


def _default_text(key: str, value: dict[str, Any], section: dict[str, Any]) -> str:
    if key in section.get("required", ()):
        return "required"
    default = value.get("default")
    if default in (None, []) or isinstance(default, dict):
        return ""  # absent, or the section's table has the defaults
    return _flow_yaml(default)


def _flow_yaml(value: object) -> str:
    """Return a value as YAML has it in flow style; a text stands without its quotes."""
    return f"`{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}`"


def _type_descriptions(value: dict[str, Any], titles: dict[str, str]) -> Iterator[str]:
    """Yield descriptions of a value's possible types. The top of the page explains null and `${VAR}`."""
    name = _section_name(value)
    if name is not None:
        yield f"[{titles[name]}](#{_anchor_of(titles[name])})"
    elif choices := (*value.get("anyOf", ()), *value.get("oneOf", ())):
        for choice in choices:
            yield from _type_descriptions(choice, titles)
    elif "enum" in value or "const" in value:
        yield from map(_flow_yaml, value.get("enum", [value.get("const")]))
    elif "{{" in value.get("pattern", "").replace("\\", ""):
        yield "template"
    elif value.get("type") == "array":
        content_kinds = list(dict.fromkeys(_type_descriptions(value.get("items") or {}, titles)))
        yield f"list of {' or '.join(content_kinds)}" if content_kinds else "list"
    elif value.get("type") == "object":
        held = value.get("additionalProperties")
        content_kinds = list(dict.fromkeys(_type_descriptions(held, titles))) if isinstance(held, dict) else []
        yield f"mapping to {' or '.join(content_kinds)}" if content_kinds else "mapping"
    elif value.get("type") not in ("null", None):
        yield _describe_bounds({"string": "text"}.get(value["type"], value["type"]), value)


def _describe_bounds(kind: str, value: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign}&nbsp;{value[name]:g}" for name, sign in signs.items() if name in value]
    return f"{kind} {', '.join(bounds)}" if bounds else kind


def _anchor_of(title: str) -> str:
    return re.sub(r"[^\w\s-]", "", title).strip().lower()
