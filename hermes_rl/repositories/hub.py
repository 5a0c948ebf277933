"""Fetch files of a repository on a hub of Hugging Face's API, by huggingface_hub, with timeouts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.others_files import read_regular
from hermes_rl.repositories.address import Address
from hermes_rl.repositories.files import MOST_BYTES, RepositoryFile
from hermes_rl.terminal_text import escape_controls

ANSWER = 60.0
"""Timeout in seconds for each response of a hub."""


def hub_commit(address: Address) -> str:
    """Return the current commit of a revision.

    Raises `UserError` if the hub cannot be reached, or has no such repository or revision.
    """
    try:
        info = _hub_api().repo_info(
            address.url, repo_type=_repo_type(address), revision=address.revision, timeout=ANSWER
        )
    except Exception as error:  # any error of the libraries is reported, and always raised again
        raise _fetch_error(address, error) from error
    return str(info.sha)


def hub_files(address: Address, commit: str) -> Iterator[RepositoryFile]:
    """Yield the files of a commit, names and sizes first. Raises `UserError` if they are not available."""
    try:
        api, kind = _hub_api(), _repo_type(address)
        tree = api.list_repo_tree(address.url, recursive=True, repo_type=kind, revision=commit)
        files = [RepositoryFile(entry.path, entry.size) for entry in tree if hasattr(entry, "size")]
        yield from files
        with tempfile.TemporaryDirectory(prefix="hermes-rl-hub-") as cache:
            for file in files:
                path = api.hf_hub_download(address.url, file.name, repo_type=kind, revision=commit, cache_dir=cache)
                yield RepositoryFile(file.name, file.size, content=read_regular(Path(path), MOST_BYTES))
    except UserError:
        raise
    except Exception as error:  # as above
        raise _fetch_error(address, error) from error


def bound_answers() -> None:
    """Set a reasonable timeout for the library; its clients wait forever by default."""
    from huggingface_hub import get_session, set_client_factory

    session = get_session()
    kind, hooks = type(session), session.event_hooks
    set_client_factory(lambda: kind(event_hooks=hooks, follow_redirects=True, timeout=ANSWER))


def _hub_api() -> Any:
    from huggingface_hub import HfApi

    bound_answers()
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="hermes-rl")


def _repo_type(address: Address) -> str:
    return address.kind.removesuffix("s")


def _fetch_error(address: Address, error: Exception) -> UserError:
    reason = getattr(error, "server_message", None) or str(error).strip().split("\n")[0]
    return UserError(
        f"{address} cannot be fetched from the hub: {type(error).__name__}: {escape_controls(reason)[:300]}"
    )
