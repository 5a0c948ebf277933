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

CASES: dict[str, tuple[str, str]] = {
    # reading
    "tab": (BASE + "agent:\n▶\tmax_turns: 3\n", "a tab cannot indent YAML; use spaces"),
    "unclosed-list": (BASE + "tools: [a\nagent▶: {}\n", "expected ',' or ']'"),
    "two-documents": (BASE + "▶---\nname: x\n", "one document"),
    "not-a-mapping": ("▶- a\n- b\n", "a spec is a mapping"),
    "empty": ("▶", "the file is empty"),
    "unknown-tag": (BASE + "name: ▶!!python/name x\n", "tag"),
    "merge-key": (BASE + "agent:\n  ▶<<: {max_turns: 1}\n", "use `extends`"),
    "name-that-leads-out": (BASE + 'name: ▶"../../evil"\n', "`name` is a directory below outputs"),
    "name-that-is-hidden": (BASE + "name: ▶.x\n", "do not start with a dot"),
    "name-with-a-line-break": (BASE + 'name: ▶"a\\nb"\n', "control character"),
    "number-as-key": (BASE + "on_stop:\n  ▶1: drop\n", "keys are strings"),
    "null-as-key": (BASE + "▶~: 1\n", "keys are strings"),
    "list-as-key": (BASE + "? ▶[a, b]\n: 1\n", "keys are strings"),
    "duplicate-key": (BASE + "seed: 1\n▶seed: 2\n", "duplicate key `seed`; the first one is in line 4"),
    "duplicate-nested": (BASE + "agent:\n  max_turns: 1\n  ▶max_turns: 2\n", "duplicate key `max_turns`"),
    "unknown-alias": (BASE + "seed: ▶*nowhere\n", "alias *nowhere"),
    "unquoted-braces": (BASE + "sandbox: {workdir: ▶{{ q }}}\n", 'quote it: "{{ … }}"'),
    "unquoted-braces-block": ("version: 1\n" + ROWS + "prompt:\n  user: ▶{{ q }}\n", 'quote it: "{{ … }}"'),
    "unquoted-braces-text": (BASE + "solution: {a: ▶{{ q }}/b}\n", "unquoted {{"),
    "unquoted-variable": (BASE + "agent: {max_turns: ▶${N}}\n", "unquoted ${"),
    # keys and types
    "unknown-top": (BASE + "▶rewardz: {}\n", "unknown key `rewardz`; did you mean `rewards`?"),
    "unknown-nested": (BASE + "agent:\n  ▶max_turn: 3\n", "did you mean `max_turns`? Choices: max_turns, timeout"),
    "unknown-in-list": (BASE + "tools:\n  - ▶pyhton: a.py:f\n    python: a.py:f\n", "did you mean `python`?"),
    "unknown-server-key": (
        BASE + "servers:\n  policy: {type: scripted, ▶error_rat: 0.4}\n",
        "did you mean `error_rate`?",
    ),
    "missing-dataset": ("▶version: 1\nprompt: {user: a}\n", "missing key `dataset`"),
    "missing-nested": (BASE + "sandbox:\n  files:\n    - ▶{content: a}\n", "missing key `to`"),
    "missing-in-mapping": (BASE + "tools:\n  - ▶mcp: {url: http://localhost:1}\n", "missing key `name`"),
    "text-for-integer": (BASE + "agent:\n  max_turns: ▶many\n", 'expected an integer, got the text "many"'),
    "quoted-integer": (BASE + 'agent: {max_turns: ▶"3"}\n', "expected an integer"),
    "boolean-for-integer": (BASE + "agent: {max_turns: ▶true}\n", "expected an integer, got true"),
    "yes-is-text": (BASE + "process: {drop_uniform: ▶yes}\n", 'expected true or false, got the text "yes"'),
    "number-for-text": (BASE + "name: ▶12\n", "expected text, got the number 12"),
    "mapping-for-list": (BASE + "tools: ▶{python: a.py:f}\n", "expected a list, got a mapping"),
    "list-for-mapping": (BASE + "agent: ▶[]\n", "expected a mapping, got a list"),
    "too-small": (BASE + "process: {groups: ▶0}\n", "must be at least 1"),
    "not-finite": (BASE + "agent: {temperature: ▶.nan}\n", "finite number"),
    "not-a-choice": (BASE + "process: {format: ▶stf}\n", "did you mean `sft`? Choices: atropos, sft, dpo"),
    "wrong-version": ("version: ▶2\n" + ROWS + "prompt: {user: a}\n", "not possible here"),
    # several agents
    "play-missing": (BASE + "▶agents: {a: {}, b: {}}\n", "missing key `schedule`: alternate, simultaneous, call, {fn:"),
    "one-seat": (
        BASE + "▶agents: {a: {}}\nschedule: alternate\n",
        "has two seats at least; for one agent leave it out",
    ),
    "play-alone": (BASE + "▶schedule: alternate\n", "`schedule` goes with `agents`, who speak"),
    "play-unknown": (BASE + "agents: {a: {}, b: {}}\nschedule: ▶alternating\n", "did you mean `alternate`?"),
    "play-twice": (
        BASE + "agents: {a: {}, b: {}}\nschedule: {order: call, ▶fn: a.py:f}\n",
        "schedule takes one of order, fn or state",
    ),
    "play-empty": (BASE + "agents: {a: {}, b: {}}\n▶schedule: {}\n", "schedule needs one of order, fn or state"),
    "play-state": (
        BASE + "agents: {a: {}, b: {}}\nschedule: {state: ▶turn}\n",
        "this spec has no `state:` that could select",
    ),
    "play-fn": (BASE + "agents: {a: {}, b: {}}\nschedule: {fn: ▶duel}\n", "expected file.py:function"),
    "play-rounds": (
        BASE + "agents: {a: {}, b: {}}\nschedule: {order: call, ▶rounds: 2}\n",
        "`rounds` goes with `order:",
    ),
    "rounds-zero": (BASE + "agents: {a: {}, b: {}}\nschedule: {order: alternate, rounds: ▶0}\n", "must be at least 1"),
    "seat-name": (BASE + "agents: {a: {}, ▶row: {}}\nschedule: alternate\n", "`row` cannot name a seat; use letters"),
    "seat-key": (BASE + "agents: {a: {}, b: {▶trian: false}}\nschedule: alternate\n", "did you mean `train`?"),
    "seat-server": (
        BASE + "agents: {a: {}, b: {server: ▶rivl}}\nschedule: alternate\nservers: {rival: {type: scripted}}\n",
        "there is no server role `rivl`; did you mean `rival`?",
    ),
    "rivals-trained": (
        BASE + "agents: {a: {}, b: {▶opponents: [policy]}}\nschedule: call\n",
        "opponents are not trained: write",
    ),
    "rivals-unknown": (
        BASE + "agents: {a: {}, b: {opponents: [▶old], train: false}}\nschedule: call\n",
        "no server role `old`",
    ),
    "rivals-and-server": (
        BASE + "agents: {a: {}, b: {opponents: [policy], train: false, ▶server: policy}}\nschedule: call\n",
        "`opponents` are the servers of this seat",
    ),
    "choose-alone": (
        BASE + "agents: {a: {}, b: {▶opponent_sampling: latest}}\nschedule: call\n",
        "goes with `opponents`",
    ),
    "seat-baseline": (
        BASE + "agents: {a: {}, b: {baseline: ▶group}}\nschedule: alternate\n",
        "choices: seat, row, episode",
    ),
    "seat-prompt": (
        f"{ROWS}agents: {{a: {{prompt: {{user: x}}}}, ▶b: {{}}}}\nschedule: call\n",
        "it has no prompt: give it one",
    ),
    "seat-program": (
        BASE + "agents: {a: {}, b: {}}\nagent: {▶program: pi}\nschedule: call\n",
        "each seat with an agent program sets its own: `agents.NAME.agent.program`",
    ),
    "seat-program-recipe": (
        BASE + "agents: {a: {}, b: {agent: {program: ▶codx}}}\nschedule: call\n",
        "there is no agent program `codx`; did you mean `codex`?",
    ),
    "seat-program-command": (
        BASE + "agents: {a: {}, b: {agent: {▶program: {env: {A: b}}}}}\nschedule: call\n",
        "a program needs a `command`, a `python` function",
    ),
    "seat-program-tools": (
        BASE + "agents: {a: {}, b: {▶tools: [], agent: {program: {command: x}}}}\nschedule: call\n",
        "`agents.b.tools` is for the loop; an agent program has its own; `agents.b.agent.program.tools: mcp` offers",
    ),
    "seat-program-reasoning": (
        BASE + "agents: {a: {}, b: {agent: {program: {command: x}, ▶reasoning: {effort: low}}}}\nschedule: call\n",
        "`agents.b.agent.reasoning` is for the loop",
    ),
    "seat-program-calls": (
        BASE + "agents: {a: {agent: {▶program: {command: x}}}, b: {}}\nschedule: {order: call}\n",
        "the others are its tools, and it is offered none: write `tools: mcp`",
    ),
    "seat-program-backend": (
        BASE + "agents: {a: {}, b: {agent: {▶program: {command: x}}}}\nschedule: call\nsandbox: {backend: none}\n",
        "backend none has no separate network",
    ),
    "seat-hears": (
        BASE + "agents: {a: {}, b: {▶message_template: x}}\nschedule: call\n",
        "`message_template` goes with `schedule: alternate` or",
    ),
    "seat-description": (
        BASE + "agents: {a: {▶description: x}, b: {}}\nschedule: call\n",
        "all but the first, with `schedule: call`",
    ),
    "seats-and-user": (
        SEATS + "▶user: {turns: [a]}\n",
        "the first seat of `schedule: call` talks to a `user`; here the",
    ),
    "user-and-seat-program": (
        BASE
        + "agents: {a: {agent: {program: {command: x, tools: mcp}}}, b: {}}\nschedule: call\n▶user: {turns: [a]}\n",
        "a `user` needs the built-in loop, but the first seat runs an agent program",
    ),
    "seats-and-steps": (
        f"{BASE}agents: {{a: {{}}, b: {{}}}}\nschedule: call\nuser: {{turns: [a]}}\n"
        "rewards: {exact_match: {args: {target: a}, ▶per_step: mean}}\n",
        "only rollouts of a single agent are graded per step",
    ),
    "seats-and-program": (SEATS + "agent: {▶program: pi}\n", "`agent.program` is for one agent"),
    "seats-and-teacher": (
        SEATS + "▶distill: {server: t}\nservers: {t: {type: vllm, base_url: http://a/v1, model: m}}\n",
        "`distill` is for one agent",
    ),
    "paid-unknown": (SEATS + "rewards: {exact_match: {args: {target: x}, seats: [a, ▶c]}}\n", "there is no seat `c`"),
    "paid-unknown-factor": (
        SEATS + "rewards: {exact_match: {args: {target: x}, seats: {a: 1, ▶c: -1}}}\n",
        "no seat `c`",
    ),
    "paid-gate-factors": (
        SEATS + "rewards: {exact_match: {args: {target: x}, gate: true, seats: ▶{a: 1, b: -1}}}\n",
        "a gate has no factors per seat",
    ),
    "paid-nobody": (
        SEATS + "rewards: {exact_match: {args: {target: x}, seats: ▶[]}}\n",
        "a reward pays one seat at least",
    ),
    "paid-text": (SEATS + "rewards: {exact_match: {args: {target: x}, seats: ▶a}}\n", "expected a list, got the text"),
    "paid-factor-text": (
        SEATS + "rewards: {exact_match: {args: {target: x}, seats: {a: ▶all}}}\n",
        "expected a number",
    ),
    "paid-without-seats": (
        BASE + "rewards: {exact_match: {args: {target: x}, ▶seats: [a]}}\n",
        "there are no `agents:`",
    ),
    "turn-of-nobody": (SEATS + "solution: {turns: [{say: x, seat: ▶c}]}\n", "there is no seat `c`; choices: a, b"),
    "not-a-size": (BASE + "sandbox: {limits: {memory: ▶2 gigs}}\n", "not a size"),
    "not-a-mode": (BASE + 'sandbox: {files: [{to: a, content: b, mode: ▶"rwx"}]}\n', "octal"),
    # substitution
    "unset-variable": (BASE + "seed: ▶${NOWHERE_SET}\n", "NOWHERE_SET is not set"),
    "part-variable": (
        BASE + "servers: {policy: {base_url: ▶'http://${HOST}/v1', model: m}}\n",
        "must be the whole value",
    ),
    "secret-variable": (BASE + "name: ▶${MY_API_KEY}\n", "a key that ends in _env"),
    "variable-of-wrong-type": (BASE + "agent: {max_turns: ▶'${WORD}'}\n", "expected an integer"),
    # templates
    "broken-template": (
        "version: 1\n" + ROWS + "prompt:\n  user: |\n    Fine.\n    Broken: ▶{{ q | }}\n",
        "template: ",
    ),
    "unknown-filter": ("version: 1\n" + ROWS + 'prompt: {user: ▶"{{ q | shout }}"}\n', "No filter named 'shout'"),
    "template-misplaced": (BASE + 'agent: {max_turns: ▶"{{ q }}"}\n', "templates are not rendered here"),
    "filter-with-braces": (
        'version: 1\ndataset:\n  items: [{q: a}]\n  filter: ▶"{{ q }}"\nprompt: {user: a}\n',
        "leave the braces out",
    ),
    # combinations
    "two-sources": (
        "version: 1\ndataset:\n  items: [{q: a}]\n  ▶path: org/data\nprompt: {user: a}\n",
        "`items` is there already",
    ),
    "no-source": (
        "version: 1\n▶dataset: {shuffle: 1}\nprompt: {user: a}\n",
        "needs one of path, items, generator or harbor",
    ),
    "tasks-and-rows": (
        "version: 1\ndataset:\n  harbor: tasks\n  ▶items: [{q: a}]\nprompt: {user: a}\n",
        "`harbor` is there already",
    ),
    "tasks-as-fallback": (
        "version: 1\ndataset:\n  path: org/data\n  fallback: {items: [{q: a}], ▶harbor: tasks}\nprompt: {user: a}\n",
        "harbor",
    ),
    "tasks-are-a-path": ("version: 1\ndataset: {harbor: ▶[a, b]}\nprompt: {user: a}\n", "expected text"),
    "no-template-of-env": (
        "version: 1\ndataset: {items: [{q: a}]}\nsandbox: {env: ▶3}\nprompt: {user: a}\n",
        "a mapping",
    ),
    "format-without-files": (
        "version: 1\ndataset: {path: ▶json}\nprompt: {user: a}\n",
        "name the files in `data_files`",
    ),
    "type-is-a-list": (
        BASE + "agent: {extra_body: {a: 1}}\nservers: {policy: {type: ▶[], base_url: 'http://a', model: m}}\n",
        "expected text, got a list",
    ),
    "split-without-path": (
        "version: 1\ndataset: {items: [{q: a}], ▶split: x}\nprompt: {user: a}\n",
        "goes with `path`",
    ),
    "eval-two-ways": (
        "version: 1\ndataset: {items: [{q: a}], eval: {fraction: 0.1, ▶only: true}}\nprompt: {user: a}\n",
        "`fraction` is there already",
    ),
    "eval-all": (
        "version: 1\ndataset: {items: [{q: a}], eval: {fraction: ▶1.5}}\nprompt: {user: a}\n",
        "must be less than 1",
    ),
    "eval-of-training": (
        "version: 1\ndataset: {path: x/y, eval: {split: ▶train}}\nprompt: {user: a}\n",
        "trained on",
    ),
    "prompt-two-ways": (
        "version: 1\n" + ROWS + "prompt: {▶user: a, messages: [{role: user, content: a}]}\n",
        "exclude each other",
    ),
    "prompt-without-user": ("version: 1\n" + ROWS + "▶prompt: {system: a}\n", "needs `user` or `messages`"),
    "toolsets-two-ways": (
        BASE + "toolsets: {enabled: [file], ▶distribution: {file: 0.5}}\n",
        "exclude each other",
    ),
    "tool-of-no-kind": (BASE + "tools:\n  - ▶{}\n", "needs one of python, state or mcp"),
    "tool-names-collide": (
        BASE + "tools:\n  - python: a.py:f\n  - python: ▶b.py:f\n",
        "the name `f` is taken",
    ),
    "state-tool-without-state": (BASE + "tools: [{state: ▶desk}]\n", "no `state:`"),
    "schemas-of-a-function": (
        BASE + "tools: [{python: a.py:f, ▶schemas: s}]\n",
        "`schemas` goes with `state`",
    ),
    "schemas-of-no-name": (BASE + "state: a.py:A\ntools: [{state: a, schemas: ▶[b]}]\n", "expected text, got a list"),
    "arguments-unknown": (
        BASE + "tools: [{python: a.py:f, arguments: ▶stric}]\n",
        "did you mean `strict`? Choices: strict, repair",
    ),
    "arguments-of-a-server": (
        BASE + "tools: [{mcp: {name: a, command: a}, ▶arguments: strict}]\n",
        "`arguments` goes with `python` or `state`",
    ),
    "not-code": (BASE + "tools: [{python: ▶calculator}]\n", "expected file.py:function"),
    "mcp-shared-in-the-sandbox": (
        BASE + "tools: [{mcp: {name: a, command: a, ▶scope: shared}}]\n",
        "cannot be shared; `where: host` can",
    ),
    "mcp-url-and-files": (
        BASE + "tools: [{mcp: {name: a, url: 'http://localhost:1', ▶where: host}}]\n",
        "is for a server started by `command`",
    ),
    "user-without-server": (
        BASE + "▶user: {system: a}\nservers: {policy: {type: scripted}}\n",
        "no server role `user`",
    ),
    "unknown-backend": (BASE + "sandbox: {backend: ▶dockre}\n", "did you mean `docker`?"),
    "limit-of-none": (BASE + "sandbox: {backend: none, limits: {▶memory: 1GiB}}\n", "best_effort: true"),
    "file-two-contents": (
        BASE + "sandbox: {files: [{to: a, content: b, ▶base64: Yg==}]}\n",
        "`content` is there already",
    ),
    "file-same-target": (
        BASE + "sandbox:\n  files:\n    - {to: a, content: b}\n    - {to: ▶./a, content: c}\n",
        "file number 1 is put",
    ),
    "file-not-base64": (BASE + "sandbox: {files: [{to: a, base64: ▶'??'}]}\n", "not base64"),
    "file-from-outside": (BASE + "sandbox: {files: [{to: a, from: ▶../secret}]}\n", "below the folder"),
    "artifact-two-ways": (BASE + "artifacts: {a: {path: b, ▶command: c}}\n", "`path` is there already"),
    "reasoning-two-ways": (
        BASE + "agent: {reasoning: {effort: low, ▶max_tokens: 2048}}\n",
        "`effort` is there already",
    ),
    "gate-with-weight": (BASE + "rewards: {a: {fn: exact_match, gate: true, ▶weight: 2}}\n", "it has no weight"),
    "clamp-reversed": (BASE + "score: {clamp: ▶[1, 0]}\n", "lower than the second"),
    "range-reversed": (BASE + "rewards: {a: {fn: exact_match, range: ▶[1, 1]}}\n", "lower than the second"),
    "range-too-wide": (BASE + "rewards: {a: {fn: exact_match, range: ▶[0, 1.0e+200]}}\n", "two numbers within ±1e+100"),
    "range-of-a-gate": (
        BASE + "rewards: {a: {fn: exact_match, gate: true, range: ▶[-1, 1]}}\n",
        "must lie within [0, 1]",
    ),
    "ending-unknown": (BASE + "on_stop: {▶max_turn: 0}\n", "did you mean `max_turns`?"),
    "ending-of-ours": (BASE + "on_stop: {▶server_failure: 0}\n", "never graded"),
    "ending-treatment": (BASE + "on_stop: {max_turns: ▶droop}\n", "did you mean `drop`?"),
    "solution-typo": (BASE + "solution: {▶turn: []}\n", "did you mean `turns`?"),
    "empty-turn": (BASE + "solution:\n  turns:\n    - ▶{reasoning: a}\n", "needs `tools`, `say`, or"),
    "role-name": (BASE + "servers: {▶item: {type: scripted}}\n", "cannot be a role"),
    "server-without-url": (BASE + "servers:\n  ▶policy: {type: vllm, model: a}\n", "missing key `base_url`"),
    "error_rate-on-openai": (
        BASE + "servers: {policy: {base_url: 'http://a', model: m, ▶error_rate: 0.5}}\n",
        "no meaning for type openai",
    ),
    "trl": (
        BASE + "servers: {policy: {type: ▶trl, base_url: 'http://a'}}\n",
        "there is no type trl: TRL's server is stock vLLM",
    ),
    "address": (BASE + "serve: {api_url: ▶localhost:8000}\n", "http://"),
    "half-an-address": (BASE + "servers: {policy: {base_url: ▶'http://[::1/v1', model: m}}\n", "expected an address"),
    "port-of-an-address": (BASE + "tools: [{mcp: {name: far, url: ▶'http://a:70000/mcp'}}]\n", "Port out of range"),
    "password-in-address": (
        BASE + "servers: {policy: {base_url: ▶'http://me:hunter2@host', model: m}}\n",
        "must not hold a password",
    ),
    "key-in-address": (
        BASE + "servers: {policy: {base_url: ▶'http://host/v1?v=2&api_key=hunter2', model: m}}\n",
        "must not hold a password, key or token",
    ),
    "key-in-address-of-mcp": (
        BASE + "tools: [{mcp: {name: far, url: ▶'https://mcp.example/mcp?exaApiKey=hunter2'}}]\n",
        "must not hold a password, key or token; use headers_env",
    ),
    "extra-body-exact": (
        BASE + "agent: {▶extra_body: {a: 1}}\nservers: {policy: {type: vllm, base_url: 'http://a', model: m}}\n",
        "chat servers",
    ),
    "env-unknown": (BASE + "atropos: {▶inference_wait: 2.0}\n", "did you mean `inference_weight`?"),
    "env-owned": (BASE + "atropos: {▶group_size: 8}\n", "`serve.group_size` or `process.group_size`"),
    "env-type": (BASE + "atropos: {batch_size: ▶big}\n", "expected an integer"),
    # secrets
    "secret-in-server": (
        BASE + "servers: {policy: {base_url: 'http://a', model: m, api_key: ▶hunter2}}\n",
        "a secret is written in `api_key`",
    ),
    "secret-in-headers": (
        BASE + "agent: {extra_body: {headers: {Authorization: ▶Bearer hunter2}}}\n",
        "a secret is written in `Authorization`",
    ),
    "secret-for-a-variable": (
        BASE + "servers: {policy: {base_url: 'http://a', model: m, headers_env: {Authorization: ▶Bearer hunter2}}}\n",
        "a secret is written in `Authorization`",
    ),
    "secret-for-a-variable-of-mcp": (
        BASE + "tools: [{mcp: {name: far, url: 'http://a', headers_env: {X-Api-Key: ▶sk-hunter2}}}]\n",
        "a secret is written in `X-Api-Key`",
    ),
    # extends
    "extends-missing": (BASE + "extends: ▶nowhere.yaml\n", "cannot be read: nowhere.yaml"),
    "extends-list": (BASE + "extends: ▶[a.yaml]\n", "the path of one parent"),
    "extends-itself": (BASE + "extends: ▶spec.yaml\n", "that is a cycle"),
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
