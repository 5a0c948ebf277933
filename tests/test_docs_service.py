"""docs/service.md: its client runs against a service, also one that is killed and started again meanwhile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.commands import ROOT, hermes
from tests.service.served import TOKEN, Served, spec_in

PAGE = (ROOT / "docs" / "service.md").read_text("utf-8")
(CLIENT,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def client(service: Served, folder: Path) -> str:
    environ = {**os.environ, "ROLLOUTS_URL": service.url, "ROLLOUTS_TOKEN": TOKEN}
    done = subprocess.run(
        [sys.executable, "-c", CLIENT],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_gets_its_groups_and_the_same_from_the_record(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    with Served(spec, token=TOKEN) as service:
        first = client(service, tmp_path)
        assert len(first.splitlines()) == 4
        assert "[1.0, 1.0]" in first
        service.kill()
    with Served(spec, token=TOKEN) as service:
        assert sorted(client(service, tmp_path).splitlines()) == sorted(first.splitlines())


def test_every_path_of_the_service_is_on_the_page() -> None:
    from tests.service.test_openapi import PATHS

    for path in PATHS:
        assert path.replace("{session_id}", "ID") in PAGE


def test_every_option_of_the_command_is_on_the_page() -> None:
    said = hermes("serve-http", "--help", cwd=ROOT, env={"COLUMNS": "200", "TERM": "dumb"}).stdout
    options = set(re.findall(r"--[a-z-]+", said)) - {"--help", "--env", "--openai"}
    assert options
    assert [option for option in options if option not in PAGE] == []
