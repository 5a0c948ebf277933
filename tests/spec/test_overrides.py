"""The command line over a spec: `--set`, the flags of Atropos, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl.errors import SpecError
from hermes_rl.spec.flags import FLAGS, OWNED, PASSED, REFUSED
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.spec.overrides import parse_extra_args

HERE = Path(__file__).parent
TEXT = """\
version: 1
dataset: {items: [{q: a}], shuffle: 1, eval: {fraction: 0.5}}
prompt: {system: s, user: "{{ q }}"}
sandbox: {backend: docker, image: debian, setup: [ls]}
rewards: {a: {fn: exact_match, weight: 2, args: {target: x}}}
servers: {policy: {type: scripted, error_rate: 0.4}}
wandb: project
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "t.yaml"
    path.write_text(TEXT)
    return path


def changed(path: Path, *argv: str, sets: tuple[str, ...] = (), mode: Mode | None = None) -> Spec:
    return load_spec(path, overrides=parse_extra_args(argv, sets), mode=mode, environ={})


def refused(path: Path, *argv: str, sets: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(SpecError) as caught:
        changed(path, *argv, sets=sets)
    return [str(problem) for problem in caught.value.problems]


def test_set_changes_one_key(path: Path) -> None:
    spec = changed(path, sets=("process.groups=7", "agent.extra_body={a: [1]}", "rewards.a.args.target=y"))
    assert (spec.process.groups, spec.agent.extra_body) == (7, {"a": (1,)})
    assert (spec.rewards["a"].args["target"], spec.rewards["a"].weight) == ("y", 2)


def test_set_of_templates_needs_no_second_quotes(path: Path) -> None:
    assert changed(path, sets=("prompt.user={{ q }}!",)).prompt.user == "{{ q }}!"


def test_set_null_is_the_default(path: Path) -> None:
    assert changed(path, sets=("dataset.shuffle=", "wandb=null")).dataset.shuffle is None


def test_set_reaches_into_shorthands_and_lists(path: Path) -> None:
    spec = changed(path, sets=("wandb.mode=offline", "sandbox.setup.0=pwd"))
    assert spec.wandb is not None and (spec.wandb.project, spec.wandb.mode) == ("project", "offline")
    assert spec.sandbox.setup == ("pwd",)


def test_paths_of_set_start_at_the_working_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    spec = changed(path, sets=("dataset.path=json", "dataset.data_files=x/a.json", "state=w.py:W"))
    assert spec.state is not None
    assert (spec.dataset.data_files, spec.state.python) == ("/x/a.json", "/w.py:W")


def test_another_kind_drops_what_belonged_to_the_old_one(path: Path) -> None:
    spec = changed(path, sets=("dataset.path=json", "dataset.data_files=a.json", "rewards.a.fn=regex_match"))
    assert spec.dataset.items is None and spec.dataset.shuffle == 1
    assert (dict(spec.rewards["a"].args), spec.rewards["a"].weight) == ({}, 2)
    spec = changed(path, sets=("sandbox.backend=bubblewrap",))
    assert (spec.sandbox.image, spec.sandbox.setup) == (None, ("ls",))
    spec = changed(
        path, sets=("servers.policy.type=vllm", "servers.policy.base_url=http://a", "servers.policy.model=m")
    )
    assert (spec.servers["policy"][0].type, spec.servers["policy"][0].error_rate) == ("vllm", 0)


@pytest.mark.parametrize("name", ["harbor", "terminal-bench", "terminal-bench-2"])
def test_the_image_of_a_row_stays_where_an_option_chooses_what_runs_it(name: str) -> None:
    spec = load_spec(name, overrides=parse_extra_args((), ("sandbox.backend=docker",)))
    assert (spec.sandbox.backend, str(spec.sandbox.image)[:2]) == ("docker", "{{")


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("agent.max_turnz=1",), "--set agent.max_turnz: unknown key `max_turnz`; did you mean `max_turns`?"),
        (("agent.max_turns=x",), '--set agent.max_turns: expected an integer, got the text "x"'),
        (("nonsense",), "--set nonsense: expected KEY=VALUE"),
        (("a..b=1",), "--set a..b: expected KEY=VALUE"),
        (("seed=1", "seed=2"), "--set seed: is given twice"),
        (("seed.x=1.5", "seed=1"), "--set seed.x: `seed` holds no keys"),
        (("agent={a: 1",), "--set agent: "),
        (("servers.policy.api_key=hunter2",), "--set servers.policy.api_key: a secret is written"),
        (("sandbox.setup.3=x",), "is a list of 1"),
        (("atropos.group_size=2",), "--set atropos.group_size: `group_size` has its own spec key"),
    ],
)
def test_set_errors_name_the_option(path: Path, sets: tuple[str, ...], message: str) -> None:
    problems = refused(path, sets=sets)
    assert message in problems[0]
    assert "hunter2" not in "".join(problems)


def test_flags_of_the_environment(path: Path) -> None:
    spec = changed(
        path,
        "--env.group_size", "8", "--env.max_num_workers", "-1", "--env.inference_weight=2", "--env.total_steps", "5",
        "--env.enabled_toolsets", "[file, terminal]", "--env.max_agent_turns", "4", "--env.use_wandb", "false",
        "--env.system_prompt", "be brief", "--env.ensure_scores_are_not_same",
        "--env.data_path_to_save_groups", "/g.jsonl",
        "--env.data_dir_to_save_evals", "/evals", "--env.thinking_mode", "true", "--env.prompt_field", "The Question",
        mode="process",
    )  # fmt: skip
    assert (spec.process.group_size, spec.process.groups, spec.process.drop_uniform) == (8, 5, True)
    assert (spec.serve.group_size, spec.serve.total_steps) == (4, 1000)
    assert spec.atropos == {
        "max_num_workers": -1,
        "inference_weight": 2,
        "data_path_to_save_groups": "/g.jsonl",
        "data_dir_to_save_evals": "/evals",
    }
    assert spec.toolsets.enabled == ("file", "terminal")
    assert (spec.agent.max_turns, spec.prompt.system) == (4, "be brief")
    assert spec.wandb is not None and spec.wandb.mode == "disabled"
    assert spec.agent.reasoning is not None and spec.agent.reasoning.effort == "medium"
    assert spec.prompt.user == "{{ row['The Question'] }}"


def test_flags_follow_the_mode(path: Path) -> None:
    spec = changed(path, "--env.group_size", "8", mode="serve")
    assert (spec.serve.group_size, spec.process.group_size) == (8, 4)
    spec = changed(path, "--env.group_size", "8")
    assert (spec.serve.group_size, spec.process.group_size) == (8, 8)


def test_flags_of_the_policy(path: Path) -> None:
    spec = changed(
        path,
        "--openai.base_url", "http://a/v1", "--openai.model_name", "7", "--openai.num_max_requests_at_once", "3",
        "--openai.timeout", "9", "--openai.api_key", "hunter2", "--openai.health_check", "false",
        "--openai.tokenizer_name", "org/tok",
    )  # fmt: skip
    (policy,) = spec.servers["policy"]
    assert (policy.type, policy.base_url, policy.model, policy.max_concurrency) == ("openai", "http://a/v1", "7", 3)
    assert (policy.timeout, policy.tokenizer, policy.error_rate) == (9, "org/tok", 0)
    assert spec.policy_api_key is not None and spec.policy_api_key.get_secret_value() == "hunter2"
    assert "hunter2" not in f"{spec!r} {spec.resolved()} {spec.policy_api_key!r}"


def test_flags_of_the_policy_apply_to_all_of_a_list(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    servers = "servers: {policy: [{base_url: 'http://a', model: m}, {base_url: 'http://b', model: m}]}\n"
    path.write_text(TEXT.replace("servers: {policy: {type: scripted, error_rate: 0.4}}\n", servers))
    spec = changed(path, "--openai.model_name", "n", "--openai.server_type", "sglang")
    assert [(server.type, server.model) for server in spec.servers["policy"]] == [("sglang", "n")] * 2


def test_a_policy_from_flags_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(TEXT.replace("servers: {policy: {type: scripted, error_rate: 0.4}}\n", ""))
    spec = changed(path, "--openai.base_url", "http://a", "--openai.model_name", "m")
    assert spec.servers["policy"][0].model == "m"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--slurm",), "--slurm: servers are not found through Slurm"),
        (("--testing",), "--demo"),
        (("--config", "a.yaml"), "--config: give the spec itself"),
        (("--env.max_agent_turn", "1"), "did you mean `--env.max_agent_turns`?"),
        (("--env.group_size",), "--env.group_size: needs a value"),
        (("--env.group_size", "1", "--env.group_size", "2"), "is given twice"),
        (("--openai.api_key", "hunter2", "--openai.api_key", "hunter2"), "is given twice"),
        (("stray",), "stray: is not expected here"),
        (("--env.max_agent_turns", "x"), "--env.max_agent_turns: expected an integer"),
        (("--env.batch_size", "x"), "--env.batch_size: expected an integer"),
        (("--openai.server_type", "trl"), "--openai.server_type: there is no type trl"),
    ],
)
def test_refused_flags(path: Path, argv: tuple[str, ...], message: str) -> None:
    problems = refused(path, *argv)
    assert message in "\n".join(problems)
    assert "hunter2" not in "".join(problems)


def test_a_flag_and_a_set_of_the_same_key(path: Path) -> None:
    assert (
        "sets the same key as --set agent.max_turns"
        in refused(path, "--env.max_agent_turns", "3", sets=("agent.max_turns=4",))[0]
    )


def flags_page() -> str:
    """What docs/flags.md is to be."""
    lines = [
        "# The flags of Atropos, and the keys they stand for",
        "",
        "`hermes-rl run`, `validate`, `render` and `doctor` accept the flags of Atropos' programs besides `--set`.",
        "Each stands for one key of the spec; giving a key twice is an error. Where there are two keys, the first is",
        "set in serve, the second in process and evaluate. Values are YAML: `-1`, `[a, b]` and `{a: 1}` work.",
        "",
        "| flag | key | value | note |",
        "|---|---|---|---|",
    ]
    for name, flag in FLAGS.items():
        key = ", ".join(f"`{key}`" for key in flag.keys) or "none"
        lines.append(f"| `{name}` | {key} | {flag.type} | {flag.help} |")
    lines += ["", "Refused, with the way to do it here:", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in REFUSED.items()]
    return "\n".join(lines) + "\n"


def test_the_page_of_flags_is_fresh() -> None:
    assert (HERE.parents[1] / "docs" / "flags.md").read_text(encoding="utf-8") == flags_page()


def test_every_key_of_the_table_exists() -> None:
    from hermes_rl.spec.section import keys_at

    for flag in FLAGS.values():
        for key in flag.keys:
            path = tuple(key.split("."))
            known = PASSED if path[0] == "atropos" else keys_at(Spec, path[:-1])
            assert path[-1] in known, key


def test_the_table_of_fields_is_atropos_own() -> None:
    """Read as source: importing atroposlib takes seconds."""
    import ast
    from importlib.util import find_spec

    found = find_spec("atroposlib")
    assert found is not None and found.submodule_search_locations is not None
    source = Path(found.submodule_search_locations[0]) / "envs" / "base.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "BaseEnvConfig")
    fields = {
        node.target.id for node in config.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert fields <= PASSED.keys() | OWNED.keys()
    ours = {"tool_pool_size", "custom_thinking_prompt"}
    assert PASSED.keys() - ours <= fields


@pytest.mark.parametrize("query", ["api_key=hunter2", "a=b&token=hunter2", "key=hunter2", "X-Amz-Signature=hunter2"])
def test_no_secret_in_an_address(path: Path, query: str) -> None:
    address = f"http://host/v1?{query}"
    for problems in (
        refused(path, "--openai.base_url", address, "--openai.model_name", "m"),
        refused(path, sets=("servers.policy={base_url: '" + address + "', model: m}",)),
    ):
        assert len(problems) == 1 and "must not hold" in problems[0]
        assert "hunter2" not in problems[0]


def test_query_parameters_of_base_url_are_preserved(path: Path) -> None:
    address = "http://host/v1?api-version=2024&max_tokens=5"
    spec = changed(path, "--openai.base_url", address, "--openai.model_name", "m")
    assert spec.servers["policy"][0].base_url == address
