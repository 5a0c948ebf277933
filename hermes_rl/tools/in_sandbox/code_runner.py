"""Run one script of `execute_code` in the sandbox, and pass its tool calls to the host.

Standard input and output are the connection to the host, one JSON text a line: the host starts with the request; the
script's calls go up and their results come down; the last line tells how the script ended. The script's output is
captured here, so that no text that it prints can be taken for a call.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO, Any

GRACE_SECONDS = 1.0
"""Seconds to wait for output that a child of the script may still hold open."""


class Caught:
    """Head and tail of the output of one pipe."""

    def __init__(self, pipe: IO[bytes], limit: int) -> None:
        self._pipe = pipe
        self._head, self._tail, self._limit, self._dropped = b"", b"", limit // 2, 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            data = os.read(self._pipe.fileno(), 65536)
            if not data:
                return
            room = self._limit - len(self._head)
            self._head += data[:room]
            self._tail += data[room:]
            excess = max(0, len(self._tail) - self._limit)
            self._tail = self._tail[excess:]
            self._dropped += excess

    def text(self) -> str:
        self._thread.join(GRACE_SECONDS)
        note = f"\n[... {self._dropped} bytes of output omitted ...]\n".encode() if self._dropped else b""
        return (self._head + note + self._tail).decode("utf-8", "replace")


def start(request: dict[str, Any], folder: str) -> subprocess.Popen[bytes]:
    """Start the script as a separate process, in a separate group."""
    script = os.path.join(folder, "script.py")  # noqa: PTH118 (pathlib would double the time to start)
    for path, text in ((script, request["code"]), (os.path.join(folder, "hermes_tools.py"), request["tools"])):  # noqa: PTH118
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(text)
    answers, calls = os.dup(0), os.dup(1)
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    tools = json.dumps([answers, calls, request["parameters"]])
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), HERMES_TOOLS=tools)
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, script],
        stdin=null,
        stdout=pipe,
        stderr=pipe,
        env=env,
        pass_fds=(answers, calls),
        start_new_session=True,
    )


def wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until the script ends; return True if it exceeded its time and was killed."""
    try:
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True


def main() -> None:
    request = json.loads(sys.stdin.buffer.readline())
    folder = tempfile.mkdtemp(prefix="code-")
    try:
        process = start(request, folder)
        assert process.stdout is not None
        assert process.stderr is not None
        out, errors = Caught(process.stdout, request["stdout_limit"]), Caught(process.stderr, request["stderr_limit"])
        timed_out = wait(process, request["timeout"])
        ended = {"exit_code": process.returncode, "timed_out": timed_out, "stdout": out.text(), "stderr": errors.text()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.buffer.write(json.dumps(ended).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
