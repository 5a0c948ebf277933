"""What a text means: a repository, or something of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl.errors import UserError
from hermes_rl.repositories.address import Address, address_of

COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("text", "kind", "url", "revision", "inside"),
    [
        ("owner/name", "git", "https://github.com/owner/name.git", None, ""),
        ("owner/name@v1.2", "git", "https://github.com/owner/name.git", "v1.2", ""),
        (f"owner/na.me@{COMMIT}#envs/a", "git", "https://github.com/owner/na.me.git", COMMIT, "envs/a"),
        ("git+https://host:81/a/b.git@a/branch", "git", "https://host:81/a/b.git", "a/branch", ""),
        ("git+ssh://git@host/a/b", "git", "ssh://git@host/a/b", None, ""),
        ("git+file:///srv/a b".replace(" ", "-"), "git", "file:///srv/a-b", None, ""),
        ("hf://owner/name@main#a.yaml", "datasets", "owner/name", "main", "a.yaml"),
        ("hf://models/owner/name", "models", "owner/name", None, ""),
    ],
)
def test_address_parses_into_its_parts_and_back(
    text: str, kind: str, url: str, revision: str | None, inside: str
) -> None:
    found = address_of(text)
    assert found is not None
    assert (found.kind, found.url, found.revision, found.inside) == (kind, url, revision, inside)
    assert str(found) == text
    assert found.commit == (COMMIT if revision == COMMIT else None)
    assert address_of(str(found.at_commit(COMMIT))) == found.at_commit(COMMIT)


@pytest.mark.parametrize("text", ["name", "./a/b", "../a", "/a/b", "a/b/c", "specs/mine.yaml", "~/a", "a\\b", ""])
def test_path_is_not_parsed_as_an_address(text: str) -> None:
    assert address_of(text) is None


def test_path_below_an_existing_directory_is_not_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(address_of("specs/mistyped"), Address)
    (tmp_path / "specs").mkdir()
    assert address_of("specs/mistyped") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("owner/name@--upload-pack=touch", "not the name of a branch"),
        ("git+https://host/a@-x", "not the name of a branch"),
        ("owner/name@a..b", "not the name of a branch"),
        ("owner/name@", "missing after `@`"),
        ("owner/name@v1#../../etc", "not a path in"),
        ("owner/name@v1#/etc", "not a path in"),
        ("hf://owner/name#a/../../b", "not a path in"),
        ("owner/name#.git/config", "not a path in"),
        ("git+ext://sh -c touch", "git is asked by git.https"),
        ("git+https://host", "names no repository"),
        ("git+https://host/a\nb", "names no repository"),
        ("git+https://[host/a", "names no repository: Invalid IPv6 URL"),
        ("git+file://srv/environments@v1", "three slashes in front"),
        ("hf://name", "not a repository of a hub"),
        ("hf://spaces/name", "not a repository of a hub"),
    ],
)
def test_malformed_address_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        address_of(text)


@pytest.mark.parametrize("who", ["user:hunter2", "hunter2"])
def test_an_address_with_a_secret_is_refused_without_showing_it(who: str) -> None:
    with pytest.raises(UserError, match="credential helper") as refused:
        address_of(f"git+https://{who}@host/a/b@v1")
    assert "hunter2" not in str(refused.value)
