"""Images of rows in prompts, in every form that a dataset may have them."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.data.rows import Row
from hermes_rl.errors import UserError
from hermes_rl.spec.load import parse_spec
from hermes_rl.spec.prompts import messages_of

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
DATA = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


class Decoded:
    """Stands for an image that the `datasets` package has decoded."""

    def save(self, file: io.BytesIO, format: str) -> None:  # noqa: A002 (Pillow's name)
        assert format == "PNG"
        file.write(PNG)


def part(image: Any, folder: Path = Path()) -> Any:
    prompt = parse_spec(
        "dataset: {items: [{q: hi, i: x}]}\nprompt: {user: [{text: '{{ q }}'}, {image: '{{ i }}'}]}\n"
    ).prompt
    (message,) = messages_of(prompt, Row("k", {"q": "hi", "i": image}, 0, "d"), folder)
    assert message["content"][0] == {"type": "text", "text": "hi"}
    return message["content"][1:]


@pytest.mark.parametrize(
    "image", [DATA, PNG, {"bytes": PNG, "path": None}, {"bytes": None, "path": "p.png"}, "p.png", Decoded()]
)
def test_bytes_paths_and_decoded_images(image: Any, tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(PNG)
    assert part(image, tmp_path) == [{"type": "image_url", "image_url": {"url": DATA}}]


def test_addresses_stay() -> None:
    assert part("https://a.example/x.png") == [{"type": "image_url", "image_url": {"url": "https://a.example/x.png"}}]
    detailed = {"url": "https://a.example/x.png", "detail": "low"}
    assert part(detailed) == [{"type": "image_url", "image_url": detailed}]


def test_image_file_of_row_must_be_regular(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to("/dev/zero")
    for name in ("pipe.png", "link.png"):
        with pytest.raises(UserError, match=f"the image .*{name}. cannot be read"):
            part(name, tmp_path)


@pytest.mark.parametrize("image", [None, ""])
def test_a_row_without_an_image_has_no_part(image: Any) -> None:
    assert part(image) == []


@pytest.mark.parametrize(
    ("image", "told"), [("none.png", "cannot be read"), (b"text", "not a PNG, JPEG"), (7, "int is not an image")]
)
def test_invalid_image_is_refused(image: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        part(image)
