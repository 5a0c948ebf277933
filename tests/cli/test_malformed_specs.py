"""Every malformed spec ends a run and a validation with status 2, at the right place, without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl.cli.main import status
from tests.spec.test_malformed import CASES


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("command", [["run", "spec.yaml", "process"], ["validate", "spec.yaml"]], ids=" ".join)
def test_status_2_at_the_right_place(
    name: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORD", "word")
    before, _, after = CASES[name][0].partition("▶")
    Path("spec.yaml").write_text(before + after, encoding="utf-8")
    assert status(command) == 2
    said = capsys.readouterr().err
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    assert f"spec.yaml:{line}:{column}: " in said
    assert "Traceback" not in said
    assert not Path("outputs").exists()
