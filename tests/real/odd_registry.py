"""A registry of valid and broken images on a loopback port: `python odd_registry.py PORT LAYER`.

The name of an image names what is odd about it, up to its first hyphen; `good` is a whole image of the layer, a tar
file.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
MORE = 10**8
"""Bytes that a layer has in its manifest, and that never come."""
ODD = (
    "dribbles", "hangs", "silent", "wrong", "html", "busy", "list", "deep", "huge", "random", "empty", "layers",
    "config", "foreign", "twice", "old",
)  # fmt: skip


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Respond as a registry does, except for the fault that an image's name states."""

    protocol_version = "HTTP/1.1"
    layer = b""
    blobs: dict[str, bytes] = {}

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path == "/v2/":
            self.say(b"{}")
            return
        name, what, reference = self.path.removeprefix("/v2/").rsplit("/", 2)
        kind = name.partition("-")[0]
        if what == "blobs":
            self.blob(kind, reference)
        elif kind == "silent":
            time.sleep(3600)
        elif kind == "busy":
            self.say(b"{}", status=503)
        elif kind == "html":
            self.say(b"<html>sign in</html>", "text/html")
        else:
            self.manifest(name, kind)

    def manifest(self, name: str, kind: str) -> None:
        layer, identity = self.layer_of(name, kind)
        config: dict[str, Any] = {
            "architecture": "amd64",
            "os": "plan9" if kind == "foreign" else "linux",
            "config": {"Labels": {"name": name}},
            "rootfs": {"type": "layers", "diff_ids": [identity] * (2 if kind == "layers" else 1)},
        }
        written = b"[]" + name.encode() if kind == "config" else json.dumps(config).encode()
        self.blobs.update({digest_of(written): written, digest_of(layer): layer})
        size = len(layer) + (MORE if kind in ("dribbles", "hangs") else 0)
        made: dict[str, Any] = {
            "schemaVersion": 1 if kind == "old" else 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "size": len(written), "digest": digest_of(written)},
            "layers": [{"mediaType": LAYER, "size": size, "digest": digest_of(layer)}] * (2 if kind == "twice" else 1),
        }
        if kind == "list":
            made |= {"layers": None, "config": None}
        text = json.dumps(made).encode()
        if kind == "deep":
            text = b'{"schemaVersion": 2, "x": ' + b"[" * 100_000
        if kind == "huge":
            text += b" " * (8 << 20)
        self.say(text, MANIFEST, Docker_Content_Digest=digest_of(text))

    def layer_of(self, name: str, kind: str) -> tuple[bytes, str]:
        """Return a layer and its digest. Each image has a different one, because an engine requests a digest only
        once.
        """
        if kind in ("random", "empty"):
            data = b"" if kind == "empty" else hashlib.sha256(name.encode()).digest() * 9999
            return data, digest_of(data)
        data = self.layer + b"\0" * 1024 + name.encode()
        return gzip.compress(data, 1, mtime=0), digest_of(data)

    def blob(self, kind: str, digest: str) -> None:
        data = self.blobs[digest]
        if data.startswith((b"{", b"[")):
            self.say(data)
        elif kind == "wrong":
            self.say(data[:-9] + b"otherwise")
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data) + (MORE if kind in ("dribbles", "hangs") else 0)))
            self.end_headers()
            self.send_layer(kind, data)

    def send_layer(self, kind: str, data: bytes) -> None:
        if kind == "dribbles":
            for byte in data:
                self.wfile.write(bytes([byte]))
                time.sleep(0.05)
        elif kind == "hangs":
            time.sleep(3600)
        else:
            self.wfile.write(data)

    def say(self, body: bytes, kind: str = "application/json", status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    Handler.layer = Path(sys.argv[2]).read_bytes()
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
