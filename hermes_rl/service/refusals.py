"""Responses to requests that the service refuses: a status, a name for the cause, and a description."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

AGAIN = 5
"""Seconds after which a client may retry if there was no room (`Retry-After`)."""


class Refused(Exception):
    """A refused request; no part of it was started.

    Args:
        status: HTTP status of the response.
        error: a name for the cause, for programs.
        detail: the problem and its fix, for people.
        fields: more fields of the response, such as the `place` in the request.
    """

    def __init__(self, status: int, error: str, detail: str, **fields: Any) -> None:
        super().__init__(detail)
        self.status = status
        self.body = {"error": error, **fields, "detail": detail}

    def response(self) -> Response:
        """Return the response."""
        headers = {"Retry-After": str(AGAIN)} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


def wrong(error: str, location: str, detail: str, **fields: Any) -> Refused:
    """Return the response to a request that is wrong at a location."""
    return Refused(422, error, detail, place=location, **fields)


def service_ending() -> Refused:
    """Return the response of a service that is about to end."""
    return Refused(503, "ending", "the service is shutting down and takes no new requests: ask its successor")
