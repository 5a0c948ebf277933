"""Environments fetched from a hub on loopback, by the hub's own library."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_rl.errors import UserError
from hermes_rl.repositories.address import address_of
from hermes_rl.repositories.cache import Fetched, fetched
from hermes_rl.repositories.files import files_of
from tests.real.hub import Hub, commit_of
from tests.repositories.gits import ENVIRONMENT, know_no_hub

pytestmark = pytest.mark.usefixtures("hub")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    know_no_hub(monkeypatch, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Hub(tmp_path / "hub") as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        lay(running, "main", ENVIRONMENT)
        yield running


def lay(hub: Hub, revision: str, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = hub.root / "datasets" / "owner" / "adding" / revision / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def fetch(text: str) -> Fetched:
    address = address_of(text)
    assert address is not None
    return fetched(address)


def test_a_revision_is_pinned_and_fetched_once(hub: Hub) -> None:
    lay(hub, "v2", {"adding.yaml": "rewards: {}\n", "env/more.py": ""})
    found = fetch("hf://owner/adding")
    assert found.address.revision == commit_of("main")
    assert {path.name: path.read_text() for path in files_of(found.folder)} == ENVIRONMENT
    other = fetch("hf://datasets/owner/adding@v2#env")
    assert [path.name for path in other.path.iterdir()] == ["more.py"]
    hub.asked.clear()
    assert fetch(f"hf://owner/adding@{commit_of('main')}") == found
    assert hub.asked == []


def test_a_hub_that_fails_names_what_is_here(hub: Hub) -> None:
    found = fetch("hf://owner/adding")
    hub.trouble = lambda path: 404
    with pytest.raises(UserError, match=f"cannot be fetched from the hub.*here already: {found.address}"):
        fetch("hf://owner/adding@main")


def test_missing_hub_repository_or_revision_is_reported(hub: Hub) -> None:
    with pytest.raises(UserError, match="cannot be fetched from the hub"):
        fetch("hf://owner/other@main")
    with pytest.raises(UserError, match="cannot be fetched from the hub"):
        fetch("hf://owner/adding@v9")


def test_a_download_that_breaks_off_leaves_nothing(hub: Hub, tmp_path: Path) -> None:
    hub.trouble = lambda path: 404 if path.endswith("rewards.py") else 0
    with pytest.raises(UserError, match="cannot be fetched from the hub"):
        fetch("hf://owner/adding@main")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    hub.trouble = lambda path: 0
    assert fetch("hf://owner/adding@main").path.is_dir()


def test_a_hub_that_names_files_elsewhere_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.real import hub as answers

    plain = answers.entry
    monkeypatch.setattr(answers, "entry", lambda name, path: {**plain(name, path), "path": f"../../{name}"})
    with pytest.raises(UserError, match="not a name of a file that may be written here"):
        fetch("hf://owner/adding@main")


def test_another_cache_gets_the_same_digest(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch("hf://owner/adding")
    shutil.rmtree(tmp_path / "cache")
    assert fetch("hf://owner/adding").digest == first.digest
