"""The sandbox of a row: what the spec says, rendered and read once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hermes_rl.data.rows import Row
from hermes_rl.errors import SpecError, UserError
from hermes_rl.rollouts.sandboxes import sandbox_config
from hermes_rl.spec.load import parse_spec

ROW = Row(key="row", columns={"n": 750, "text": "0600"}, index=0, digest="")
MODES = {
    "0644": 0o644,
    "644": 0o644,
    "0755": 0o755,
    "0777": 0o777,
    "0o644": 0o644,
    '"0644"': 0o644,
    '"0o755"': 0o755,
    "0000": 0,
    "420": 0o420,
    '"{{ n }}"': 0o750,
    '"{{ text }}"': 0o600,
}


@pytest.mark.parametrize("mode", MODES)
def test_a_file_has_the_permissions_that_are_written(mode: str) -> None:
    spec = parse_spec(
        "dataset: {items: [{n: 1}]}\nprompt: {user: hi}\nservers: {policy: {type: scripted}}\n"
        f"sandbox: {{files: [{{to: 'run-{{{{ n }}}}.sh', content: x, mode: {mode}}}]}}\n"
    )
    (file,) = sandbox_config(spec, ROW).files
    assert (file.to, oct(file.mode)) == ("run-750.sh", oct(MODES[mode]))


UNSAYABLE = [
    "workdir: {}", "env: {{A: {}}}", "files: [{{to: {}, content: x}}]", "setup: [{}]", "image: {}", "env: {{{}: a}}",
]  # fmt: skip


@pytest.mark.parametrize("section", UNSAYABLE)
def test_null_bytes_and_surrogates_in_sandbox_settings_are_refused(section: str) -> None:
    text = "dataset: {items: [{n: 1}]}\nprompt: {user: hi}\nservers: {policy: {type: scripted}}\nsandbox: {%s}\n"
    for odd in ("/w\\0b", "/w\\ud83db"):
        with pytest.raises(SpecError, match=r"null byte|half of a"):
            parse_spec(text % section.format(f'"{odd}"'))
    if section in ("workdir: {}", "env: {{{}: a}}"):
        return  # neither is a template
    for odd in ("/w\0b", "/w\ud83db"):
        row = replace(ROW, columns={"odd": odd})
        with pytest.raises(UserError, match=r"'/w.*b' contains a null byte or an unpaired surrogate"):
            sandbox_config(parse_spec(text % section.format('"{{ odd }}"')), row)


def test_without_a_mode_a_file_can_be_read() -> None:
    spec = parse_spec(
        "dataset: {items: [{n: 1}]}\nprompt: {user: hi}\nservers: {policy: {type: scripted}}\n"
        "sandbox: {files: [{to: a, content: x}]}\n"
    )
    assert sandbox_config(spec, ROW).files[0].mode == 0o644


def test_built_image_directory_must_be_inside_the_spec_directory(tmp_path: Path) -> None:
    def images(image: str) -> tuple[str | None, str]:
        text = "dataset: {items: [{n: 1}]}\nprompt: {user: hi}\nservers: {policy: {type: scripted}}\n"
        text += f"sandbox: {{backend: docker, image: '{image}', services: {{db: {{image: '{image}'}}}}}}\n"
        config = sandbox_config(parse_spec(text, folder=tmp_path / "spec"), ROW)
        return config.image, config.services[0].image

    for name in ("spec/inner", "other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "Dockerfile").touch()
    inner = tmp_path / "spec/inner"
    (tmp_path / "spec/link").symlink_to(tmp_path / "other")
    assert images("./inner") == images(str(inner)) == (str(inner), str(inner))
    assert images("inner") == ("inner", "inner")
    for image in ("../other", str(tmp_path / "other"), "./link", "./nowhere", "."):
        with pytest.raises(UserError, match="is not a directory with a Dockerfile in"):
            images(image)
