"""Old names: `hermes-rl migrate` rewrites files and leaves the rest as it is; commands and options are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl.cli.main import status
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.new_names import COMMANDS, OPTIONS

OLD = """\
# evaluate.success stays in a comment
dataset: {items: [{q: a, success: 1}], eval: only}   # rows keep their columns
prompt: {user: "{{ q }}"}
rewards:
  given: {fn: exact_match, process:   false, args: {target: success}}  # aligned
evaluate:
    "success": 0.5        # quoted
    by:
    - q
"""
NEW = OLD.replace('"success": 0.5', '"success_threshold": 0.5').replace("    by:", "    group_by:")
NEW = NEW.replace("process:   false", "isolate:   none")


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(OLD)
    return path


def test_migrate_keeps_comments_and_layout(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["migrate", str(spec)]) == 0
    assert spec.read_text() == NEW
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{spec}:5:28: `rewards.given.process: false` is now `rewards.given.isolate: none`",
        f"{spec}:7:5: `evaluate.success` is now `evaluate.success_threshold`",
        f"{spec}:8:5: `evaluate.by` is now `evaluate.group_by`",
    ]
    assert load_spec(spec).evaluate.group_by == ("q",)


def test_migrate_leaves_current_specs_unchanged(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec.write_text(NEW)
    assert status(["migrate", str(spec.parent)]) == 0
    assert spec.read_text() == NEW
    assert capsys.readouterr().out == f"{spec}: all names are current\n"


def test_check_reports_and_changes_nothing(spec: Path) -> None:
    assert status(["migrate", "--check", str(spec)]) == 1
    assert spec.read_text() == OLD
    spec.write_text(NEW)
    assert status(["migrate", "--check", str(spec)]) == 0


def test_migrate_rewrites_dotted_keys_of_a_set(spec: Path) -> None:
    text = (
        "set:\n  name: s\n  specs: [spec.yaml]\n  models:\n"
        "  - name: a\n    set: {evaluate.by: [q], servers.policy: {type: scripted, deviate: 0.5}}  # b\n"
        "  settings: [{name: c, set: {dataset.sampling: differing}}]\n"
    )
    spec.write_text(text)
    assert status(["migrate", str(spec)]) == 0
    for old, new in (("evaluate.by", "evaluate.group_by"), ("deviate", "error_rate")):
        text = text.replace(old, new)
    assert spec.read_text() == text.replace("dataset.sampling: differing", "dataset.row_selection: skip_uniform")


@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_migrate_keeps_line_ends_and_byte_order_mark(spec: Path, end: str) -> None:
    spec.write_bytes(("\ufeff" + OLD.replace("\n", end)).encode())
    assert status(["migrate", str(spec)]) == 0
    assert spec.read_bytes() == ("\ufeff" + NEW.replace("\n", end)).encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("evaluate: {by: [q], group_by: [q]}\n", ":1:12: `evaluate.by` is now `evaluate.group_by`; both are here"),
        ('evaluate: {"b\\x79": [q]}\n', ":1:12: write `group_by` here by hand"),
        ("evaluate: {by: [q]\n", ":2:1: "),
        ("", ":1:1: the file is empty"),
    ],
)
def test_migrate_changes_nothing_that_it_cannot_rewrite(
    spec: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec.write_text(text)
    assert status(["migrate", str(spec)]) == 2
    assert spec.read_text() == text
    assert f"{spec}{message}" in capsys.readouterr().err


def test_migrate_rewrites_all_specs_of_a_folder(spec: Path) -> None:
    second = spec.with_name("second.yaml")
    second.write_bytes(spec.read_bytes())
    assert status(["migrate", str(spec.parent)]) == 0
    assert status(["migrate", "--check", str(spec), str(second)]) == 0


def test_migrate_needs_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["migrate", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: cannot be rewritten: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollouts", "spec.yaml"], "`hermes-rl rollouts` is now `hermes-rl serve-http`"),
        (["openenv", "spec.yaml"], "`hermes-rl openenv` is now `hermes-rl serve-openenv`"),
        (["compare", "a", "b", "--families=x"], "`--families` is now `--cluster-by`"),
        (["serve-http", "--most", "4", "spec.yaml"], "`--most` is now `--max-requests`"),
        (["show", "run", "--ending", "finished"], "`--ending` is now `--stop-reason`"),
    ],
)
def test_old_command_or_option_is_an_error_with_the_new_one(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(words) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_new_commands_and_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for command, options in OPTIONS.items():
        assert status([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert [option for option in options.values() if option not in text] == []
    assert status(["--help"]) == 0
    text = capsys.readouterr().out
    assert [command for command in COMMANDS.values() if command not in text] == []
