"""Select the environment variables of worker processes for user code.

These get general variables of the runner, such as PATH and the addresses of proxies, and the variables that specs list
in `user_code.env`. Others, such as keys of model servers, stay in the runner.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

GENERAL = frozenset(
    {
        *("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "USER", "LOGNAME", "LD_LIBRARY_PATH"),
        *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    }
)
"""Names of variables that user code always gets."""
PREFIXES = ("LC_", "PYTHON", "HF_", "XDG_")
"""Prefixes of further names; a name with TOKEN in it, such as HF_TOKEN, is excluded."""
_MISSING = "the environment variable {} is not set in this process"
_MISSING_NAME = re.compile(re.escape(_MISSING).replace(r"\{\}", r"(\w+)"))

_listed_variables: dict[str, str] = {}
_runner_names: frozenset[str] = frozenset()


def admit(names: Iterable[str], environ: Mapping[str, str]) -> None:
    """Give user code the variables that a spec lists, with their values in `environ`, the runner's variables.

    This applies to all worker processes that this process starts from now on, for any spec.
    """
    global _listed_variables, _runner_names
    _listed_variables = {**_listed_variables, **{name: environ[name] for name in names if name in environ}}
    _runner_names = frozenset(environ)


def listed_variables() -> Mapping[str, str]:
    """Return the variables that specs list in `user_code.env`, with their values."""
    return _listed_variables


def user_code_variables() -> dict[str, str]:
    """Return all variables of a worker process for user code."""
    return {name: value for name, value in os.environ.items() if _is_general(name)} | _listed_variables


def _is_general(name: str) -> bool:
    return name in GENERAL or (name.startswith(PREFIXES) and "TOKEN" not in name)


def missing_variable(error: BaseException) -> str | None:
    """Return a sentence naming the variable that `os.environ[…]` did not find, if that caused the exception."""
    cause: BaseException | None = error
    while cause is not None:
        trace = cause.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if isinstance(cause, KeyError) and trace is not None and trace.tb_frame.f_code is _GET.__code__:
            return _MISSING.format(cause.args[0])
        cause = cause.__cause__
    return None


_GET = type(os.environ).__getitem__


def with_way_out(text: str) -> str:
    """Return the text of an exception; if it lacks a variable of the runner, with the key that provides it."""
    match = _MISSING_NAME.search(text)
    if match is None or match[1] not in _runner_names or match[1] in user_code_variables():
        return text
    return f"{text}; the runner has it: to let user code see it, write `user_code: {{env: [{match[1]}]}}` in the spec"
