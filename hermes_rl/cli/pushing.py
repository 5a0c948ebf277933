"""`hermes-rl push`: what it says; what is published, and how, is `hermes_rl.reading.push`."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.cli.echo import echo
from hermes_rl.cli.options import environment
from hermes_rl.errors import UserError
from hermes_rl.reading.push import (
    CARD,
    TOKEN,
    Publication,
    copy_to_folder,
    dataset_at,
    folder_at,
    named_secrets,
    prepare,
    push,
    require_folder,
    token_of,
)
from hermes_rl.visible import counted


@dataclass(frozen=True)
class PushRequest:
    """The words of `hermes-rl push`."""

    run: Path
    address: str
    public: bool = False
    token_env: str | None = None
    endpoint: str | None = None
    env_file: Path | None = None
    dry: bool = False


def push_run(request: PushRequest) -> int:
    """Publish a run as a dataset, or say what would be published; returns the exit status.

    Raises:
        UserError: the run or the address is wrong, there is no login, a file holds a secret, or the hub refuses.
        RunError: the hub is out of reach, or failed.
    """
    local = folder_at(request.address)
    if local is not None:
        return _push_to_folder(request, local)
    dataset, environ = dataset_at(request.address), environment(request.env_file)
    token = token_of(environ, request.token_env)
    if token is None and not request.dry:
        raise UserError(
            "there is no token for the hub: set HF_TOKEN, name another variable with --token-env, or `hf auth login`"
        )
    eyes = "public" if request.public else "private"
    with tempfile.TemporaryDirectory(prefix="hermes-rl-push-") as folder:
        made = prepare(request.run, dataset, Path(folder), named_secrets(environ, token))
        _warn_of_torn(made)
        if token is None or request.dry:
            return _describe(made, f"would publish to {dataset} ({eyes}):")
        endpoint = request.endpoint or environ.get("HF_ENDPOINT") or None
        done = push(made.files, dataset, token=token, endpoint=endpoint, public=request.public)
    echo(f"published {counted(len(made.files), 'file')} ({eyes}) at {done.url}, commit {done.commit[:10]}")
    echo(f'load it: datasets.load_dataset("{dataset}", split="train")')
    return 0


def _push_to_folder(request: PushRequest, local: Path) -> int:
    """Write what would be published into a folder of this machine, which needs no hub and no login."""
    for name, given in (
        ("--public", request.public), ("--token-env", request.token_env), ("--endpoint", request.endpoint)
    ):  # fmt: skip
        if given:
            raise UserError(f"{name} is about a hub, and {request.address} is a folder of this machine")
    require_folder(local, request.run)
    environ = environment(request.env_file)
    dataset = f"./{local.resolve().name}"
    with tempfile.TemporaryDirectory(prefix="hermes-rl-push-") as folder:
        made = prepare(request.run, dataset, Path(folder), named_secrets(environ, environ.get(TOKEN)))
        _warn_of_torn(made)
        if request.dry:
            return _describe(made, f"would write to {local}:")
        copy_to_folder(made.files, local)
    echo(f"wrote {counted(len(made.files), 'file')} to {local}")
    echo(f'load it: datasets.load_dataset("{local}", split="train")')
    return 0


def _warn_of_torn(made: Publication) -> None:
    if made.torn:
        echo(f"{counted(made.torn, 'line')} of the record cannot be read, and is left out", err=True)


def _describe(made: Publication, heading: str) -> int:
    echo(heading)
    for name, path in made.files.items():
        echo(f"  {name}  {path.stat().st_size:,} bytes")
    echo(f"\n{made.files[CARD].read_text(encoding='utf-8')}")
    return 0
