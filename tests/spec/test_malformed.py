"""Malformed specs: each is one mistake, and the message stands at exactly the right place.

`▶` marks where the problem must be reported; it is taken out before the text is read.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl.errors import SpecError
from hermes_rl.spec.load import load_draft, load_spec

ROWS = 'dataset: {items: [{q: "one"}, {q: "two"}]}\n'
BASE = f'version: 1\n{ROWS}prompt: {{user: "{{{{ q }}}}"}}\n'

SEATS = BASE + "agents: {a: {}, b: {}}\nschedule: alternate\n"

WHOLE: dict[str, tuple[str, str]] = {
    # reading
    "not-a-mapping": ("▶- a\n- b", "a spec is a mapping"),
    "empty": ("▶", "the file is empty"),
    # keys and types
    "missing-dataset": ("▶version: 1\nprompt: {user: a}", "missing key `dataset`"),
    "wrong-version": (
        'version: ▶2\ndataset: {items: [{q: "one"}, {q: "two"}]}\nprompt: {user: a}',
        "not possible here",
    ),
    # several agents
    "seat-prompt": (
        'dataset: {items: [{q: "one"}, {q: "two"}]}\nagents: {a: {prompt: {user: x}}, ▶b: {}}\nschedule: call',
        "it has no prompt: give it one",
    ),
}
OF_BASE: dict[str, tuple[str, str]] = {
    # reading
    "tab": ("agent:\n▶\tmax_turns: 3", "a tab cannot indent YAML; use spaces"),
    "unclosed-list": ("tools: [a\nagent▶: {}", "expected ',' or ']'"),
    "two-documents": ("▶---\nname: x", "one document"),
    "unknown-tag": ("name: ▶!!python/name x", "tag"),
    "merge-key": ("agent:\n  ▶<<: {max_turns: 1}", "use `extends`"),
    "name-that-leads-out": ('name: ▶"../../evil"', "`name` is a directory below outputs"),
    "name-that-is-hidden": ("name: ▶.x", "do not start with a dot"),
    "name-with-a-line-break": ('name: ▶"a\\nb"', "control character"),
    "number-as-key": ("on_stop:\n  ▶1: drop", "keys are strings"),
    "null-as-key": ("▶~: 1", "keys are strings"),
    "list-as-key": ("? ▶[a, b]\n: 1", "keys are strings"),
    "duplicate-key": ("seed: 1\n▶seed: 2", "duplicate key `seed`; the first one is in line 4"),
    "duplicate-nested": ("agent:\n  max_turns: 1\n  ▶max_turns: 2", "duplicate key `max_turns`"),
    "unknown-alias": ("seed: ▶*nowhere", "alias *nowhere"),
    "unquoted-braces": ("sandbox: {workdir: ▶{{ q }}}", 'quote it: "{{ … }}"'),
    "unquoted-braces-text": ("solution: {a: ▶{{ q }}/b}", "unquoted {{"),
    "unquoted-variable": ("agent: {max_turns: ▶${N}}", "unquoted ${"),
    # keys and types
    "unknown-top": ("▶rewardz: {}", "unknown key `rewardz`; did you mean `rewards`?"),
    "unknown-nested": ("agent:\n  ▶max_turn: 3", "did you mean `max_turns`? Choices: max_turns, timeout"),
    "unknown-in-list": ("tools:\n  - ▶pyhton: a.py:f\n    python: a.py:f", "did you mean `python`?"),
    "unknown-server-key": ("servers:\n  policy: {type: scripted, ▶error_rat: 0.4}", "did you mean `error_rate`?"),
    "missing-nested": ("sandbox:\n  files:\n    - ▶{content: a}", "missing key `to`"),
    "missing-in-mapping": ("tools:\n  - ▶mcp: {url: http://localhost:1}", "missing key `name`"),
    "text-for-integer": ("agent:\n  max_turns: ▶many", 'expected an integer, got the text "many"'),
    "quoted-integer": ('agent: {max_turns: ▶"3"}', "expected an integer"),
    "boolean-for-integer": ("agent: {max_turns: ▶true}", "expected an integer, got true"),
    "yes-is-text": ("process: {drop_uniform: ▶yes}", 'expected true or false, got the text "yes"'),
    "number-for-text": ("name: ▶12", "expected text, got the number 12"),
    "mapping-for-list": ("tools: ▶{python: a.py:f}", "expected a list, got a mapping"),
    "list-for-mapping": ("agent: ▶[]", "expected a mapping, got a list"),
    "too-small": ("process: {groups: ▶0}", "must be at least 1"),
    "not-finite": ("agent: {temperature: ▶.nan}", "finite number"),
    "not-a-choice": ("process: {format: ▶stf}", "did you mean `sft`? Choices: atropos, sft, dpo"),
    # several agents
    "play-missing": ("▶agents: {a: {}, b: {}}", "missing key `schedule`: alternate, simultaneous, call, {fn:"),
    "play-alone": ("▶schedule: alternate", "`schedule` goes with `agents`, who speak"),
    "play-unknown": ("agents: {a: {}, b: {}}\nschedule: ▶alternating", "did you mean `alternate`?"),
    "play-twice": (
        "agents: {a: {}, b: {}}\nschedule: {order: call, ▶fn: a.py:f}",
        "schedule takes one of order, fn or state",
    ),
    "play-empty": ("agents: {a: {}, b: {}}\n▶schedule: {}", "schedule needs one of order, fn or state"),
    "play-state": ("agents: {a: {}, b: {}}\nschedule: {state: ▶turn}", "this spec has no `state:` that could select"),
    "play-fn": ("agents: {a: {}, b: {}}\nschedule: {fn: ▶duel}", "expected file.py:function"),
    "play-rounds": ("agents: {a: {}, b: {}}\nschedule: {order: call, ▶rounds: 2}", "`rounds` goes with `order:"),
    "rounds-zero": ("agents: {a: {}, b: {}}\nschedule: {order: alternate, rounds: ▶0}", "must be at least 1"),
    "seat-program-calls": (
        "agents: {a: {agent: {▶program: {command: x}}}, b: {}}\nschedule: {order: call}",
        "the others are its tools, and it is offered none: write `tools: mcp`",
    ),
    "paid-without-seats": ("rewards: {exact_match: {args: {target: x}, ▶seats: [a]}}", "there are no `agents:`"),
    "not-a-size": ("sandbox: {limits: {memory: ▶2 gigs}}", "not a size"),
    "not-a-mode": ('sandbox: {files: [{to: a, content: b, mode: ▶"rwx"}]}', "octal"),
    # substitution
    "unset-variable": ("seed: ▶${NOWHERE_SET}", "NOWHERE_SET is not set"),
    "part-variable": ("servers: {policy: {base_url: ▶'http://${HOST}/v1', model: m}}", "must be the whole value"),
    "secret-variable": ("name: ▶${MY_API_KEY}", "a key that ends in _env"),
    "variable-of-wrong-type": ("agent: {max_turns: ▶'${WORD}'}", "expected an integer"),
    # templates
    "template-misplaced": ('agent: {max_turns: ▶"{{ q }}"}', "templates are not rendered here"),
    # combinations
    "type-is-a-list": (
        "agent: {extra_body: {a: 1}}\nservers: {policy: {type: ▶[], base_url: 'http://a', model: m}}",
        "expected text, got a list",
    ),
    "toolsets-two-ways": ("toolsets: {enabled: [file], ▶distribution: {file: 0.5}}", "exclude each other"),
    "tool-of-no-kind": ("tools:\n  - ▶{}", "needs one of python, state or mcp"),
    "tool-names-collide": ("tools:\n  - python: a.py:f\n  - python: ▶b.py:f", "the name `f` is taken"),
    "state-tool-without-state": ("tools: [{state: ▶desk}]", "no `state:`"),
    "schemas-of-a-function": ("tools: [{python: a.py:f, ▶schemas: s}]", "`schemas` goes with `state`"),
    "schemas-of-no-name": ("state: a.py:A\ntools: [{state: a, schemas: ▶[b]}]", "expected text, got a list"),
    "arguments-unknown": (
        "tools: [{python: a.py:f, arguments: ▶stric}]",
        "did you mean `strict`? Choices: strict, repair",
    ),
    "arguments-of-a-server": (
        "tools: [{mcp: {name: a, command: a}, ▶arguments: strict}]",
        "`arguments` goes with `python` or `state`",
    ),
    "not-code": ("tools: [{python: ▶calculator}]", "expected file.py:function"),
    "mcp-shared-in-the-sandbox": (
        "tools: [{mcp: {name: a, command: a, ▶scope: shared}}]",
        "cannot be shared; `where: host` can",
    ),
    "mcp-url-and-files": (
        "tools: [{mcp: {name: a, url: 'http://localhost:1', ▶where: host}}]",
        "is for a server started by `command`",
    ),
    "user-without-server": ("▶user: {system: a}\nservers: {policy: {type: scripted}}", "no server role `user`"),
    "unknown-backend": ("sandbox: {backend: ▶dockre}", "did you mean `docker`?"),
    "limit-of-none": ("sandbox: {backend: none, limits: {▶memory: 1GiB}}", "best_effort: true"),
    "file-two-contents": ("sandbox: {files: [{to: a, content: b, ▶base64: Yg==}]}", "`content` is there already"),
    "file-same-target": (
        "sandbox:\n  files:\n    - {to: a, content: b}\n    - {to: ▶./a, content: c}",
        "file number 1 is put",
    ),
    "file-not-base64": ("sandbox: {files: [{to: a, base64: ▶'??'}]}", "not base64"),
    "file-from-outside": ("sandbox: {files: [{to: a, from: ▶../secret}]}", "below the folder"),
    "artifact-two-ways": ("artifacts: {a: {path: b, ▶command: c}}", "`path` is there already"),
    "reasoning-two-ways": ("agent: {reasoning: {effort: low, ▶max_tokens: 2048}}", "`effort` is there already"),
    "gate-with-weight": ("rewards: {a: {fn: exact_match, gate: true, ▶weight: 2}}", "it has no weight"),
    "clamp-reversed": ("score: {clamp: ▶[1, 0]}", "lower than the second"),
    "range-reversed": ("rewards: {a: {fn: exact_match, range: ▶[1, 1]}}", "lower than the second"),
    "range-too-wide": ("rewards: {a: {fn: exact_match, range: ▶[0, 1.0e+200]}}", "two numbers within ±1e+100"),
    "range-of-a-gate": ("rewards: {a: {fn: exact_match, gate: true, range: ▶[-1, 1]}}", "must lie within [0, 1]"),
    "ending-unknown": ("on_stop: {▶max_turn: 0}", "did you mean `max_turns`?"),
    "ending-of-ours": ("on_stop: {▶server_failure: 0}", "never graded"),
    "ending-treatment": ("on_stop: {max_turns: ▶droop}", "did you mean `drop`?"),
    "solution-typo": ("solution: {▶turn: []}", "did you mean `turns`?"),
    "empty-turn": ("solution:\n  turns:\n    - ▶{reasoning: a}", "needs `tools`, `say`, or"),
    "role-name": ("servers: {▶item: {type: scripted}}", "cannot be a role"),
    "server-without-url": ("servers:\n  ▶policy: {type: vllm, model: a}", "missing key `base_url`"),
    "error_rate-on-openai": (
        "servers: {policy: {base_url: 'http://a', model: m, ▶error_rate: 0.5}}",
        "no meaning for type openai",
    ),
    "trl": (
        "servers: {policy: {type: ▶trl, base_url: 'http://a'}}",
        "there is no type trl: TRL's server is stock vLLM",
    ),
    "address": ("serve: {api_url: ▶localhost:8000}", "http://"),
    "half-an-address": ("servers: {policy: {base_url: ▶'http://[::1/v1', model: m}}", "expected an address"),
    "port-of-an-address": ("tools: [{mcp: {name: far, url: ▶'http://a:70000/mcp'}}]", "Port out of range"),
    "password-in-address": (
        "servers: {policy: {base_url: ▶'http://me:hunter2@host', model: m}}",
        "must not hold a password",
    ),
    "key-in-address": (
        "servers: {policy: {base_url: ▶'http://host/v1?v=2&api_key=hunter2', model: m}}",
        "must not hold a password, key or token",
    ),
    "key-in-address-of-mcp": (
        "tools: [{mcp: {name: far, url: ▶'https://mcp.example/mcp?exaApiKey=hunter2'}}]",
        "must not hold a password, key or token; use headers_env",
    ),
    "extra-body-exact": (
        "agent: {▶extra_body: {a: 1}}\nservers: {policy: {type: vllm, base_url: 'http://a', model: m}}",
        "chat servers",
    ),
    "env-unknown": ("atropos: {▶inference_wait: 2.0}", "did you mean `inference_weight`?"),
    "env-owned": ("atropos: {▶group_size: 8}", "`serve.group_size` or `process.group_size`"),
    "env-type": ("atropos: {batch_size: ▶big}", "expected an integer"),
    # secrets
    "secret-in-server": (
        "servers: {policy: {base_url: 'http://a', model: m, api_key: ▶hunter2}}",
        "a secret is written in `api_key`",
    ),
    "secret-in-headers": (
        "agent: {extra_body: {headers: {Authorization: ▶Bearer hunter2}}}",
        "a secret is written in `Authorization`",
    ),
    "secret-for-a-variable": (
        "servers: {policy: {base_url: 'http://a', model: m, headers_env: {Authorization: ▶Bearer hunter2}}}",
        "a secret is written in `Authorization`",
    ),
    "secret-for-a-variable-of-mcp": (
        "tools: [{mcp: {name: far, url: 'http://a', headers_env: {X-Api-Key: ▶sk-hunter2}}}]",
        "a secret is written in `X-Api-Key`",
    ),
    # extends
    "extends-missing": ("extends: ▶nowhere.yaml", "cannot be read: nowhere.yaml"),
    "extends-list": ("extends: ▶[a.yaml]", "the path of one parent"),
    "extends-itself": ("extends: ▶spec.yaml", "that is a cycle"),
}
OF_ROWS: dict[str, tuple[str, str]] = {
    # reading
    "unquoted-braces-block": ("prompt:\n  user: ▶{{ q }}", 'quote it: "{{ … }}"'),
    # templates
    "broken-template": ("prompt:\n  user: |\n    Fine.\n    Broken: ▶{{ q | }}\n", "template: "),
    "unknown-filter": ('prompt: {user: ▶"{{ q | shout }}"}', "No filter named 'shout'"),
    # combinations
    "prompt-two-ways": ("prompt: {▶user: a, messages: [{role: user, content: a}]}", "exclude each other"),
    "prompt-without-user": ("▶prompt: {system: a}", "needs `user` or `messages`"),
}
OF_DATA: dict[str, tuple[str, str]] = {
    # templates
    "filter-with-braces": ('dataset:\n  items: [{q: a}]\n  filter: ▶"{{ q }}"', "leave the braces out"),
    # combinations
    "two-sources": ("dataset:\n  items: [{q: a}]\n  ▶path: org/data", "`items` is there already"),
    "no-source": ("▶dataset: {shuffle: 1}", "needs one of path, items, generator or harbor"),
    "tasks-and-rows": ("dataset:\n  harbor: tasks\n  ▶items: [{q: a}]", "`harbor` is there already"),
    "tasks-as-fallback": ("dataset:\n  path: org/data\n  fallback: {items: [{q: a}], ▶harbor: tasks}", "harbor"),
    "tasks-are-a-path": ("dataset: {harbor: ▶[a, b]}", "expected text"),
    "no-template-of-env": ("dataset: {items: [{q: a}]}\nsandbox: {env: ▶3}", "a mapping"),
    "format-without-files": ("dataset: {path: ▶json}", "name the files in `data_files`"),
    "split-without-path": ("dataset: {items: [{q: a}], ▶split: x}", "goes with `path`"),
    "eval-two-ways": ("dataset: {items: [{q: a}], eval: {fraction: 0.1, ▶only: true}}", "`fraction` is there already"),
    "eval-all": ("dataset: {items: [{q: a}], eval: {fraction: ▶1.5}}", "must be less than 1"),
    "eval-of-training": ("dataset: {path: x/y, eval: {split: ▶train}}", "trained on"),
}
OF_CALL: dict[str, tuple[str, str]] = {
    # several agents
    "rivals-trained": ("agents: {a: {}, b: {▶opponents: [policy]}}", "opponents are not trained: write"),
    "rivals-unknown": ("agents: {a: {}, b: {opponents: [▶old], train: false}}", "no server role `old`"),
    "rivals-and-server": (
        "agents: {a: {}, b: {opponents: [policy], train: false, ▶server: policy}}",
        "`opponents` are the servers of this seat",
    ),
    "choose-alone": ("agents: {a: {}, b: {▶opponent_sampling: latest}}", "goes with `opponents`"),
    "seat-program": (
        "agents: {a: {}, b: {}}\nagent: {▶program: pi}",
        "each seat with an agent program sets its own: `agents.NAME.agent.program`",
    ),
    "seat-program-recipe": (
        "agents: {a: {}, b: {agent: {program: ▶codx}}}",
        "there is no agent program `codx`; did you mean `codex`?",
    ),
    "seat-program-command": (
        "agents: {a: {}, b: {agent: {▶program: {env: {A: b}}}}}",
        "a program needs a `command`, a `python` function",
    ),
    "seat-program-tools": (
        "agents: {a: {}, b: {▶tools: [], agent: {program: {command: x}}}}",
        "`agents.b.tools` is for the loop; an agent program has its own; `agents.b.agent.program.tools: mcp` offers",
    ),
    "seat-program-reasoning": (
        "agents: {a: {}, b: {agent: {program: {command: x}, ▶reasoning: {effort: low}}}}",
        "`agents.b.agent.reasoning` is for the loop",
    ),
    "seat-program-backend": (
        "agents: {a: {}, b: {agent: {▶program: {command: x}}}}\nsandbox: {backend: none}",
        "backend none has no separate network",
    ),
    "seat-hears": (
        "agents: {a: {}, b: {▶message_template: x}}",
        "`message_template` goes with `schedule: alternate` or",
    ),
    "seat-description": ("agents: {a: {▶description: x}, b: {}}", "all but the first, with `schedule: call`"),
    "user-and-seat-program": (
        "agents: {a: {agent: {program: {command: x, tools: mcp}}}, b: {}}\n▶user: {turns: [a]}",
        "a `user` needs the built-in loop, but the first seat runs an agent program",
    ),
    "seats-and-steps": (
        "agents: {a: {}, b: {}}\nuser: {turns: [a]}\nrewards: {exact_match: {args: {target: a}, ▶per_step: mean}}",
        "only rollouts of a single agent are graded per step",
    ),
}
OF_ALTERNATE: dict[str, tuple[str, str]] = {
    # several agents
    "one-seat": ("▶agents: {a: {}}", "has two seats at least; for one agent leave it out"),
    "seat-name": ("agents: {a: {}, ▶row: {}}", "`row` cannot name a seat; use letters"),
    "seat-key": ("agents: {a: {}, b: {▶trian: false}}", "did you mean `train`?"),
    "seat-server": (
        "agents: {a: {}, b: {server: ▶rivl}}\nservers: {rival: {type: scripted}}",
        "there is no server role `rivl`; did you mean `rival`?",
    ),
    "seat-baseline": ("agents: {a: {}, b: {baseline: ▶group}}", "choices: seat, row, episode"),
}
OF_SEATS: dict[str, tuple[str, str]] = {
    # several agents
    "seats-and-user": ("▶user: {turns: [a]}", "the first seat of `schedule: call` talks to a `user`; here the"),
    "seats-and-program": ("agent: {▶program: pi}", "`agent.program` is for one agent"),
    "seats-and-teacher": (
        "▶distill: {server: t}\nservers: {t: {type: vllm, base_url: http://a/v1, model: m}}",
        "`distill` is for one agent",
    ),
    "paid-unknown": ("rewards: {exact_match: {args: {target: x}, seats: [a, ▶c]}}", "there is no seat `c`"),
    "paid-unknown-factor": ("rewards: {exact_match: {args: {target: x}, seats: {a: 1, ▶c: -1}}}", "no seat `c`"),
    "paid-gate-factors": (
        "rewards: {exact_match: {args: {target: x}, gate: true, seats: ▶{a: 1, b: -1}}}",
        "a gate has no factors per seat",
    ),
    "paid-nobody": ("rewards: {exact_match: {args: {target: x}, seats: ▶[]}}", "a reward pays one seat at least"),
    "paid-text": ("rewards: {exact_match: {args: {target: x}, seats: ▶a}}", "expected a list, got the text"),
    "paid-factor-text": ("rewards: {exact_match: {args: {target: x}, seats: {a: ▶all}}}", "expected a number"),
    "turn-of-nobody": ("solution: {turns: [{say: x, seat: ▶c}]}", "there is no seat `c`; choices: a, b"),
}
CASES = {
    name: (start + text, message)
    for start, cases in (
        ("", WHOLE),
        (BASE, OF_BASE),
        ("version: 1\n" + ROWS, OF_ROWS),
        ("version: 1\nprompt: {user: a}\n", OF_DATA),
        (BASE + "schedule: call\n", OF_CALL),
        (BASE + "schedule: alternate\n", OF_ALTERNATE),
        (SEATS, OF_SEATS),
    )
    for name, (text, message) in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_problem_is_reported_at_the_marked_position(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    marked, fragment = CASES[name]
    before, mark, after = marked.partition("▶")
    assert mark
    Path("spec.yaml").write_text(before + after, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_spec("spec.yaml", environ={"WORD": "word"})
    assert len(caught.value.problems) == 1, str(caught.value)
    problem = caught.value.problems[0]
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    assert str(problem).startswith(f"spec.yaml:{line}:{column}: "), str(problem)
    assert fragment in problem.message
    assert "hunter2" not in str(caught.value)


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 40


def test_all_problems_are_reported_together_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = BASE + "agent: {max_turns: no}\nseed: 1\nseed: 2\nfoo: 1\nscore: {clamp: [2, 1]}\nname: ${UNSET}\n"
    Path("a.yaml").write_text(text)
    with pytest.raises(SpecError) as caught:
        load_spec("a.yaml", environ={})
    assert [problem.line for problem in caught.value.problems] == [4, 6, 7, 8, 9]


def test_errors_of_a_parent_name_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("sub/parent.yaml").write_text(BASE + "agent: {max_turns: no}\n")
    Path("child.yaml").write_text("extends: sub/parent.yaml\nagent: {timeout: no}\n")
    with pytest.raises(SpecError) as caught:
        load_spec("child.yaml")
    assert [str(problem)[:24] for problem in caught.value.problems] == [
        "child.yaml:2:18: expecte",
        "sub/parent.yaml:4:20: ex",
    ]


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"version: 1\nname: \xff\n")
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    problem = caught.value.problems[0]
    assert (problem.line, problem.column) == (2, 7)
    assert "UTF-8" in problem.message


def test_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"version: 1\nname: a\x07b\n")
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert (caught.value.problems[0].line, caught.value.problems[0].column) == (2, 8)


def test_too_deep(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: " + "[" * 3000)
    with pytest.raises(SpecError, match="levels deep"):
        load_spec(path)


def test_aliases_do_not_explode(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    path = tmp_path / "a.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(SpecError, match="aliases make this larger"):
        load_spec(path)


@pytest.mark.parametrize(
    ("key", "checked"),
    [
        ("extra: 1", True),
        ("extra: {a: {b: c}}", True),
        ("agnet: {max_turns: 3}", True),
        ("server: {judge: {}}", True),
        ("models: {judge: {type: scripted}}", False),
    ],
)
def test_unknown_key_hides_reward_problems_only_if_it_may_mean_servers(tmp_path: Path, key: str, checked: bool) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"{BASE}rewards: {{exact_mach: {{}}}}\n{key}\n")
    draft, problems = load_draft(path)
    assert draft is not None
    assert [problem.message.partition(";")[0] for problem in problems] == [f"unknown key `{key.partition(':')[0]}`"]
    assert (set(draft.spec.rewards) == {"exact_mach"}) is checked
