"""`hermes-rl push`: what it says; what is published, and how, is `hermes_rl.reading.push`."""

from __future__ import annotations

import tempfile
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


def push_run(
    run: Path,
    address: str,
    *,
    public: bool,
    token_env: str | None,
    endpoint: str | None,
    env_file: Path | None,
    dry: bool,
) -> int:
    """Publish a run as a dataset, or say what would be published; returns the exit status.

    Raises:
        UserError: the run or the address is wrong, there is no login, a file holds a secret, or the hub refuses.
        RunError: the hub is out of reach, or failed.
    """
    local = folder_at(address)
    if local is not None:
        for name, given in (("--public", public), ("--token-env", token_env), ("--endpoint", endpoint)):
            if given:
                raise UserError(f"{name} is about a hub, and {address} is a folder of this machine")
        return _push_to_folder(run, local, env_file, dry=dry)
    dataset, environ = dataset_at(address), environment(env_file)
    token = token_of(environ, token_env)
    if token is None and not dry:
        raise UserError(
            "there is no token for the hub: set HF_TOKEN, name another variable with --token-env, or `hf auth login`"
        )
    eyes = "public" if public else "private"
    with tempfile.TemporaryDirectory(prefix="hermes-rl-push-") as folder:
        made = prepare(run, dataset, Path(folder), named_secrets(environ, token))
        _warn_of_torn(made)
        if token is None or dry:
            return _describe(made, f"would publish to {dataset} ({eyes}):")
        endpoint = endpoint or environ.get("HF_ENDPOINT") or None
        done = push(made.files, dataset, token=token, endpoint=endpoint, public=public)
    echo(f"published {counted(len(made.files), 'file')} ({eyes}) at {done.url}, commit {done.commit[:10]}")
    echo(f'load it: datasets.load_dataset("{dataset}", split="train")')
    return 0


def _push_to_folder(run: Path, local: Path, env_file: Path | None, *, dry: bool) -> int:
    """Write what would be published into a folder of this machine, which needs no hub and no login."""
    require_folder(local, run)
    environ = environment(env_file)
    dataset = f"./{local.resolve().name}"
    with tempfile.TemporaryDirectory(prefix="hermes-rl-push-") as folder:
        made = prepare(run, dataset, Path(folder), named_secrets(environ, environ.get(TOKEN)))
        _warn_of_torn(made)
        if dry:
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
