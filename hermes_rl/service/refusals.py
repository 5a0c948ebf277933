"""What the service answers where it does not do what it was asked for: a status, a name for the cause, and words."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

AGAIN = 5
"""Seconds after which a client may ask again where there was no room (`Retry-After`)."""


class Refused(Exception):
    """A request that is not done; nothing of it was begun.

    Args:
        status: of the answer.
        error: a name for the cause, for programs.
        detail: what is wrong and what to do, for people.
        fields: more of the answer, such as the `place` in the request.
    """

    def __init__(self, status: int, error: str, detail: str, **fields: Any) -> None:
        super().__init__(detail)
        self.status = status
        self.body = {"error": error, **fields, "detail": detail}

    def response(self) -> Response:
        """Return it as an answer."""
        headers = {"Retry-After": str(AGAIN)} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


def wrong(error: str, place: str, detail: str, **fields: Any) -> Refused:
    """Return the answer to a request that is itself wrong at a place."""
    return Refused(422, error, detail, place=place, **fields)


def ending() -> Refused:
    """Return the answer of a service that is about to end."""
    return Refused(503, "ending", "the service is ending and takes nothing new: ask its successor")
