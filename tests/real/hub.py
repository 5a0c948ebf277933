"""A hub on loopback that speaks the Hugging Face hub's protocol, for its own client libraries.

Repositories are folders, with a folder per revision: ``<root>/datasets/org/name/<revision>/…`` and
``<root>/models/org/name/<revision>/…``. A revision's commit is a hash of its name, as the protocol knows commits.
"""

from __future__ import annotations

import hashlib
import json
import re
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

API = r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(.*))?"


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


class Hub(ThreadingHTTPServer):
    """A hub; `trouble` returns, for each request, a status to respond with, -1 to break off the response, or 0."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.root = root
        self.asked: list[str] = []
        self.trouble: Callable[[str], int] = lambda path: 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Hub:
        Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def revision(self, kind: str, name: str, revision: str) -> tuple[str, Path] | None:
        """Return the commit and the directory of a revision or commit."""
        for folder in (self.root / kind / name).glob("*"):
            if revision in (folder.name, commit_of(folder.name)):
                return commit_of(folder.name), folder
        return None


class Answer(BaseHTTPRequestHandler):
    """Handle one request."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def _answer(self, body: bytes = b"") -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.server.asked.append(path)
        status = self.server.trouble(path)
        if status > 0:
            self._say(status, {"error": "not now"})
        elif found := re.fullmatch(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(found[1] or "models", found[2], found[3], found[4], broken=status < 0)
        elif found := re.fullmatch(API, path):
            self._about(*found.groups(), body)
        else:
            self._say(404, {"error": "no such place"})

    def _file(self, kind: str, name: str, revision: str, file: str, *, broken: bool) -> None:
        known = self.server.revision(kind, name, revision)
        if known is None or not (known[1] / file).is_file():
            code = "EntryNotFound" if known else "RevisionNotFound"
            commit = {"X-Repo-Commit": known[0]} if known else {}  # with it, clients remember what is not there
            self._say(404, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code, **commit})
            return
        commit, folder = known
        content = (folder / file).read_bytes()
        begin, headers = 0, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
        if ranged := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            begin, end = int(ranged[1]), int(ranged[2] or len(content) - 1) + 1
            headers["Content-Range"] = f"bytes {begin}-{min(end, len(content)) - 1}/{len(content)}"
            content = content[begin:end]
        self.send_response(206 if ranged else 200)
        for key, value in {**headers, "Content-Length": str(len(content)), "Accept-Ranges": "bytes"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) // 2] if broken else content)
            if broken:
                self.close_connection = True

    def _about(
        self, kind: str, name: str, what: str | None, revision: str | None, rest: str | None, body: bytes
    ) -> None:
        known = self.server.revision(kind, name, revision or "main")
        if not (self.server.root / kind / name).is_dir():
            self._say(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif known is None:
            self._say(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        else:
            self._say(200, _described(*known, name, what, (rest or "").strip("/"), body))

    def _say(self, status: int, said: Any, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(said).encode()
        self.send_response(status)
        kind = {"Content-Type": "application/json", "Content-Length": str(len(text))}
        for key, value in {**kind, **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


def _described(commit: str, folder: Path, name: str, what: str | None, within: str, body: bytes) -> Any:
    """Return the description of a revision: its files below a directory, the requested ones, or everything."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if what == "tree":
        return [entry(file, path) for file, path in files.items() if file.startswith(within)]
    if what == "paths-info":
        wanted = json.loads(body)["paths"] if body[:1] == b"{" else urllib.parse.parse_qs(body.decode())["paths"]
        return [entry(file, files[file]) for file in wanted if file in files]
    about = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]}
    about |= {"private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0}
    return {**about, "lastModified": "2026-01-01T00:00:00.000Z"}


def entry(name: str, path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
