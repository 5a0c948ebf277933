"""Declare what several sections of a spec are made of: short forms, files, permissions."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

from hermes_rl.spec.section import FileText, MayTemplate, PathText, Section, SystemText, wrong


def short_for(key: str, *kinds: type) -> BeforeValidator:
    """Return a validator that accepts the short form of a section: a value of these kinds becomes the section with
    that key."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, kinds) else value)


def _octal_mode(value: Any) -> Any:
    """Return permission bits from octal digits, however YAML parsed them: ``0755`` is the YAML number 755."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return value
    if not re.fullmatch(r"(0o)?[0-7]{1,5}", str(value)):
        raise wrong("expected octal permissions such as 0755")
    return int(str(value).removeprefix("0o"), 8)


# Written with the sign that says octal, so that a section that is written out and read again keeps its bits.
FileMode = Annotated[int, BeforeValidator(_octal_mode), PlainSerializer(lambda value: f"0o{value:03o}"), MayTemplate()]


class File(Section):
    """A file put into the sandbox: exactly one of content, from, base64."""

    to: PathText = Field(description="Path in the sandbox, relative to its working directory.")
    content: FileText | None = Field(None, description="Text of the file.")
    from_: SystemText | None = Field(
        None, alias="from", description="File or folder to copy, below the folder of the spec after symlinks."
    )
    base64: str | None = Field(None, description="Bytes of the file in base64.")
    mode: FileMode | None = Field(
        None, description="Permissions in octal digits, such as 0755; default: the source's permissions, else 0644."
    )
