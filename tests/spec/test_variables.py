"""`${VAR}`: where it is read, as what, and where it is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl.errors import SpecError, UserError
from hermes_rl.spec.load import parse_spec
from hermes_rl.spec.model import Spec
from hermes_rl.spec.substitution import read_env_file

BASE = 'version: 1\ndataset: {items: [{q: "${HOME}"}]}\nprompt: {user: "{{ q }}"}\n'


def load(text: str, **environ: str) -> Spec:
    return parse_spec(BASE + text, environ=environ)


def test_plain_is_read_as_the_type_of_the_field() -> None:
    text = "agent:\n  max_turns: ${N}\n  temperature: ${T}\nname: ${N}\nprocess:\n  drop_uniform: ${B}\n"
    spec = load(text, N="7", T="1e-1", B="true")
    assert (spec.agent.max_turns, spec.agent.temperature, spec.name, spec.process.drop_uniform) == (7, 0.1, "7", True)


def test_defaults_for_unset_and_empty() -> None:
    assert load("name: ${A:-b}\n").name == "b"
    assert load("name: ${A:-b}\n", A="").name == "b"
    assert load("name: ${A:-b}\n", A="c").name == "c"
    assert load("description: ${A:-http://x/${y}}\n").description == "http://x/${y}"
    assert load("description: ${A:-}\n").description is None
    assert load("description: '${A:-}'\n").description == ""


def test_rows_commands_templates_and_prose_stay() -> None:
    spec = load(
        "sandbox:\n  setup: ['echo ${HOME}', '${HOME}']\n"
        "artifacts: {a: {command: '${HOME}'}}\n"
        "rewards: {r: {args: {command: 'echo ${X} $$', note: 'costs ${X}', t: '${X} {{ q }}'}}}\n"
        "solution: {turns: [{tools: [{name: terminal, args: {command: '${X}'}}]}]}\n"
    )
    assert spec.dataset.items is not None and spec.dataset.items[0]["q"] == "${HOME}"
    assert spec.sandbox.setup == ("echo ${HOME}", "${HOME}")
    assert spec.artifacts["a"].command == "${HOME}"
    assert dict(spec.rewards["r"].args) == {"command": "echo ${X} $$", "note": "costs ${X}", "t": "${X} {{ q }}"}
    assert spec.solution is not None and spec.solution.turns is not None and spec.solution.turns[0].tools is not None
    assert spec.solution.turns[0].tools[0].args == {"command": "${X}"}


def test_a_whole_value_is_substituted_where_templates_are_too() -> None:
    assert load("sandbox: {backend: docker, image: '${IMAGE:-debian}'}\n").sandbox.image == "debian"
    assert load("rewards: {r: {args: {n: '${N}'}}}\n", N="3").rewards["r"].args["n"] == "3"


def test_escapes() -> None:
    assert load("description: a $$ b\n").description == "a $ b"
    assert load("description: $${HOME}\n").description == "${HOME}"
    assert load("description: a $ b $HOME\n").description == "a $ b $HOME"
    assert load("rewards: {r: {args: {a: '$${HOME}', b: 'x $$ y'}}}\n").rewards["r"].args == {
        "a": "${HOME}",
        "b": "x $$ y",
    }


@pytest.mark.parametrize("name", ["API_KEY", "HF_TOKEN", "my_secret", "DB_PASSWORD"])
def test_secrets_are_not_substituted(name: str) -> None:
    with pytest.raises(SpecError, match="_env") as caught:
        load(f"description: ${{{name}}}\n", **{name: "hunter2"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("place", ["sandbox: {image: 'a/${X}'}", "sandbox: {env: {A: '${X}/b'}}", "name: a${X}"])
def test_partial_use_is_an_error_with_a_hint(place: str) -> None:
    with pytest.raises(SpecError, match="whole value"):
        load(place + "\n", X="1")


def test_resolved_spec_keeps_variables_as_written() -> None:
    spec = load("name: ${A:-b}\nagent:\n  max_turns: ${N}\n", N="3")
    resolved = spec.resolved()
    assert (resolved["name"], resolved["agent"]) == ("${A:-b}", {"max_turns": "${N}"})


def test_env_file(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("# comment\nexport A=1\nB='two words'\nC=three # note\n\nD=\n")
    assert read_env_file(path) == {"A": "1", "B": "two words", "C": "three", "D": ""}
    path.write_text("oops\n")
    with pytest.raises(UserError, match=":1:1: expected NAME=value"):
        read_env_file(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_env_file(tmp_path / "missing")
