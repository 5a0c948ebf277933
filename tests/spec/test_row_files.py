"""Files and images that the values of a row name."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl.spec.row_files import image_path
from hermes_rl.spec.templates import TemplateError


@pytest.mark.parametrize(
    ("template", "image", "taken"),
    [
        ("{{ image }}", "roots/a", True),
        ("{{ image }}", "/etc", False),
        ("{{ image }}", "../a", False),
        ("{{ image }}/rootfs", "/a/rootfs", False),
        ("{{ image ~ '/a' }}", "/etc/a", False),
        ("{{ image | replace('/', '') }}", "/etc", False),
        ("roots/{{ name }}", "roots/../../a", False),
        ("/data/images/{{ name }}", "/data/images/a", True),
        ("/data/images/{{ name }}", "/data/images/../a", False),
        ("{% if name %}/data/x/{{ name }}{% else %}a{% endif %}", "/data/x/a", True),
        ("{{ '/data/' ~ name if name else none }}", "/data/a", True),
        ("/{{ image }}", "//data/a", True),
        ("/data/a", "/data/a", True),  # of the spec alone
    ],
)
def test_row_image_must_be_inside_the_directory_named_by_the_template(template: str, image: str, taken: bool) -> None:
    if taken:
        assert image_path(image, template, Path("/spec"), "sandbox.image") == Path("/spec") / image
    else:
        with pytest.raises(TemplateError, match="start the template with the directory"):
            image_path(image, template, Path("/spec"), "sandbox.image")
