"""`hermes-rl push`: what it says; what is published, and how, is `hermes_rl.reading.push`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hermes_rl.cli.echo import echo
from hermes_rl.cli.options import environment
from hermes_rl.errors import UserError
from hermes_rl.reading.push import CARD, dataset_at, named_secrets, prepare, push, token_of
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
    dataset, environ = dataset_at(address), environment(env_file)
    token = token_of(environ, token_env)
    if token is None and not dry:
        raise UserError(
            "there is no token for the hub: set HF_TOKEN, name another variable with --token-env, or `hf auth login`"
        )
    eyes = "public" if public else "private"
    with tempfile.TemporaryDirectory(prefix="hermes-rl-push-") as folder:
        made = prepare(run, dataset, Path(folder), named_secrets(environ, token))
        if made.torn:
            echo(f"{counted(made.torn, 'line')} of the record cannot be read, and is left out", err=True)
        if token is None or dry:
            echo(f"would publish to {dataset} ({eyes}):")
            for name, path in made.files.items():
                echo(f"  {name}  {path.stat().st_size:,} bytes")
            echo(f"\n{made.files[CARD].read_text(encoding='utf-8')}")
            return 0
        endpoint = endpoint or environ.get("HF_ENDPOINT") or None
        done = push(made.files, dataset, token=token, endpoint=endpoint, public=public)
    echo(f"published {counted(len(made.files), 'file')} ({eyes}) at {done.url}, commit {done.commit[:10]}")
    echo(f'load it: datasets.load_dataset("{dataset}", split="train")')
    return 0
