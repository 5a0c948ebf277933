"""The flags of the policy are those of Atropos' server configuration."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

from hermes_rl.spec.flags import FLAGS


def test_every_field_of_the_server_configuration_has_a_flag() -> None:
    found = find_spec("atroposlib")
    assert found is not None and found.submodule_search_locations is not None
    source = Path(found.submodule_search_locations[0]) / "envs" / "server_handling" / "server_baseline.py"
    names: set[str] = set()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name in ("ServerBaseline", "APIServerConfig"):
            names |= {
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
    assert {f"--openai.{name}" for name in names} == {name for name in FLAGS if name.startswith("--openai.")}
