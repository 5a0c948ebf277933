"""The JSON Schema: valid, fresh, complete, and of one mind with the loader about the examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from hermes_rl.cli.main import status
from hermes_rl.errors import SpecError
from hermes_rl.shipped import shipped_rewards
from hermes_rl.spec.flags import PASSED
from hermes_rl.spec.schema import spec_json_schema
from hermes_rl.spec.sets import load_set, set_json_schema

HERE = Path(__file__).parent
MINIMAL: dict[str, Any] = {"dataset": {"items": [{"q": "a"}]}, "prompt": {"user": "x"}}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return spec_json_schema()


@pytest.fixture(scope="module")
def validator(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_it_is_fresh() -> None:
    committed = HERE.parents[1] / "docs" / "spec.schema.json"
    assert (
        committed.read_text(encoding="utf-8") == json.dumps(spec_json_schema(), indent=2, ensure_ascii=False) + "\n"
    ), "run: hermes-rl schema > docs/spec.schema.json"


@pytest.mark.parametrize("path", sorted((HERE / "specs").glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_valid(path: Path, validator: jsonschema.Draft202012Validator) -> None:
    errors = list(validator.iter_errors(yaml.safe_load(path.read_text(encoding="utf-8"))))
    assert not errors, errors[0].message


@pytest.mark.parametrize(
    "changes",
    [
        {"agent": {"max_turns": "${N}"}},
        {"process": {"drop_uniform": "${DROP:-true}", "format": "${F}"}},
        {"sandbox": {"limits": {"memory": "{{ m }}", "processes": "{{ p }}", "disk": "2GiB"}}},
        {"toolsets": ["a"], "wandb": "project"},
        {"toolsets": {"distribution": {"web": 0.5}}},
        {"servers": {"policy": {"type": "scripted"}, "judge": [{"base_url": "http://a"}]}},
        {"rewards": {"exact_match": {"args": {"target": "{{ t }}"}}}},
        {"rewards": {"mine": {"fn": "a.py:f", "args": {"anything": 1}}}},
        {"sandbox": {"network": ["a.example"], "files": "{{ files }}"}},
        {"atropos": {"inference_weight": 2.0, "max_num_workers": "${W}"}},
        {"agent": None, "wandb": None},
    ],
)
def test_good(changes: dict[str, Any], validator: jsonschema.Draft202012Validator) -> None:
    errors = list(validator.iter_errors({**MINIMAL, **changes}))
    assert not errors, errors[0].message


@pytest.mark.parametrize(
    "changes",
    [
        {"agnet": {}},
        {"agent": {"max_turns": "many"}},
        {"agent": {"max_turns": "{{ n }}"}},
        {"rewards": {"exact_match": {"args": {"tarket": "x"}}}},
        {"rewards": {"a": {"fn": "exact_match", "args": {"tarket": "x"}}}},
        {"atropos": {"group_size": 3}},
        {"servers": {"policy": {"type": "trl"}}},
        {"servers": {"policy": []}},
    ],
)
def test_bad(changes: dict[str, Any], validator: jsonschema.Draft202012Validator) -> None:
    assert list(validator.iter_errors({**MINIMAL, **changes}))


def test_child_spec_may_omit_keys_of_its_parent(validator: jsonschema.Draft202012Validator) -> None:
    assert not list(validator.iter_errors({"extends": "a.yaml", "agent": {"max_turns": 3}}))
    assert list(validator.iter_errors({"agent": {"max_turns": 3}}))


def _fields(node: Any, path: str = "") -> Any:
    if isinstance(node, dict):
        for name, field in node.get("properties", {}).items():
            if isinstance(field, dict) and not name.startswith("args_"):
                yield f"{path}.{name}", field
        for key, value in node.items():
            yield from _fields(value, f"{path}.{key}")
    elif isinstance(node, list):
        for value in node:
            yield from _fields(value, path)


def test_every_key_has_help(schema: dict[str, Any]) -> None:
    bare = [
        path
        for path, field in _fields(schema)
        if "description" not in field and ".allOf" not in path and ".then" not in path and ".rewards" not in path
    ]
    assert not bare


def test_numbers_have_a_unit_in_their_help(schema: dict[str, Any]) -> None:
    timeouts = [
        (path, field) for path, field in _fields(schema) if path.rpartition(".")[2] in ("timeout", "tool_timeout")
    ]
    assert timeouts
    assert all("econds" in field["description"] for path, field in timeouts), timeouts


def test_arguments_of_shipped_rewards_are_there(schema: dict[str, Any]) -> None:
    for name in shipped_rewards():
        arguments = schema["$defs"][f"args_{name}"]
        assert arguments["description"]
        assert not {"item", "result", "ctx", "state", "group"} & arguments["properties"].keys()
        assert all(field["description"] for field in arguments["properties"].values())
    assert "target" in schema["$defs"]["args_exact_match"]["properties"]


def test_the_fields_of_the_environment_are_there(schema: dict[str, Any]) -> None:
    assert (
        schema["properties"]["atropos"]["properties"].keys() == PASSED.keys()
        if "properties" in schema["properties"]["atropos"]
        else True
    )


SETS: list[tuple[Any, bool]] = [
    ({"name": "a", "specs": ["terminal-files"], "models": [{"name": "m"}]}, True),
    (
        {"name": "a", "specs": [{"spec": "terminal-files", "name": "t", "set": {"a.b": 1}}], "models": [{"name": "m"}]},
        True,
    ),
    (
        {
            "name": "a",
            "specs": ["terminal-files"],
            "models": [{"name": "m", "set": None}],
            "settings": None,
            "by": None,
        },
        True,
    ),
    ({"name": "a", "specs": ["terminal-files"], "models": []}, False),
    ({"name": "a/b", "specs": ["terminal-files"], "models": [{"name": "m"}]}, False),
    ({"name": "a" * 61, "specs": ["terminal-files"], "models": [{"name": "m"}]}, False),
    ({"name": "a", "specs": ["terminal-files"], "models": ["m"]}, False),
    ({"name": "a", "specs": ["terminal-files"], "models": [{"name": "m.json"}]}, False),
    ({"name": "a", "specs": ["terminal-files"]}, False),
    ({"name": "a", "specs": [{"name": "b"}], "models": [{"name": "m"}]}, False),
    ({"name": "a", "specs": ["terminal-files"], "models": [{"name": "m"}], "rewards": {}}, False),
    (None, False),
]


@pytest.mark.parametrize(("body", "good"), SETS)
def test_the_schema_of_sets_is_of_one_mind_with_the_loader(body: Any, good: bool, tmp_path: Path) -> None:
    schema = set_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert jsonschema.Draft202012Validator(schema).is_valid({"set": body}) is good
    (tmp_path / "set.yaml").write_text(yaml.safe_dump({"set": body}))
    if good:
        assert load_set(tmp_path / "set.yaml").name == "a"
    else:
        with pytest.raises(SpecError):
            load_set(tmp_path / "set.yaml")


def test_the_schema_of_sets_is_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["schema", "--set"]) == 0
    committed = HERE.parents[1] / "docs" / "set.schema.json"
    assert committed.read_text(encoding="utf-8") == capsys.readouterr().out, (
        "run: hermes-rl schema --set > docs/set.schema.json"
    )
