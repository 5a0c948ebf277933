"""The service uses only the public Python API, and costs nothing where it is not used."""

from __future__ import annotations

import ast
import subprocess
import sys

import hermes_rl
from tests.service.served import ROOT

PUBLIC_MODULES = {"hermes_rl", "hermes_rl.errors", "hermes_rl.active_environment", "hermes_rl.values"}


def test_the_service_imports_public_names_only() -> None:
    private = []
    for path in (ROOT / "hermes_rl" / "service").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                private += [(path.name, one.name) for one in node.names if one.name.startswith("hermes_rl")]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hermes_rl"):
                own = (node.module or "").startswith("hermes_rl.service")
                public = node.module in PUBLIC_MODULES and all(
                    node.module != "hermes_rl" or one.name in {*hermes_rl.__all__, "service"} for one in node.names
                )
                if not own and not public:
                    private.append((path.name, str(node.module)))
    assert private == []


def test_help_loads_no_web_server() -> None:
    code = (
        "import sys\nfrom hermes_rl.cli.main import status\nstatus(['--help'])\n"
        "assert not {'fastapi', 'uvicorn', 'starlette'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60, stdout=subprocess.DEVNULL)
