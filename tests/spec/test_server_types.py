"""Types of model servers: what the table says of each, and types of other packages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hermes_rl.errors import SpecError, UserError
from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.factory import create_client
from hermes_rl.servers.scripted.server import ScriptedServer
from hermes_rl.spec.load import parse_spec
from hermes_rl.spec.schema import spec_json_schema
from hermes_rl.spec.server_types import SERVER_TYPES, ServerType, code_of, server_type
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.commands import hermes

Install = Callable[..., Path]
SOURCE = '''
from hermes_rl.spec.server_types import ServerType
from hermes_rl.servers.vllm import Completions


class Ranked(Completions):
    """Stock vLLM with a priority for our calls."""

    def body(self, sampling, config):
        return {**super().body(sampling, config), "priority": 1}


MYTYPE = ServerType(dialects=(Ranked,), needs=("base_url", "tokenizer"))
NOTHING = "no type"
'''
POINTS = {"hermes_rl.servers": "mytype = mypackage:MYTYPE\nnothing = mypackage:NOTHING\nopenai = mypackage:NOTHING"}
SPEC = """
dataset: {items: [{word: one}, {word: two}]}
prompt: {user: "Say {{ word }}"}
rewards: {right: {fn: exact_match, args: {target: "That was all."}}}
process: {groups: 2, group_size: 2, drop_uniform: false}
servers: {policy: {type: mytype, base_url: "URL", tokenizer: "TOKENIZER"}}
"""


@pytest.mark.parametrize("name", SERVER_TYPES)
def test_server_type_table_matches_the_code(name: str) -> None:
    kind = SERVER_TYPES[name]
    dialects = [code_of(dialect) for dialect in kind.dialects]
    assert kind.token_level is (kind.backend is None)
    if dialects:
        assert kind.tells_version is all(dialect.weights_paths for dialect in dialects)  # type: ignore[attr-defined]
    client = create_client("policy", [ServerConfig(name, "http://localhost:1/v1", model="m")])
    assert [config.type for config in client.configs] == [name]


def test_server_type_of_a_package_is_recognised(install: Install) -> None:
    install("mypackage", SOURCE, POINTS)
    assert isinstance(server_type("mytype"), ServerType)
    assert server_type("openai") is SERVER_TYPES["openai"], "a package cannot take our names"
    policy = parse_spec(SPEC.replace("URL", "http://localhost:1/v1")).servers["policy"][0]
    assert (policy.kind.exact, policy.kind.tells_version) == (True, False)
    assert "mytype" in json.dumps(spec_json_schema()["$defs"]["Server"]["properties"]["type"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("type: mytyp", "there is no type mytyp; did you mean `mytype`"),
        ("type: nothing", r"the type of server 'nothing' \(mypackage:NOTHING\): expected a .*ServerType, not str"),
        ("error_rate: 0.5, type: mytype", "`error_rate` has no meaning for type mytype"),
    ],
)
def test_invalid_packaged_server_type_is_reported_in_the_spec(install: Install, changed: str, said: str) -> None:
    install("mypackage", SOURCE, POINTS)
    with pytest.raises(SpecError, match=said):
        parse_spec(SPEC.replace("type: mytype", changed).replace("URL", "http://localhost:1/v1"))


def test_the_keys_that_such_a_type_needs_are_asked_for(install: Install) -> None:
    install("mypackage", SOURCE, POINTS)
    with pytest.raises(SpecError, match="missing key `tokenizer`"):
        parse_spec(SPEC.replace('URL", tokenizer: "TOKENIZER"', 'http://localhost:1/v1"'))
    with pytest.raises(SpecError, match="extra_body is for chat servers; the policy's type is mytype"):
        parse_spec(SPEC.replace("URL", "http://localhost:1/v1") + "agent: {extra_body: {a: 1}}\n")


def test_a_package_that_cannot_be_imported_is_named(install: Install) -> None:
    install("broken", "raise RuntimeError('no license')\n", {"hermes_rl.servers": "broken = broken:X"})
    with pytest.raises(UserError, match=r"'broken' \(broken:X\) cannot be loaded: RuntimeError: no license"):
        server_type("broken")


def test_two_packages_of_one_name_are_refused(install: Install) -> None:
    install("one", "", {"hermes_rl.servers": "same = one:X"})
    install("two", "", {"hermes_rl.servers": "same = two:X"})
    with pytest.raises(UserError, match="two packages publish a type of server 'same'"):
        server_type("same")


async def test_server_type_of_a_package_runs_and_is_checked_by_the_cli(install: Install, tmp_path: Path) -> None:
    site = install("mypackage", SOURCE, POINTS)
    tokenizer = load_tokenizer(None)
    server = ScriptedServer("m", tokenizer)
    url = await server.start()
    try:
        spec = SPEC.replace("URL", url).replace('"TOKENIZER"', json.dumps(str(small_tokenizer_path())))
        (tmp_path / "spec.yaml").write_text(spec)
        env = {"PYTHONPATH": str(site)}
        for command in (("validate", "spec.yaml"), ("run", "spec.yaml", "process", "--out", "out")):
            done = await asyncio.to_thread(hermes, *command, cwd=tmp_path, env=env)
            assert done.returncode == 0, done.stdout + done.stderr
        looked = await asyncio.to_thread(hermes, "doctor", "spec.yaml", cwd=tmp_path, env=env)
    finally:
        await server.close()
    assert "server policy (mytype)" in looked.stdout
    assert "exactness (mytype)" in looked.stdout
    lines = [json.loads(line) for line in (tmp_path / "out" / "groups.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert all(line["provenance"]["exact"] for line in lines)
