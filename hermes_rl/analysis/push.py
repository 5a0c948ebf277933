"""`hermes-rl push`: publish a run as a dataset on a hub with Hugging Face's API.

Owns the selection of a run's files, the refusal of files that hold a secret, and the meaning of a hub's responses. All
local checks come before the first request to the hub, and everything is published in one commit.
"""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_rl import __version__
from hermes_rl.analysis.card import PUBLISHED_FILES, dataset_card
from hermes_rl.analysis.export import RunGroups
from hermes_rl.analysis.overview import running
from hermes_rl.analysis.record import RunRecord
from hermes_rl.analysis.report import report
from hermes_rl.analysis.settings import spec_of, weights_of
from hermes_rl.analysis.summary import summarise
from hermes_rl.data.hub import causes, first_line, hub_trouble
from hermes_rl.errors import HermesRLError, RunError, UserError
from hermes_rl.others_files import read_file
from hermes_rl.repositories.hub import ANSWER, bound_answers
from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.parquet import write_table
from hermes_rl.runs.run_log import redacted, secrets_of
from hermes_rl.terminal_text import escape_controls

TABLE, CARD = "data/rollouts.parquet", "README.md"
OURS = (CARD, TABLE, *PUBLISHED_FILES)
"""Files that a push replaces in a dataset; files that this run does not have are removed."""
TOKEN = "HF_TOKEN"
ADDRESS = re.compile(r"hf://(?:datasets/)?([^/@]+)/([^/@]+?)/?")


@dataclass(frozen=True)
class Publication:
    """Publication of a run: the files by their path in the dataset, and the unreadable part of the record."""

    files: Mapping[str, Path]
    excluded: str


@dataclass(frozen=True)
class Published:
    """Location of a published run: the dataset's page, and the commit that contains it."""

    url: str
    commit: str


def dataset_at(address: str) -> str:
    """Return the `owner/name` of an address such as ``hf://datasets/owner/name``; raises UserError if it is not one."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    match = ADDRESS.fullmatch(address)
    if match is None or match[1] in ("datasets", "models", "spaces", "buckets"):
        raise UserError(
            f"{address} is not a dataset of a hub: write hf://datasets/OWNER/NAME, or ./NAME for a local directory"
        )
    dataset = f"{match[1]}/{match[2]}"
    try:
        validate_repo_id(dataset)
    except HFValidationError as error:
        raise UserError(f"{address} is not a dataset of a hub: {first_line(error)}") from error
    return dataset


def folder_at(address: str) -> Path | None:
    """Return the directory that an address such as ``./NAME`` names, or None if it names none.

    A path must start as one: ``NAME`` or ``OWNER/NAME`` is more likely an incomplete address of a dataset.
    """
    if address in (".", "..") or address.startswith(("./", "../", "/", "~")):
        return Path(address).expanduser()
    return None


def require_folder(folder: Path, run: Path) -> None:
    """Raise UserError for a file, the run's directory, or a directory with files of these names that no push has
    written.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder that is new, empty, or of an earlier push")
    if folder.resolve() == run.resolve():
        raise UserError(f"{folder} is the run itself; name another directory")
    others = [name for name in OURS if (folder / name).exists()]
    if others and TABLE not in others:
        raise UserError(f"{folder} holds {others[0]}, which no push has written; name a folder that is new or empty")


def copy_to_folder(files: Mapping[str, Path], folder: Path) -> None:
    """Copy a publication into a directory, replacing an earlier one; other files remain. Raises UserError."""
    try:
        (folder / TABLE).parent.mkdir(parents=True, exist_ok=True)
        for name in OURS:
            if name in files:
                shutil.copyfile(files[name], folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written to: {error.strerror or error}") from error


def token_of(environ: Mapping[str, str], name: str | None) -> str | None:
    """Return the token of the named variable (UserError: it is not set), else of `HF_TOKEN` or `hf auth login`."""
    if name is not None:
        if not environ.get(name):
            raise UserError(f"--token-env {name}: the variable is not set; it holds a token that may write to the hub")
        return environ[name]
    if environ.get(TOKEN):
        return environ[TOKEN]
    from huggingface_hub import get_token

    token: str | None = get_token()
    return token


# ---------------------------------------------------------------------------------------------- Published files


def prepare(path: Path, dataset: str, folder: Path, secrets: Mapping[str, str]) -> Publication:
    """Write the files to publish of a run as `owner/name` into an empty directory.

    `secrets` are values that no file may contain, each with its name. Raises `UserError` if the run is still in
    progress, has no graded rollout, or a file holds a secret.
    """
    record = RunRecord(path)
    if running(record.path):
        raise UserError(f"{record.path} is still running: push it when it has ended")
    record.refresh()
    summary, spec, run_info = summarise(record), spec_of(record), record.run_info
    if not summary.graded:
        raise UserError(f"{record.path} has no rollout with a score, so there is nothing to publish")
    forms = _secret_forms(secrets)
    for text in _texts_in(spec):  # YAML breaks long texts into lines
        _refuse_secrets(text, "spec.yaml", forms)
    table = folder / TABLE
    table.parent.mkdir(parents=True)
    rewards = list(dict.fromkeys(name for rollout in record.rollouts for name in rollout.rewards))
    rows = write_table(table, _publishable_groups(record, spec.get("on_stop") or {}, forms), rewards)
    files = [record.path / name for name in ("spec.yaml", "run.json", "metrics.json")]
    texts = {}
    for file in files:
        with suppress(FileNotFoundError):
            texts[file.name] = read_file(file).decode(errors="replace")
    texts["report.html"] = report(record)
    texts[CARD] = dataset_card(dataset, TABLE, rows, texts, summary, spec, run_info, weights_of(run_info))
    for name, text in texts.items():
        _refuse_secrets(text, name, forms)
        (folder / name).write_text(text, encoding="utf-8", errors="replace")
    return Publication({name: folder / name for name in OURS if (folder / name).is_file()}, record.excluded)


def named_secrets(environ: Mapping[str, str], token: str | None) -> dict[str, str]:
    """Return the values that must not be published: variables that hold secrets, and the hub's token."""
    hidden = set(secrets_of(environ))
    secrets = {value: f"the variable {name}" for name, value in environ.items() if value in hidden}
    return {**({token: "the hub's token"} if token else {}), **secrets}


def _secret_forms(secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the texts that a secret can have in a file, raw and escaped, with its name."""
    texts: dict[str, str] = {}
    for secret, name in secrets.items():
        as_json = {json.dumps(secret, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)}
        forms = {secret, html.escape(secret), *as_json}
        forms |= {
            re.sub("[<>&]", lambda sign: f"\\u{ord(sign[0]):04x}", form) for form in forms
        }  # in the form of a report
        texts |= dict.fromkeys(forms, name)
    return texts


def _refuse_secrets(text: str, file: str, forms: Mapping[str, str]) -> None:
    secret = next((name for form, name in forms.items() if form in text), None)
    if secret is not None:
        raise UserError(
            f"{file} would hold the value of {secret}, which looks like a secret, so nothing was published. Take the "
            "secret out of the run, and get a new one; a variable that holds no secret can be unset for this command"
        )


def _publishable_groups(record: RunRecord, on_stop: Mapping[str, Any], forms: Mapping[str, str]) -> Iterator[Group]:
    """Yield the groups of a run with the rollouts that count; raises an error for a secret in them."""
    run = RunGroups(record, on_stop)
    for members in run.lines():
        for line in members:
            for text in _texts_in(line):
                _refuse_secrets(text, f"{TABLE} (rollout {line['id']})", forms)
        yield run.group(members)


def _texts_in(value: Any) -> Iterator[str]:
    """Yield every text of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item)


# ------------------------------------------------------------------------------------------------------ To the hub


def push(files: Mapping[str, Path], dataset: str, *, token: str, endpoint: str | None, public: bool) -> Published:
    """Publish files in one commit; a missing dataset is created, and other files in it remain.

    Raises `UserError` if the hub refuses, or the dataset's visibility differs from the requested one; `RunError` if the
    hub is unreachable, or failed.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    bound_answers()
    endpoint = endpoint.rstrip("/") if endpoint else None
    api = HfApi(endpoint=endpoint, token=token, library_name="hermes-rl", library_version=__version__)
    created = False
    try:
        try:
            repository = api.repo_info(dataset, repo_type="dataset", timeout=ANSWER)
        except RepositoryNotFoundError:
            api.create_repo(dataset, repo_type="dataset", private=not public)
            created, present = True, frozenset[str]()
        else:
            if public and repository.private:
                raise UserError(
                    f"{dataset} exists and is private: remove --public, or make it public in its settings on the hub"
                )
            if not public and not repository.private:
                raise UserError(f"{dataset} exists and is public: pass --public to let everyone see the run")
            present = frozenset(sibling.rfilename for sibling in repository.siblings or ())
        commit = _commit(api, dataset, files, present)
    except UserError:
        raise
    except Exception as error:  # classify any error of the libraries, and always raise it again
        raise _user_error(error, dataset, str(api.endpoint), token, created=created) from error
    return Published(f"{api.endpoint}/datasets/{dataset}", commit)


def _commit(api: Any, dataset: str, files: Mapping[str, Path], present: Collection[str]) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    additions = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
    stale = [CommitOperationDelete(path_in_repo=name) for name in OURS if name in present and name not in files]
    # A .gitignore in the dataset would silently exclude files from the commit.
    api.preupload_lfs_files(dataset, additions, repo_type="dataset", gitignore_content="", free_memory=False)
    done = api.create_commit(
        dataset, [*additions, *stale], repo_type="dataset", commit_message="Rollouts of a run of hermes-rl"
    )
    return str(done.oid)


def _user_error(error: Exception, dataset: str, hub: str, token: str, *, created: bool) -> HermesRLError:
    """Return the user's form of an error of the hub's library; it contains no token."""
    hint = f"; {dataset} was created; run the same command again to continue" if created else ""
    trouble = hub_trouble(error)
    if trouble is not None:
        return RunError(_sanitize(f"{hub} is out of reach or busy ({first_line(trouble)}){hint}", token))
    refused = next((cause for cause in causes(error) if isinstance(_status_of(cause), int)), error)
    reason = getattr(refused, "server_message", None) or first_line(refused)
    match _status_of(refused):
        case 401:
            text = f"{hub} does not accept the token ({reason}): name a valid one with --token-env, or `hf auth login`"
        case 403:
            text = f"the token may not write {dataset} on {hub} ({reason}): it needs the right to write there"
        case 409:
            text = f"{hub} does not give the name {dataset} ({reason}): choose another"
        case _:
            return RunError(_sanitize(f"{hub} did not take {dataset} ({reason}){hint}", token))
    return UserError(_sanitize(text + hint, token))


def _status_of(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _sanitize(text: str, token: str) -> str:
    return escape_controls(" ".join(redacted(text, [token]).split()))[:1000]
