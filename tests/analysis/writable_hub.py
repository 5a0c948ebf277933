"""A hub on loopback that takes uploads, as huggingface_hub makes them: repositories, large files, commits, logins.

It is the hub of `tests.real.hub`, whose answers to readers stay, with what the Hugging Face hub asks of writers: a
token with the right to write, large files by their SHA-256 before the commit that names them, and whole commits.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import re
import urllib.parse
from pathlib import Path
from threading import Event
from typing import Any

import yaml

from tests.real.hub import Answer, Hub, commit_of

WRITER, READER = "hf_writerwriterwriter", "hf_readerreaderreader"
LARGE = ("*.parquet", "*.bin", "*.arrow")
"""Files that the hub's own .gitattributes keep as large ones."""


class WritableHub(Hub):
    """`commits` are the operations of each commit, by the dataset; `private` are datasets that need a token."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.RequestHandlerClass = WritableAnswer
        self.commits: dict[str, list[list[dict[str, Any]]]] = {}
        self.created: list[dict[str, Any]] = []
        self.private: set[str] = set()
        self.large: dict[str, bytes] = {}
        self.verified: set[str] = set()
        self.refused: dict[str, int] = {}
        """Statuses by the beginning of a path of the API, such as a commit that fails."""
        self.silent, self.over = "", Event()
        """The beginning of a path that gets no answer, until the test is over."""

    def dataset(self, name: str) -> Path:
        return self.root / "datasets" / name / "main"

    def files(self, name: str) -> dict[str, bytes]:
        folder = self.dataset(name)
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def revision(self, kind: str, name: str, revision: str) -> tuple[str, Path] | None:
        """The commit changes with each push, so that no reader takes what it has kept for the latest."""
        commit, folder = commit_of(f"{name} {len(self.commits.get(name, ()))}"), self.root / kind / name / "main"
        return (commit, folder) if folder.is_dir() and revision in ("main", commit) else None


class WritableAnswer(Answer):
    """Answers one request, also of a writer."""

    server: WritableHub

    def do_PUT(self) -> None:  # noqa: N802 - the name is that of http.server
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes = b"") -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        status = next((code for begin, code in self.server.refused.items() if path.startswith(begin)), 0)
        named = re.match(r"/(?:api/)?datasets/([^/]+/[^/]+?)(?:\.git)?(?:/|$)", path)
        if self.server.silent and path.startswith(self.server.silent):
            self.server.over.wait(30)
            self.close_connection = True
        elif status:
            self._refuse(status, "it is not to be")
        elif token not in ("", WRITER, READER):
            self._refuse(401, "Invalid credentials in Authorization header")
        elif named and not token and named[1] in self.server.private:
            self._refuse(401, "Repository not found", "RepoNotFound")
        elif self.command == "GET" and path == f"/api/datasets/{named[1] if named else ''}":
            self._dataset(named[1] if named else "", token)
        elif found := re.fullmatch(r"/large/(\w+)", path):
            self._large(found[1], body)
        elif self.command == "POST" and (token or path == "/api/repos/create"):
            self._write(path, json.loads(body) if not path.endswith("/commit/main") else body, token)
        else:
            super()._answer(body)

    def _refuse(self, status: int, said: str, code: str = "") -> None:
        headers = {"X-Error-Message": said, **({"X-Error-Code": code} if code else {})}
        self._say(status, {"error": said}, headers)

    def _dataset(self, name: str, token: str) -> None:
        if not self.server.dataset(name).is_dir():
            self._refuse(404 if token else 401, "Repository not found", "RepoNotFound")
            return
        files, (commit, _) = self.server.files(name), self.server.revision("datasets", name, "main") or ("", None)
        about = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files], "tags": []}
        about |= {"private": name in self.server.private, "gated": False, "disabled": False, "downloads": 0, "likes": 0}
        self._say(200, {**about, "lastModified": "2026-01-01T00:00:00.000Z"})

    def _write(self, path: str, said: Any, token: str) -> None:
        found = re.fullmatch(r"(?:/api)?/datasets/([^/]+/[^/]+?)(?:\.git/info/lfs/objects|)/(\w+)(?:/main)?", path)
        if path == "/api/validate-yaml":
            self._validate(said["content"])
        elif path == "/api/verify":
            assert len(self.server.large[said["oid"]]) == said["size"]
            self.server.verified.add(said["oid"])
            self._say(200, {})
        elif token != WRITER:
            self._refuse(403 if token else 401, "You don't have the rights to write under this namespace")
        elif path == "/api/repos/create":
            self._create(said)
        elif found and self.server.dataset(found[1]).is_dir():
            {"preupload": self._preupload, "batch": self._batch, "commit": self._commit}[found[2]](found[1], said)
        else:
            self._refuse(404, "Repository not found", "RepoNotFound")

    def _validate(self, content: str) -> None:
        try:
            found = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
            about = yaml.safe_load(found[1] if found else "")
            assert {"tags", "configs", "size_categories"} <= set(about or ())
        except (yaml.YAMLError, AssertionError) as error:
            self._say(400, {"errors": [{"message": str(error)}], "warnings": []})
        else:
            self._say(200, {"errors": [], "warnings": []})

    def _create(self, said: dict[str, Any]) -> None:
        name = f"{said['organization']}/{said['name']}"
        assert said["type"] == "dataset"
        if self.server.dataset(name).is_dir():
            self._refuse(409, "You already created this dataset repo")
            return
        self.server.created.append(said)
        self.server.dataset(name).mkdir(parents=True)
        (self.server.dataset(name) / ".gitattributes").write_text("*.parquet filter=lfs\n")
        if said.get("visibility") == "private" or said.get("private"):
            self.server.private.add(name)
        self._say(200, {"url": f"{self.server.url}/datasets/{name}", "name": name})

    def _preupload(self, name: str, said: dict[str, Any]) -> None:
        there = self.server.files(name)
        ignore = said.get("gitIgnore", there.get(".gitignore", b"").decode()).split()
        told = []
        for file in said["files"]:
            path, kept = file["path"], there.get(file["path"])
            mode = "lfs" if any(fnmatch.fnmatch(path, one) for one in LARGE) else "regular"
            oid = None if kept is None else _git_blob(kept)
            if kept is not None and mode == "lfs":
                oid = hashlib.sha256(kept).hexdigest()
            ignored = any(fnmatch.fnmatch(path, one) for one in ignore)
            told.append({"path": path, "uploadMode": mode, "shouldIgnore": ignored, "oid": oid})
        self._say(200, {"files": told})

    def _batch(self, name: str, said: dict[str, Any]) -> None:
        assert said["operation"] == "upload"
        assert said["hash_algo"] == "sha256"
        objects = []
        for one in said["objects"]:
            href = {"upload": {"href": f"{self.server.url}/large/{one['oid']}"}}
            href["verify"] = {"href": f"{self.server.url}/api/verify"}
            objects.append({**one, **({} if one["oid"] in self.server.large else {"actions": href})})
        self._say(200, {"transfer": "basic", "objects": objects})

    def _large(self, oid: str, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != oid:
            self._refuse(400, "the content is not what its name says")
            return
        self.server.large[oid] = content
        self._say(200, {})

    def _commit(self, name: str, body: bytes) -> None:
        header, *operations = [json.loads(line) for line in body.splitlines()]
        assert header["key"] == "header"
        assert header["value"]["summary"]
        contents: dict[str, bytes | None] = {}
        for one in operations:
            value = one["value"]
            if one["key"] == "lfsFile" and value["oid"] not in self.server.verified:
                self._refuse(400, f"{value['path']} was not uploaded")
                return
            contents[value["path"]] = {
                "file": lambda value=value: base64.b64decode(value["content"]),
                "lfsFile": lambda value=value: self.server.large[value["oid"]],
                "deletedFile": lambda: None,
            }[one["key"]]()
        for path, content in contents.items():
            file = self.server.dataset(name) / path
            if content is None:
                file.unlink()
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
        self.server.commits.setdefault(name, []).append(operations)
        commit, _ = self.server.revision("datasets", name, "main") or ("", None)
        url = f"{self.server.url}/datasets/{name}/commit/{commit}"
        self._say(200, {"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})


def _git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()
