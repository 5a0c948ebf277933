"""`hermes-rl push`: publish a run and print messages; `hermes_rl.analysis.push` selects and uploads the files."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hermes_rl.analysis.push import (
    CARD,
    TOKEN,
    copy_to_folder,
    dataset_at,
    folder_at,
    named_secrets,
    prepare,
    push,
    require_folder,
    token_of,
)
from hermes_rl.cli.echo import echo
from hermes_rl.cli.options import Options
from hermes_rl.errors import UserError
from hermes_rl.others_files import read_text
from hermes_rl.terminal_text import pluralize


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
    """Publish a run as a dataset, or list the files that would be published; return the exit status."""
    local, environ = folder_at(address), Options(env_file=env_file).environ()
    if local is None:
        dataset, token = dataset_at(address), token_of(environ, token_env)
        eyes = "public" if public else "private"
        action = f"publish to {dataset} ({eyes})"
    else:
        for name, value in (("--public", public), ("--token-env", token_env), ("--endpoint", endpoint)):
            if value:
                raise UserError(f"{name} is about a hub, and {address} is a folder of this machine")
        require_folder(local, run)
        dataset, token, action = f"./{local.resolve().name}", environ.get(TOKEN), f"write to {local}"
    if local is None and token is None and not dry:
        raise UserError(
            "there is no token for the hub: set HF_TOKEN, name another variable with --token-env, or `hf auth login`"
        )
    with tempfile.TemporaryDirectory(prefix="hermes-rl-push-") as folder:
        prepared = prepare(run, dataset, Path(folder), named_secrets(environ, token))
        files = pluralize(len(prepared.files), "file")
        if prepared.excluded:
            echo(prepared.excluded, err=True)
        if dry:
            echo(f"would {action}:")
            for name, path in prepared.files.items():
                echo(f"  {name}  {path.stat().st_size:,} bytes")
            echo(f"\n{read_text(prepared.files[CARD])}")
            return 0
        if local is None:
            endpoint = endpoint or environ.get("HF_ENDPOINT") or None
            done = push(prepared.files, dataset, token=token or "", endpoint=endpoint, public=public)
            echo(f"published {files} ({eyes}) at {done.url}, commit {done.commit[:10]}")
        else:
            copy_to_folder(prepared.files, local)
            echo(f"wrote {files} to {local}")
    echo(f'load it: datasets.load_dataset("{dataset if local is None else local}", split="train")')
    return 0
