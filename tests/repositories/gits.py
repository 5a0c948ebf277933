"""Real git repositories with an environment in them, and a server of git's own over HTTP."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

SPEC = """\
dataset: {items: [{question: "1 + 1", answer: "2"}]}
prompt: {user: "{{ question }}"}
rewards: {right: {fn: "rewards.py:right"}}
solution: {turns: [{say: "{{ answer }}"}]}
process: {groups: 1, group_size: 1}
"""
REWARDS = "def right(item, result):\n    return item['answer'] in result.final_response\n"
ENVIRONMENT = {"adding.yaml": SPEC, "rewards.py": REWARDS}


def git(folder: Path, *words: str, given: bytes | None = None) -> str:
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    who = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, env=environ, input=given, capture_output=True, check=True, timeout=60
    )
    return done.stdout.decode().strip()


def repository(folder: Path, files: Mapping[str, str | bytes] = ENVIRONMENT) -> Path:
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet")
    commit(folder, files)
    return folder


def commit(folder: Path, files: Mapping[str, str | bytes]) -> str:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "-m", "files")
    return git(folder, "rev-parse", "HEAD")


def crafted(folder: Path, *entries: tuple[str, str, bytes]) -> str:
    """Commit a tree that git itself would not make: mode, name and content of each entry."""
    lines = []
    for mode, name, content in entries:
        blob = git(folder, "hash-object", "-w", "--stdin", given=content)
        lines.append(f"{mode} ".encode() + name.encode() + b"\0" + bytes.fromhex(blob))
    tree = git(folder, "hash-object", "-w", "-t", "tree", "--literally", "--stdin", given=b"".join(lines))
    made = git(folder, "commit-tree", "-m", "crafted", tree)
    git(folder, "update-ref", "refs/heads/main", made)
    return made


class GitServer(ThreadingHTTPServer):
    """Serves repositories below a folder, by `git http-backend`; `asked` has the paths."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.root, self.asked = root, list[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> GitServer:
        Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Answer(BaseHTTPRequestHandler):
    server: GitServer

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def _answer(self, body: bytes) -> None:
        self.server.asked.append(self.path)
        path, _, query = self.path.partition("?")
        environ = {
            **os.environ, "GIT_PROJECT_ROOT": str(self.server.root), "GIT_HTTP_EXPORT_ALL": "1", "PATH_INFO": path,
            "QUERY_STRING": query, "REQUEST_METHOD": self.command, "CONTENT_LENGTH": str(len(body)),
            "CONTENT_TYPE": self.headers.get("Content-Type", ""), "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""), "REMOTE_ADDR": "127.0.0.1",
            "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
        }  # fmt: skip
        done = subprocess.run(["git", "http-backend"], input=body, env=environ, capture_output=True, timeout=60)
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        lines = [line.split(": ", 1) for line in head.decode().splitlines()]
        status = next((value for name, value in lines if name == "Status"), "200 OK")
        self.send_response(int(status.split()[0]))
        for name, value in lines:
            if name != "Status":
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


def know_no_hub(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Drop what this machine says of a hub: its address, proxies, login and a store of another protocol."""
    from huggingface_hub import constants

    for name in [name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a store of its own protocol, which is not on loopback
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no login"))
