"""Define the base of every section of a spec, and the small types that sections share.

`Section` is strict (it never converts a wrong type), immutable, and declares the types that a template may render to.
Each section documents its keys; `hermes_rl.spec.rules` checks which keys go together.
"""

from __future__ import annotations

import math
import os
import re
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, Strict
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from hermes_rl.spec.nodes import NodePath
from hermes_rl.values import is_number, system_bytes, url_text

# ---------------------------------------------------------------------- Sizes and durations: ``2GiB``, ``1h30m``

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "ki": 2**10, "kib": 2**10, "mi": 2**20, "mib": 2**20, "gi": 2**30, "gib": 2**30,
    "ti": 2**40, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


def parse_size(text: str) -> int:
    """Return the bytes of ``512``, ``2GiB`` (powers of 1024) or ``2GB`` (powers of 1000)."""
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].lower()) if match else None
    size = float(match[1]) * factor if match and factor is not None else math.nan
    if not is_number(size):
        raise ValueError(f"{text[:100]!r} is not a size; write bytes, or 512MiB, 2GiB, 2GB")
    return int(size)


def parse_duration(text: str) -> float:
    """Return the seconds of ``90s``, ``15m``, ``1h30m`` or ``2d``."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not match[0]:
        raise ValueError(f"{text!r} is not a duration; write seconds, or 90s, 15m, 1h30m, 2d")
    parts = zip(match.groups(), _SECONDS.values(), strict=True)
    return sum(float(count) * seconds for count, seconds in parts if count)


# -------------------------------------------------------------------------- Which keys a place of the spec knows


def keys(model: type[BaseModel]) -> list[str]:
    """Return all keys of a section, in order."""
    return [field.alias or name for name, field in model.model_fields.items()]


def keys_at(model: type[BaseModel], path: NodePath) -> list[str]:
    """Return the keys that the mapping at a path may have; empty if it accepts any key."""
    value_types = types_at(model, path)
    # a server may be written without its list
    value_types += [
        member
        for value_type in value_types
        if get_origin(value_type) is tuple
        for member in members(get_args(value_type)[0])
    ]
    sections = [
        value_type for value_type in value_types if isinstance(value_type, type) and issubclass(value_type, BaseModel)
    ]
    return [key for section in sections for key in keys(section)] + ([] if path else ["extends"])


def types_at(model: type[BaseModel], path: NodePath) -> list[Any]:
    """Return the types that the value at a path may have."""
    possible: list[Any] = [model]
    for step in path:
        possible = [child_type for outer in possible for child_type in _step_into(outer, step)]
    return possible


def _step_into(outer: Any, step: str | int) -> list[Any]:
    if isinstance(outer, type) and issubclass(outer, BaseModel):
        for name, field in outer.model_fields.items():
            if step in (name, field.alias):
                return members(field.annotation)
        return []
    container, args = get_origin(outer), get_args(outer)
    if container is tuple and args:
        item_types = members(args[0])
        # one server may be written without its list
        return (
            item_types
            if isinstance(step, int)
            else [part for argument in item_types for part in _step_into(argument, step)]
        )
    if container is not None and isinstance(container, type) and issubclass(container, Mapping):
        return members(args[1])
    return []


def members(annotation: Any) -> list[Any]:
    """Return the alternatives of a type, without Annotated, None and unions."""
    if isinstance(annotation, TypeVar):
        return []
    container = get_origin(annotation)
    if container is Annotated:
        return members(get_args(annotation)[0])
    if container in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in members(part)]
    return [] if annotation is type(None) else [annotation]


# ------------------------------------------------------------------------------------------------------ Sections

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

TEMPLATE_MARK = re.compile(r"\{\{|\{%|\{#")
RENDERED = "rendered"
"""Key of the validation context. It means that templates have been rendered, so a string is not a template any more."""


class Section(BaseModel):
    """A mapping of the spec: frozen, strict, and without unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        defer_build=True,  # most specs have few of the sections
        coerce_numbers_to_str=True,  # for rendered templates; strict reading of YAML does not use it
    )


class FrozenDict(dict[K, V]):
    """A dict that cannot be changed, so that a spec is a value; it compares and serialises as a dict."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a spec cannot be changed; load it with overrides instead")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __reduce__(self) -> tuple[type, tuple[dict[K, V]]]:
        return (type(self), (dict(self),))

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenDict[K, V]:
        return self

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self))


def freeze(value: Any) -> Any:
    """Return the same value with tuples for lists and frozen mappings for mappings, all the way down."""
    if isinstance(value, Mapping):
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


def to_plain(value: Any) -> Any:
    """Return the opposite of `freeze`: plain lists and dicts that the caller may change."""
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def wrong(message: str, *path: str | int, part: str = "value") -> PydanticCustomError:
    """Return an error for a validator to raise; `path` leads from the validated value to the part that is wrong."""
    # pydantic formats the message with the context, so its own braces have to come from the context too
    return PydanticCustomError("spec", "{message}", {"message": message, "path": list(path), "at": part})


def is_template(value: object) -> bool:
    """Return True for a string in which Jinja finds something to do."""
    return isinstance(value, str) and TEMPLATE_MARK.search(value) is not None


def _unless_template(
    value: Any, handler: core_schema.ValidatorFunctionWrapHandler, info: core_schema.ValidationInfo
) -> Any:
    if is_template(value) and not (info.context or {}).get(RENDERED):
        return value
    return handler(value)


def _dump_late(value: Any, handler: core_schema.SerializerFunctionWrapHandler) -> Any:
    return value if is_template(value) else handler(value)


class MayTemplate:
    """Marks a field that may hold a template until the row is known; what it renders to is then checked."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        written = core_schema.wrap_serializer_function_ser_schema(_dump_late, schema=schema)
        return core_schema.with_info_wrap_validator_function(_unless_template, schema, serialization=written)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": "string", "pattern": r"\{\{|\{%"}]}


class LazySection:
    """A section with its own validator, which is built when the first spec with that section is read."""

    def __init__(self, section: type[Section]) -> None:
        self.section = section

    def __call__(self, value: Any, info: core_schema.ValidationInfo) -> Section:
        return self.section.model_validate(value, context=info.context)


def _dump_section(value: Section, handler: core_schema.SerializerFunctionWrapHandler) -> Any:
    type(value).model_rebuild()
    return handler(value)


class _BuiltLater:
    """Mark a section to use its own, lazily built validator: building all of them takes longer than checking a small
    spec."""

    def __get_pydantic_core_schema__(self, source: type[Section], handler: GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.wrap_serializer_function_ser_schema(_dump_section)
        return core_schema.with_info_plain_validator_function(LazySection(source), serialization=written)


def _parse_text(read: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Return a validator that parses a text; its ValueError describes the fault."""

    def validate(value: Any) -> Any:
        try:
            return read(value) if isinstance(value, str) else value
        except ValueError as error:
            raise wrong(str(error)) from None

    return validate


def _as_text(value: Any) -> Any:
    """Return numbers and booleans as text, for programs that read text anyway."""
    text = str(value) if isinstance(value, int | float) else value
    return text.lower() if isinstance(value, bool) else text


def _check_system(value: str) -> str:
    system_bytes(value)
    return value


def _check_encodable(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong("the text contains an unpaired surrogate, which no file can store") from None
    return value


LONGEST_NAME, LONGEST_PATH = 255, 4095
"""Bytes of a file's name and of a path, as Linux has them."""


def _check_path(value: str) -> str:
    if not value or value.isspace():
        raise wrong("a path has at least one character")
    sizes = [len(os.fsencode(name)) for name in value.split("/")]
    if max(sizes) > LONGEST_NAME or sum(sizes) + len(sizes) > LONGEST_PATH:
        raise wrong(f"the path is too long: a name has at most {LONGEST_NAME} bytes, a path {LONGEST_PATH}")
    return value


Late = Annotated[T, _BuiltLater()]
Seq = Annotated[tuple[T, ...], Strict(False)]
Map = Annotated[Mapping[str, T], AfterValidator(freeze)]
Free = Annotated[Any, AfterValidator(freeze)]
FreeMap = Annotated[Mapping[str, Any], AfterValidator(freeze)]
Pair = Annotated[tuple[float, float], Strict(False)]
Size = Annotated[int, BeforeValidator(_parse_text(parse_size))]
Seconds = Annotated[float, BeforeValidator(_parse_text(parse_duration))]
SystemText = Annotated[str, AfterValidator(_parse_text(_check_system))]
EnvText = Annotated[SystemText, BeforeValidator(_as_text)]
UrlText = Annotated[str, AfterValidator(_parse_text(url_text))]
FileText = Annotated[str, AfterValidator(_check_encodable)]
PathText = Annotated[SystemText, AfterValidator(_check_path)]
EMPTY: FrozenDict[str, Any] = FrozenDict()
