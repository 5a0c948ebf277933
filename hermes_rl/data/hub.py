"""Load datasets through `datasets.load_dataset`: from the hub, local directories, and formats that `files` lacks.

This module distinguishes an unreachable hub (a fallback helps) from a dataset that does not exist (the spec is wrong).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.spec.section import to_plain
from hermes_rl.spec.sections.dataset import Source

_OUT_OF_REACH = (
    "ConnectionError", "ConnectError", "ConnectTimeout", "ReadTimeout", "Timeout", "TimeoutException",
    "OfflineModeIsEnabled", "LocalEntryNotFoundError", "MaxRetryError", "NameResolutionError", "ProxyError",
    "NetworkError", "SSLError", "gaierror", "RemoteProtocolError", "ChunkedEncodingError", "IncompleteRead",
    "ClientPayloadError", "ServerDisconnectedError",
)  # fmt: skip
"""Names of exceptions that show an unreachable hub; names, since `datasets` may use several HTTP libraries."""
TOO_MANY_REQUESTS = 429


class HubOutOfReachError(UserError):
    """The hub did not respond; a fallback may replace the dataset."""


def load_hub(source: Source, split: str) -> Iterable[dict[str, Any]]:
    """Return the rows of a split, as an iterable that can be iterated repeatedly.

    Raises:
        HubOutOfReachError: the hub does not respond.
        UserError: the dataset, configuration, split or file does not exist.
    """
    import datasets

    arguments = {"name": source.name, "revision": source.revision, "data_files": to_plain(source.data_files)}
    settings = {key: value for key, value in arguments.items() if value is not None}
    try:
        loaded: Iterable[dict[str, Any]] = datasets.load_dataset(
            source.path, split=split, streaming=source.streaming, **settings
        )
    except Exception as error:  # any error of the libraries is classified here, and always raised again
        raise _user_error(error, source, split) from error
    return loaded


def _user_error(error: Exception, source: Source, split: str) -> UserError:
    trouble = hub_trouble(error)
    if trouble is not None:
        return HubOutOfReachError(
            f"dataset {source.path}: the hub cannot be reached ({first_line(trouble)}); the name was taken for a "
            "dataset on the hub, because no file or directory next to the spec has that name"
        )
    return UserError(f"dataset {source.path}, split {split}: {first_line(error)}")


def hub_trouble(error: BaseException) -> BaseException | None:
    """Return the cause in an error of the libraries that shows an unreachable or busy hub, or None if there is none."""
    for cause in causes(error):
        if any(kind.__name__ in _OUT_OF_REACH for kind in type(cause).__mro__) or _is_passing_error(cause):
            return cause
    return None


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then its chain of causes."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_passing_error(error: BaseException) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return isinstance(status, int) and (status >= 500 or status == TOO_MANY_REQUESTS)


def first_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message, at most 300 characters."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"[:300]
