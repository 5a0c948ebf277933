"""Combinations of keys that are impossible, each as one small rule over the plain values.

Rules run also where types are wrong, so that all problems are reported at once. They pass over values that they cannot
read.
"""

from __future__ import annotations

import binascii
import difflib
import keyword
import math
import posixpath
import re
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.plugins import SANDBOXES, published
from hermes_rl.spec.deep_checks import DEEP_CHECKS
from hermes_rl.spec.flags import check_field
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.origin import Fault, check_address, entries, exactly_one, section
from hermes_rl.spec.paths import FILE_FORMATS, file_format
from hermes_rl.spec.section import is_template
from hermes_rl.spec.sections.rewards import INJECTED
from hermes_rl.spec.sections.sandbox import BACKENDS
from hermes_rl.spec.server_types import DEFAULT, SERVER_TYPES, ServerType, server_type
from hermes_rl.spec.suggest import choices
from hermes_rl.stop_reasons import INFRASTRUCTURE_FAILURES, POLICY_STOP_REASONS, RETRIES_EXHAUSTED
from hermes_rl.values import LARGEST_NUMBER, LONGEST_NAME

# --------------------------------------------------------------------------- Dataset, prompt, toolsets and tools


def _check_name(data: dict[str, Any]) -> Iterator[Fault]:
    name = data.get("name")
    if not isinstance(name, str):
        return
    parts = name.split("/")
    if len(name) > LONGEST_NAME or any(not part or part.startswith(".") for part in parts) or _NOT_IN_NAME.search(name):
        message = (
            f"`name` is a directory below outputs: its parts between `/` are not empty and do not start with a dot, "
            f"and it has no `\\` or control character and at most {LONGEST_NAME} characters"
        )
        yield Fault(("name",), message)


_NOT_IN_NAME = re.compile(r"[\\\x00-\x1f\x7f]")


SOURCES = ("path", "items", "generator", "harbor")
PATH_KEYS = ("name", "split", "data_files", "revision", "streaming")
"""Keys that say more about `path` and mean nothing without it."""


def _check_sources(data: dict[str, Any]) -> Iterator[Fault]:
    for path in (("dataset",), ("dataset", "fallback")):
        source = section(data, *path)
        if source or (isinstance(data.get("dataset"), dict) and path == ("dataset",)):
            yield from exactly_one(source, path, SOURCES, path[-1])
        for key in PATH_KEYS if "path" not in source else ():
            if key in source:
                yield Fault((*path, key), f"`{key}` goes with `path`", part="key")
        name = source.get("path")
        if isinstance(name, str) and name in FILE_FORMATS and "data_files" not in source:
            yield Fault((*path, "path"), f"`{name}` is a file format; name the files in `data_files`")
        elif isinstance(name, str) and (kind := file_format(name)) and "data_files" in source:
            message = f"`path` names a file already; leave one out, or write `path: {kind}`"
            yield Fault((*path, "data_files"), message, part="key")
        if source.get("items") == []:
            yield Fault((*path, "items"), "there must be at least one row")


def _check_fallback(data: dict[str, Any]) -> Iterator[Fault]:
    dataset = section(data, "dataset")
    if "fallback" in dataset and "path" not in dataset:
        yield Fault(("dataset", "fallback"), "a fallback is for a dataset on the hub; there is no `path`", part="key")
    for key in ("generator", "harbor"):
        if key in section(dataset, "fallback"):
            yield Fault(("dataset", "fallback", key), "a fallback is items or path", part="key")


def _check_eval(data: dict[str, Any]) -> Iterator[Fault]:
    dataset = section(data, "dataset")
    rows = section(dataset, "eval")
    path: NodePath = ("dataset", "eval")
    if isinstance(dataset.get("eval"), dict):
        yield from exactly_one(rows, path, ("split", "fraction", "only"), "eval")
    if "split" in rows and "items" in dataset:
        yield Fault((*path, "split"), "items have no splits; use {fraction: 0.1}")
    if isinstance(rows.get("split"), str) and rows["split"] == dataset.get("split", "train"):
        yield Fault((*path, "split"), "the rows of this split are trained on; name another one, or use fraction")
    if rows.get("only") is False:
        yield Fault((*path, "only"), "`only` is true or absent")


def _check_prompt(data: dict[str, Any]) -> Iterator[Fault]:
    prompt = data.get("prompt")
    if "prompt" not in data and "agents" not in data:
        yield Fault((), "missing key `prompt`")
    if not isinstance(prompt, dict):
        return
    opened = section(data, "user").get("speaks_first") is True or "agents" in data
    if not {"user", "messages"} & prompt.keys() and not opened:
        yield Fault(
            ("prompt",), "prompt needs `user` or `messages` (or a simulated user that speaks first)", part="key"
        )
    if prompt.get("messages") == []:
        yield Fault(("prompt", "messages"), "there must be at least one message")


def _check_parts(data: dict[str, Any]) -> Iterator[Fault]:
    """Report parts of prompts without exactly one kind, and parts that a server of the agent does not accept."""
    seats = [(path, section(seat)) for path, seat in entries(data, "agents")]
    prompts: dict[tuple[str, ...], list[dict[str, Any]]] = {("prompt",): [] if seats else [{}]}
    for path, seat in seats:
        prompts.setdefault((*map(str, path), "prompt") if "prompt" in seat else ("prompt",), []).append(seat)
    for prompt_path, played in prompts.items():
        roles = {
            str(role) for seat in played for role in (seat.get("server", "policy"), *(seat.get("opponents") or ()))
        }
        types = [str(section(server).get("type", DEFAULT)) for path, server in servers(data) if path[1] in roles]
        blind = [name for name in types if (kind := _known_type(name)) is not None and "image_url" not in kind.parts]
        contents: list[tuple[NodePath, Any]] = [
            ((*prompt_path, name), section(data, *prompt_path).get(name)) for name in ("system", "user")
        ]
        for path, message in entries(data, *prompt_path, "messages"):
            contents.append(((*path, "content"), section(message).get("content")))
        for path, content in contents:
            for index, part in enumerate(content if isinstance(content, list) else []):
                yield from exactly_one(part, (*path, index), ("text", "image", "image_url"), "a part")
                if blind and isinstance(part, dict) and {"image", "image_url"} & part.keys():
                    message = f"a server of type {blind[0]} cannot be sent pictures; one of type {DEFAULT} can"
                    yield Fault((*path, index), message)


_EXCLUSIVE = (
    ("prompt", "system", "messages"), ("prompt", "user", "messages"), ("toolsets", "distribution", "enabled"),
    ("toolsets", "replay", "record"),
)  # fmt: skip
"""Sections, and two keys of each that exclude each other."""


def _check_exclusive_keys(data: dict[str, Any]) -> Iterator[Fault]:
    for name, key, other in _EXCLUSIVE:
        if {key, other} <= section(data, name).keys():
            yield Fault((name, key), f"`{key}` and `{other}` exclude each other", part="key")


def tool_entries(data: dict[str, Any]) -> Iterator[tuple[NodePath, Any]]:
    """Yield the tools of the agent and of the simulated user."""
    yield from entries(data, "tools")
    yield from entries(data, "user", "tools")


def _check_tools(data: dict[str, Any]) -> Iterator[Fault]:
    for path, tool in tool_entries(data):
        yield from exactly_one(tool, path, ("python", "state", "mcp"), "a tool")
        tool = section(tool)
        if "state" in tool and "state" not in data:
            yield Fault((*path, "state"), "there is no `state:` in this spec to take tools from")
        function = tool.get("python")
        for index, name in enumerate(tool["ends_rollout"] if isinstance(tool.get("ends_rollout"), list) else ()):
            if isinstance(function, str) and function.rpartition(":")[2] not in (name, "*"):
                yield Fault((*path, "ends_rollout", index), f"the tool is named `{function.rpartition(':')[2]}`")
        if "schemas" in tool and "state" not in tool:
            yield Fault((*path, "schemas"), "`schemas` goes with `state`; other tools have schemas already", part="key")
        yield from _check_selection(path, tool)
        if "arguments" in tool and "mcp" in tool:
            yield Fault(
                (*path, "arguments"), "`arguments` goes with `python` or `state`; a server checks its own", part="key"
            )
        if "isolate" in tool and "python" not in tool:
            hint = "write it of `state:`" if "state" in tool else "a server runs in its own process"
            yield Fault((*path, "isolate"), f"`isolate` goes with `python`; {hint}", part="key")
        if "external" in tool and "python" not in tool:
            yield Fault((*path, "external"), "`external` goes with `python`; of other tools it is known", part="key")
        if isinstance(tool.get("mcp"), dict):
            yield from _check_mcp((*path, "mcp"), tool["mcp"])


def _check_selection(path: NodePath, tool: dict[str, Any]) -> Iterator[Fault]:
    """Report keys that select tools of an entry that does not allow a selection."""
    many = str(tool.get("python")).endswith(":*")
    for key in ("names", "decorated_with"):
        if key in tool and "state" not in tool and not many:
            hint = "use `allow`" if "mcp" in tool else "write file.py:* to choose among its functions"
            yield Fault((*path, key), f"`{key}` goes with `state`; {hint}", part="key")
    if many and is_template(tool.get("names")):
        yield Fault((*path, "names"), "the functions of a file are the same for each row: write a list")
    if "decorated_with" in tool and "schemas" in tool:
        yield Fault(
            (*path, "decorated_with"), "`schemas` describes tools, of which none is a function; use `names`", part="key"
        )


def _check_mcp(path: NodePath, server: dict[str, Any]) -> Iterator[Fault]:
    yield from exactly_one(server, path, ("command", "url"), "an MCP server")
    if "url" in server:
        yield from check_address((*path, "url"), server["url"], "headers_env")
        for key in ("files", "where", "env"):
            if key in server:
                yield Fault((*path, key), f"`{key}` is for a server started by `command`", part="key")
        return
    if server.get("scope") == "shared" and server.get("where", "sandbox") == "sandbox":
        yield Fault(
            (*path, "scope"), "a server in the rollout's sandbox cannot be shared; `where: host` can", part="key"
        )
    if "headers_env" in server:
        yield Fault((*path, "headers_env"), "`headers_env` is for a server at a `url`", part="key")


def _check_user(data: dict[str, Any]) -> Iterator[Fault]:
    user = section(data, "user")
    for key in ("state", "turns"):
        others = [
            each for each in ("turns", "server", "system", "stop", "tools", "transform") if each in user and each != key
        ]
        if key in user and others:
            yield Fault(("user", others[0]), f"`{others[0]}` is for another kind of user than `{key}`", part="key")
    for key in {"state", "transform"} & user.keys():
        if "state" not in data:
            yield Fault(("user", key), "there is no `state:` in this spec that could answer")
    if "user" not in data and "before_user_turn" in section(data, "state"):
        yield Fault(
            ("state", "before_user_turn"),
            "there is no `user:` in this spec between whose words it is called",
            part="key",
        )
    graded = any(section(reward).get("per_step") is not None for _, reward in entries(data, "rewards"))
    for path, turn in entries(data, "user", "turns"):
        if "min_reward" in section(turn) and not graded:
            yield Fault((*path, "min_reward"), "no reward looks at steps: give one `per_step: mean`", part="key")
        if "min_reward" in section(turn) and path[-1] == 0 and user.get("speaks_first") is True:
            yield Fault((*path, "min_reward"), "no step comes before the first words", part="key")
    if "turns" in user and "max_turns" in user:
        yield Fault(("user", "max_turns"), "`turns` has as many turns as there are words", part="key")


def _check_seats(data: dict[str, Any]) -> Iterator[Fault]:
    names = [str(path[-1]) for path, _ in entries(data, "agents")]
    if not names:
        if "schedule" in data:
            yield Fault(("schedule",), "`schedule` goes with `agents`, who speak", part="key")
        return
    if len(names) < 2:
        yield Fault(
            ("agents",), "an episode of `agents` has two seats at least; for one agent leave it out", part="key"
        )
    if "schedule" not in data:
        message = "missing key `schedule`: alternate, simultaneous, call, {fn: file.py:function} or {state: METHOD}"
        yield Fault(("agents",), message, part="key")
    for (*outer, key), reason in _OF_ONE_AGENT:
        if key in section(data, *outer):
            name = ".".join((*outer, key))
            yield Fault((*outer, key), f"`{name}` is for one agent; of several {reason}", part="key")
    for path, seat in entries(data, "agents"):
        yield from _check_seat(data, path, section(seat))
    seats = [section(seat) for _, seat in entries(data, "agents")]
    trained = {str(seat.get("server", "policy")) for seat in seats if seat.get("train") is not False}
    if trained - {"policy"} and "max_staleness" in section(data, "serve"):
        message = (
            "a seat of another server than `policy` is trained, whose versions of weights this bound does not know"
        )
        yield Fault(("serve", "max_staleness"), message, part="key")
    yield from _check_schedule(data, names)
    yield from _check_paid_seats(data, names)
    yield from _check_seat_prompts(data, names)


def asked_first(order: object, names: Sequence[str]) -> Sequence[str]:
    """Return the seats that speak before they have heard another, as far as `schedule` alone tells."""
    return names if order == "simultaneous" else names[:1] if order in ("alternate", "call") else ()


def _check_seat_prompts(data: dict[str, Any], names: list[str]) -> Iterator[Fault]:
    """Report a seat whose prompt replaces the spec's, but lacks its question."""
    if not {"user", "messages"} & section(data, "prompt").keys():
        return
    for name in asked_first(_speaking_order(data), names):
        seat_prompt = section(data, "agents", name, "prompt")
        if seat_prompt and not {"user", "messages"} & seat_prompt.keys():
            message = (
                "it replaces the spec's `prompt` completely, but has no first question for the seat: add a `user`, "
                "such as the spec's"
            )
            yield Fault(("agents", name, "prompt"), message, part="key")


def _user_of_seats(data: dict[str, Any]) -> Iterator[Fault]:
    first = next((str(path[-1]) for path, _ in entries(data, "agents")), None)
    if first is None or "user" not in data:
        return
    if _speaking_order(data) != "call":
        yield Fault(
            ("user",), "the first seat of `schedule: call` talks to a `user`; here the others answer", part="key"
        )
    elif "program" in section(data, "agents", first, "agent"):
        yield Fault(("user",), "a `user` needs the built-in loop, but the first seat runs an agent program", part="key")


def _speaking_order(data: dict[str, Any]) -> Any:
    """Return the speaking order of `schedule`, in either form."""
    play = data.get("schedule")
    return play if isinstance(play, str) else section(data, "schedule").get("order")


def _check_seat(data: dict[str, Any], path: NodePath, seat: dict[str, Any]) -> Iterator[Fault]:
    name, role, roles = str(path[-1]), seat.get("server", "policy"), section(data, "servers")
    if not _SEAT.fullmatch(name) or name in _TAKEN_SEATS:
        yield Fault(path, f"`{name}` cannot name a seat; use letters, digits and _, and not row or episode", part="key")
    if isinstance(role, str) and role not in (*roles, "policy"):
        yield Fault((*path, "server"), f"there is no server role `{role}`{choices(role, (*roles, 'policy'))}")
    yield from _check_opponents(path, seat, roles)
    if not section(data, "prompt") and not section(seat, "prompt"):
        yield Fault(path, "it has no prompt: give it one, or give the spec a `prompt` for all", part="key")


def _check_opponents(path: NodePath, seat: dict[str, Any], roles: dict[str, Any]) -> Iterator[Fault]:
    opponents = seat.get("opponents")
    if "opponent_sampling" in seat and not opponents:
        yield Fault((*path, "opponent_sampling"), "`opponent_sampling` goes with `opponents`", part="key")
    if not isinstance(opponents, list):
        return
    if "server" in seat:
        yield Fault((*path, "server"), "`opponents` are the servers of this seat; leave one of both out", part="key")
    if seat.get("train") is not False:
        yield Fault((*path, "opponents"), "opponents are not trained: write `train: false` too", part="key")
    for index, role in enumerate(opponents):
        if isinstance(role, str) and role not in (*roles, "policy"):
            yield Fault((*path, "opponents", index), f"there is no server role `{role}`{choices(role, roles)}")


_SEAT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_TAKEN_SEATS = ("row", "episode")
"""They name groups."""
_OF_ONE_AGENT: tuple[tuple[tuple[str, ...], str], ...] = (
    (("agent", "program"), "each seat with an agent program sets its own: `agents.NAME.agent.program`"),
    (("distill",), "a teacher does not know whose tokens it reads"),
)


def _check_schedule(data: dict[str, Any], names: list[str]) -> Iterator[Fault]:
    play = data.get("schedule")
    if isinstance(play, str):
        play = {"order": play}
    if not isinstance(play, dict):
        return
    yield from exactly_one(play, ("schedule",), ("order", "fn", "state"), "schedule")
    if "rounds" in play and play.get("order") not in ("alternate", "simultaneous"):
        yield Fault(("schedule", "rounds"), "`rounds` goes with `order: alternate` or `simultaneous`", part="key")
    if "state" in play and "state" not in data:
        yield Fault(("schedule", "state"), "this spec has no `state:` that could select the next seat")
    for path, seat in entries(data, "agents"):
        if "message_template" in section(seat) and play.get("order") not in ("alternate", "simultaneous"):
            yield Fault(
                (*path, "message_template"),
                "`message_template` goes with `schedule: alternate` or `simultaneous`",
                part="key",
            )
        if "description" in section(seat) and (play.get("order") != "call" or str(path[-1]) == names[0]):
            message = "`description` is for a seat that another one calls: all but the first, with `schedule: call`"
            yield Fault((*path, "description"), message, part="key")


def _check_paid_seats(data: dict[str, Any], names: list[str]) -> Iterator[Fault]:
    """Find fault with the seats that rewards and turns of the solution name."""
    for path, reward in entries(data, "rewards"):
        seats = section(reward).get("seats")
        if isinstance(seats, dict) and section(reward).get("gate") is True:
            yield Fault((*path, "seats"), "a gate has no factors per seat; name its seats in a list")
        if seats == [] or seats == {}:
            yield Fault((*path, "seats"), "a reward pays one seat at least; leave `seats` out to pay all")
        for index, name in enumerate(seats if isinstance(seats, list | dict) else ()):
            if isinstance(name, str) and name not in names:
                message = f"there is no seat `{name}`{choices(name, names)}"
                is_list = isinstance(seats, list)
                seat_path = (*path, "seats", index if is_list else name)
                yield Fault(seat_path, message) if is_list else Fault(seat_path, message, part="key")
    for path, turn in entries(data, "solution", "turns"):
        seat = section(turn).get("seat")
        if isinstance(seat, str) and not is_template(seat) and seat not in names:
            yield Fault((*path, "seat"), f"there is no seat `{seat}`{choices(seat, names)}")


def _without_seats(data: dict[str, Any]) -> Iterator[Fault]:
    if "agents" in data:
        return
    for path, reward in entries(data, "rewards"):
        if "seats" in section(reward):
            yield Fault((*path, "seats"), "there are no `agents:` in this spec that it could pay", part="key")
    for path, turn in entries(data, "solution", "turns"):
        if "seat" in section(turn):
            yield Fault((*path, "seat"), "there are no `agents:` in this spec", part="key")


def _check_per_step(data: dict[str, Any]) -> Iterator[Fault]:
    for path, reward in entries(data, "rewards"):
        if section(reward).get("per_step") is None:
            continue
        if "turns" not in section(data, "user"):
            yield Fault(
                (*path, "per_step"), "steps are the words of `user: {turns: […]}`, which is not there", part="key"
            )
        if "agents" in data:
            yield Fault((*path, "per_step"), "only rollouts of a single agent are graded per step", part="key")
        if section(reward).get("sandbox") == "fresh":
            yield Fault((*path, "sandbox"), "a reward per step uses the rollout's sandbox; remove `sandbox`")


COPIED = ("bubblewrap", "docker", "none")
"""Backends whose sandboxes can be copied."""


def no_copies(backend: str, keep_processes: bool = False, services: bool = False) -> str | None:
    """Return the reason why such a sandbox cannot be copied, with a fix, or None if it can."""
    obstacles = {
        f"the files of the sandbox backend {backend} cannot be copied; use bubblewrap or docker": backend not in COPIED,
        "processes cannot be copied; remove sandbox.keep_processes": keep_processes,
        "services cannot be copied; remove sandbox.services": services,
    }
    problem = next((problem for problem, applies in obstacles.items() if applies), None)
    return None if problem is None else f"between steps rewards look at a copy of the sandbox, and {problem}"


def _tool_names(data: dict[str, Any]) -> Iterator[Fault]:
    for owner in (("tools",), ("user", "tools")):
        taken_names: dict[str, str] = {}
        for path, tool in entries(data, *owner):
            python, server = section(tool).get("python"), section(tool, "mcp").get("name")
            names = {"python": python.rpartition(":")[2] if isinstance(python, str) else None, "mcp": server}
            for kind, name in names.items():
                if not isinstance(name, str) or not isinstance(path[-1], int) or name == "*":
                    continue
                tool_label = f"{kind} number {path[-1] + 1}"
                if (first_label := taken_names.setdefault(name, tool_label)) != tool_label:
                    yield Fault(
                        (*path, kind), f"the name `{name}` is taken by {first_label}; tools need different names"
                    )


DATA_RULES = (
    _check_name, _check_sources, _check_fallback, _check_eval, _check_prompt, _check_parts, _check_exclusive_keys,
    _check_tools, _check_user, _check_per_step, _check_seats, _user_of_seats, _without_seats, _tool_names,
)  # fmt: skip


# ------------------------------------------------------------ Agent, rewards, stop reasons, solution and servers

SCRIPTED_ONLY = ("error_rate", "seed")
REAL_ONLY = ("base_url", "api_key_env", "headers_env")
"""Keys of a server that scripted ones alone have, and that they alone do not have."""


def _check_reasoning(data: dict[str, Any]) -> Iterator[Fault]:
    for path in (("agent",), ("evaluate", "agent")):
        if "reasoning" in section(data, *path):
            reasoning = section(data, *path)["reasoning"]
            yield from exactly_one(reasoning, (*path, "reasoning"), ("effort", "max_tokens"), "reasoning")


def _extra_body(data: dict[str, Any]) -> Iterator[Fault]:
    types = [str(section(server).get("type", DEFAULT)) for path, server in servers(data) if path[1] == "policy"]
    exact = [name for name in types if (kind := _known_type(name)) is not None and kind.token_level]
    for path in (("agent", "extra_body"), ("evaluate", "agent", "extra_body")):
        if exact and section(data, *path):
            yield Fault(path, f"extra_body is for chat servers; the policy's type is {exact[0]}", part="key")


def _check_rewards(data: dict[str, Any]) -> Iterator[Fault]:
    for path, reward in entries(data, "rewards"):
        if not isinstance(reward, dict):
            continue
        if reward.get("gate") is True and "weight" in reward:
            yield Fault((*path, "weight"), "a gate multiplies the score; it has no weight", part="key")
        fn = reward.get("fn", "")
        if isinstance(fn, str) and fn.partition(":")[0].endswith(".py") and not fn.rpartition(":")[2].isidentifier():
            yield Fault((*path, "fn"), "expected file.py:function")


def _check_judges(data: dict[str, Any]) -> Iterator[Fault]:
    """Find fault with judges by a rubric that have what goes with assertions, and the other way round."""
    for path, reward in entries(data, "rewards"):
        args = section(reward).get("args", {})
        if section(reward).get("fn", path[-1]) != "llm_judge" or not isinstance(args, dict):
            continue
        yield from exactly_one(args, (*path, "args") if args else path, ("rubric", "assertions"), "a judge")
        for key, other in (("need", "rubric"), ("calibrate", "assertions"), ("scale", "assertions")):
            if key in args and other in args:
                yield Fault((*path, "args", key), f"`{key}` has no effect together with `{other}`", part="key")


def _check_gold_replays(data: dict[str, Any]) -> Iterator[Fault]:
    """Report rewards that repeat the gold tool calls in a spec without a state, or without gold."""
    for path, reward in entries(data, "rewards"):
        if section(reward).get("fn", path[-1]) != "state_matches":
            continue
        if "state" not in data:
            yield Fault(path, "there is no `state:` in this spec that could match", part="key")
        if "turns" not in section(data, "solution") and "gold" not in section(section(reward).get("args")):
            yield Fault(path, "`solution` has no turns for this reward; add them or set `args.gold`", part="key")


def _check_code(data: dict[str, Any]) -> Iterator[Fault]:
    references: list[tuple[NodePath, Any]] = [
        (("dataset", "generator"), section(data, "dataset").get("generator")),
        (("schedule", "fn"), section(data, "schedule").get("fn")),
        (("state",), data.get("state")),
        (("state", "python"), section(data, "state").get("python")),
    ]
    references += [((*path, "python"), section(tool).get("python")) for path, tool in tool_entries(data)]
    for path, reference in references:
        if isinstance(reference, str):
            file, _, name = reference.rpartition(":")
            if not file.endswith(".py") or not (name.isidentifier() or (name == "*" and "tools" in path)):
                kind = "Class" if path[0] == "state" else "function"
                yield Fault(path, f"expected file.py:{kind}")


def _check_bounds(data: dict[str, Any]) -> Iterator[Fault]:
    pairs: list[tuple[NodePath, Any]] = [(("score", "clamp"), section(data, "score").get("clamp"))]
    pairs += [((*path, "range"), section(reward).get("range")) for path, reward in entries(data, "rewards")]
    for path, pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(bound, int | float) for bound in pair):
            continue
        if any(LARGEST_NUMBER < abs(bound) < math.inf for bound in pair):
            yield Fault(path, f"expected two numbers within ±{LARGEST_NUMBER:g}")
        elif pair[0] >= pair[1]:
            yield Fault(path, "the first bound must be lower than the second")
        elif section(data, *map(str, path[:2])).get("gate") is True and not (pair[0] >= 0 and pair[1] <= 1):
            yield Fault(path, "a gate multiplies the score, so its range must lie within [0, 1]")


def _stop_reasons(data: dict[str, Any]) -> Iterator[Fault]:
    infrastructure_failures, stop_reasons = (
        set(map(str, INFRASTRUCTURE_FAILURES)),
        [*map(str, POLICY_STOP_REASONS), RETRIES_EXHAUSTED],
    )
    for path, policy in entries(data, "on_stop"):
        name = str(path[-1])
        if name == RETRIES_EXHAUSTED:
            if policy not in ("drop", "worst"):
                yield Fault(path, "a rollout whose retries are exhausted has no score: expected drop or worst")
        elif policy == "worst":
            yield Fault(path, f"`worst` is for `{RETRIES_EXHAUSTED}`: expected grade, mask, drop, or a number as score")
        elif name in infrastructure_failures:
            yield Fault(path, f"`{name}` is an infrastructure failure, which is never graded", part="key")
        elif name not in stop_reasons:
            yield Fault(path, f"there is no stop reason `{name}`{choices(name, stop_reasons)}", part="key")


def _check_checks(data: dict[str, Any]) -> Iterator[Fault]:
    for path, _ in entries(data, "checks"):
        name = str(path[-1])
        if name not in DEEP_CHECKS:
            yield Fault(path, f"`validate --deep` has no check `{name}`{choices(name, DEEP_CHECKS)}", part="key")


def _check_programs(data: dict[str, Any]) -> Iterator[Fault]:
    if "program" in section(data, "evaluate", "agent"):
        yield Fault(("evaluate", "agent", "program"), "training and evaluation use the same agent program", part="key")
    seats = [("agents", str(path[-1])) for path, _ in entries(data, "agents")]
    if not seats:
        yield from _check_program(data, ("agent",), (("toolsets",), ("tools",), ("user",)))
    for path in seats:
        # The spec's tools are other seats' too.
        yield from _check_program(data, (*path, "agent"), ((*path, "tools"),))
    program = section(data, *seats[0], "agent", "program") if seats else {}
    if _speaking_order(data) == "call" and program and "tools" not in program:
        message = "the others are its tools, and it is offered none: write `tools: mcp`"
        yield Fault((*seats[0], "agent", "program"), message, part="key")


def _check_program(data: dict[str, Any], agent: tuple[str, ...], of_loop: Sequence[tuple[str, ...]]) -> Iterator[Fault]:
    """Report faults of an agent's program; `of_loop` are paths outside the agent that only the built-in loop uses."""
    if "program" not in section(data, *agent):
        return
    program_path = (*agent, "program")
    program = section(data, *program_path)
    for path in (*of_loop, (*agent, "reasoning"), (*agent, "repair_arguments")):
        offered = path[-1] in ("tools", "toolsets")
        if path == ("user",) and is_template(section(data, "user").get("turns")):
            continue  # rows without further user messages can run
        if path[-1] in section(data, *path[:-1]) and not (offered and "tools" in program):
            hint = f"; `{'.'.join(program_path)}.tools: mcp` offers them to it" if offered else ""
            yield Fault(path, f"`{'.'.join(path)}` is for the loop; an agent program has its own{hint}", part="key")
    yield from _check_program_start(program_path, section(data, *agent)["program"])
    if "python" in program:
        return  # it lives outside of the sandbox
    backend = section(data, "sandbox").get("backend", "bubblewrap")
    if isinstance(backend, str) and backend in BACKENDS and backend not in ("bubblewrap", "docker"):
        message = f"backend {backend} has no separate network, which an agent program needs to reach the model"
        yield Fault(program_path, f"{message}; use bubblewrap or docker", part="key")
    elif section(data, "sandbox").get("network") is True:
        yield Fault(
            ("sandbox", "network"),
            "an agent program needs a separate network for the model: list the hosts",
            part="key",
        )


def _check_program_start(program_path: NodePath, program: Any) -> Iterator[Fault]:
    """Find fault with how a program is started: by a command in the sandbox, or as a function outside of it."""
    if isinstance(program, dict) and not program.get("command") and "python" not in program:
        alternatives = "a `command`, a `python` function, or the `recipe` that has one"
        yield Fault(program_path, f"a program needs {alternatives}", part="key")
    elif isinstance(program, dict):
        yield from exactly_one(program, program_path, ("command", "python"), "a program")
        for key in ("env", "files") if "python" in program else ():
            if key in program:
                yield Fault((*program_path, key), f"`{key}` goes with `command`", part="key")


def _check_solution(data: dict[str, Any]) -> Iterator[Fault]:
    for path, _ in entries(data, "solution"):
        name = str(path[-1])
        if name not in ("turns", "patch") and difflib.get_close_matches(name, ["turns", "patch"], cutoff=0.75):
            yield Fault(path, f"unknown key `{name}`{choices(name, ['turns', 'patch'])}", part="key")
    for path, turn in entries(data, "solution", "turns"):
        if isinstance(turn, dict) and not {"tools", "say", "user", "user_tools"} & turn.keys():
            yield Fault(path, "a turn needs `tools`, `say`, or the `user` that answers", part="key")


def servers(data: dict[str, Any]) -> Iterator[tuple[NodePath, Any]]:
    """Yield every server with its path, whether its role has one or a list."""
    for path, role in entries(data, "servers"):
        if isinstance(role, list):
            yield from (((*path, index), server) for index, server in enumerate(role))
        else:
            yield path, role


def _check_roles(data: dict[str, Any]) -> Iterator[Fault]:
    for path, role_servers in entries(data, "servers"):
        role = str(path[-1])
        if role_servers == []:
            yield Fault(path, "there must be at least one server")
        if not role.isidentifier() or keyword.iskeyword(role) or role in INJECTED:
            message = f"`{role}` cannot be a role: rewards name it as a parameter"
            yield Fault(path, message, part="key")
    for part, default in (("user", "user"), ("distill", "teacher")):
        if part == "user" and {"state", "turns"} & section(data, "user").keys():
            continue
        role = section(data, part).get("server", default)
        if isinstance(data.get(part), dict) and isinstance(role, str) and role not in section(data, "servers"):
            message = f"there is no server role `{role}`{choices(role, section(data, 'servers'))}"
            yield Fault((part, "server"), message) if "server" in data[part] else Fault((part,), message, part="key")


def _check_teacher(data: dict[str, Any]) -> Iterator[Fault]:
    """Report a teacher whose servers do not return log-probabilities of given tokens."""
    role = section(data, "distill").get("server", "teacher")
    for path, server in servers(data) if isinstance(data.get("distill"), dict) else ():
        name = str(section(server).get("type", DEFAULT))
        kind = _known_type(name)
        if path[1] == role and kind is not None and not kind.exact:
            message = (
                f"a teacher must be a token-level server; type {name} returns no log-probabilities of given tokens"
            )
            yield Fault((*path, "type"), message) if "type" in section(server) else Fault(path, message, part="key")


ASKING = {"reward_model": "reward_model", "llm_judge": "judge", "llm_pairwise": "judge"}
"""Shipped rewards that ask a server, and the role that they ask if `args.server` names none."""


def _check_reward_models(data: dict[str, Any]) -> Iterator[Fault]:
    """Report reward models used for generation, and rewards that need ratings or text from a server that has none."""
    kinds: dict[str, list[ServerType]] = {}
    speaking = {"policy", str(section(data, "user").get("server", "user" if "user" in data else "policy"))}
    for _, seat in entries(data, "agents"):
        seat = section(seat)
        speaking |= {str(seat.get("server", "policy")), *map(str, seat.get("opponents") or ())}
    for path, server in servers(data):
        name = str(section(server).get("type", DEFAULT))
        if (kind := _known_type(name)) is None:
            continue
        kinds.setdefault(str(path[1]), []).append(kind)
        if kind.rates and path[1] in speaking:
            yield Fault((*path, "type"), f"a server of type {name} is a reward model, which says nothing")
    for path, reward in entries(data, "rewards"):
        args, fn = section(section(reward).get("args")), str(section(reward).get("fn", path[-1]))
        role, has_server = args.get("server", ASKING.get(fn)), "server" in args
        server_path = (*path, "args", "server") if has_server else path
        if fn not in ASKING or not isinstance(role, str) or role not in kinds:
            continue
        if fn == "reward_model" and not all(kind.rates or kind.embedded for kind in kinds[role]):
            types = " or ".join(name for name, kind in SERVER_TYPES.items() if kind.rates)
            yield Fault(
                server_path,
                f"`{role}` is not a reward model; expected type {types}",
                part="value" if has_server else "key",
            )
        elif fn != "reward_model" and any(kind.rates for kind in kinds[role]):
            message = f"`{role}` is a reward model, which says nothing; `reward_model` takes its number"
            yield Fault(server_path, message, part="value" if has_server else "key")


def _find_missing_servers(data: dict[str, Any]) -> Iterator[Fault]:
    """Find fault with shipped rewards that ask a server that does not exist."""
    server_roles = section(data, "servers")
    for path, reward in entries(data, "rewards"):
        fn, args = str(section(reward).get("fn", path[-1])), section(section(reward).get("args"))
        if fn not in ASKING:
            continue
        role = args.get("server", ASKING[fn])
        for each in role if isinstance(role, list) else [role]:
            if not isinstance(each, str) or is_template(each) or each in server_roles:
                continue
            if "server" in args:
                yield Fault((*path, "args", "server"), f"there is no server role `{each}`{choices(each, server_roles)}")
            else:
                message = f"there is no server role `{each}`; add servers.{each}, or name another with `args.server`"
                yield Fault(path, message, part="key")


def _check_servers(data: dict[str, Any]) -> Iterator[Fault]:
    for path, server in servers(data):
        if not isinstance(server, dict):
            continue
        name = str(server.get("type", DEFAULT))
        kind = _known_type(name)
        if kind is None:
            continue
        for key in REAL_ONLY if kind.embedded else SCRIPTED_ONLY:
            if key in server:
                yield Fault((*path, key), f"`{key}` has no meaning for type {name}", part="key")
        for key in kind.needs:
            if key not in server:
                yield Fault(path, f"missing key `{key}`", part="key")


def _known_type(name: str) -> ServerType | None:
    """Return the properties of a server type, or None for an unknown type, which another check reports."""
    try:
        return server_type(name)
    except UserError:
        return None


def _check_urls(data: dict[str, Any]) -> Iterator[Fault]:
    urls = [((*path, "base_url"), section(server).get("base_url")) for path, server in servers(data)]
    urls.append((("serve", "api_url"), section(data, "serve").get("api_url")))
    for path, url in urls:
        yield from check_address(path, url, "api_key_env or headers_env")


def _check_atropos(data: dict[str, Any]) -> Iterator[Fault]:
    for path, value in entries(data, "atropos"):
        for message, part in check_field(str(path[-1]), value):
            yield Fault(path, message, part="key" if part == "key" else "value")


def _check_process(data: dict[str, Any]) -> Iterator[Fault]:
    process = section(data.get("process"))
    for key in ("min_score", "keep_best"):
        if process.get(key) is not None and (form := process.get("format", "atropos")) in ("atropos", "dpo", "kto"):
            yield Fault(("process", key), f"`{key}` chooses rollouts for formats other than `{form}`", part="key")
    if process.get("format") == "dpo" and process.get("group_size") == 1:
        yield Fault(("process", "group_size"), "`format: dpo` pairs two rollouts of a group: write 2 or more")


RUN_RULES = (
    _check_process, _check_reasoning, _extra_body, _check_rewards, _check_judges, _check_gold_replays, _check_code,
    _check_bounds, _stop_reasons, _check_checks, _check_programs, _check_solution, _check_roles, _check_teacher,
    _check_reward_models, _find_missing_servers, _check_servers, _check_urls, _check_atropos,
)  # fmt: skip


# ----------------------------------------------------------------------------- Sandbox, its files, and artifacts


def _check_backend(data: dict[str, Any]) -> Iterator[Fault]:
    name = section(data, "sandbox").get("backend")
    if not isinstance(name, str) or name in BACKENDS:
        return
    backend_names = [*BACKENDS, *published(SANDBOXES, "sandbox backend", BACKENDS)]
    if name not in backend_names:
        yield Fault(("sandbox", "backend"), f"there is no backend `{name}`{choices(name, backend_names)}")


def _bare_machine(data: dict[str, Any]) -> Iterator[Fault]:
    sandbox = section(data, "sandbox")
    if sandbox.get("backend") != "none":
        return
    if "image" in sandbox:
        yield Fault(("sandbox", "image"), "the backend `none` has no images", part="key")
    limits = section(sandbox, "limits")
    if limits.get("best_effort") is True:
        return
    for key in limits:
        if key != "best_effort":
            message = f"the backend `none` cannot enforce `{key}`; set best_effort: true to go without"
            yield Fault(("sandbox", "limits", key), message, part="key")


def _check_packages(data: dict[str, Any]) -> Iterator[Fault]:
    """Report package directories of the host for backends that cannot mount them; backend `none` uses the host's
    packages."""
    sandbox = section(data, "sandbox")
    backend = sandbox.get("backend", "bubblewrap")
    if backend in ("bubblewrap", "docker"):
        return
    if backend == "none":
        hint = "the backend `none` is this machine itself: install them here"
    else:
        hint = f"the backend `{backend}` does not see this machine's folders: install them in the image, or in `setup`"
    for key in {"python", "npm"} & sandbox.keys():
        yield Fault(("sandbox", key), f"`{key}` is for bubblewrap and docker; {hint}", part="key")


def _check_services(data: dict[str, Any]) -> Iterator[Fault]:
    sandbox = section(data, "sandbox")
    backend = sandbox.get("backend", "bubblewrap")
    if backend in BACKENDS and backend != "docker" and section(sandbox, "services"):
        message = f"the backend `{backend}` starts no `services`; docker does, or start the program in `setup`"
        yield Fault(("sandbox", "services"), message, part="key")


def _check_ssh(data: dict[str, Any]) -> Iterator[Fault]:
    sandbox = section(data, "sandbox")
    backend = sandbox.get("backend", "bubblewrap")
    if "ssh" in sandbox and backend != "ssh":
        yield Fault(("sandbox", "ssh"), f"`ssh` is for `backend: ssh`; the backend is `{backend}`", part="key")


def file_lists(data: dict[str, Any]) -> Iterator[tuple[NodePath, list[Any]]]:
    """Yield all lists of files, each with its path."""
    lists: list[tuple[NodePath, Any]] = [(("sandbox", "files"), section(data, "sandbox").get("files"))]
    for path, service in entries(data, "sandbox", "services"):
        lists.append(((*path, "files"), service.get("files") if isinstance(service, dict) else None))
    lists += [(("agent", "program", "files"), section(data, "agent", "program").get("files"))]
    for path, seat in entries(data, "agents"):
        lists.append(((*path, "agent", "program", "files"), section(seat, "agent", "program").get("files")))
    lists += [((*path, "mcp", "files"), section(tool, "mcp").get("files")) for path, tool in tool_entries(data)]
    lists += [((*path, "files"), section(turn).get("files")) for path, turn in entries(data, "user", "turns")]
    yield from ((path, files) for path, files in lists if isinstance(files, list))


def _check_files(data: dict[str, Any]) -> Iterator[Fault]:
    for path, files in file_lists(data):
        targets: dict[str, int] = {}
        for index, file in enumerate(files):
            entry_path = (*path, index)
            yield from exactly_one(file, entry_path, ("content", "from", "base64"), "a file")
            encoded, target = section(file).get("base64"), section(file).get("to")
            if isinstance(encoded, str) and not is_template(encoded):
                try:
                    b64decode("".join(encoded.split()), validate=True)
                except (binascii.Error, ValueError):
                    yield Fault((*entry_path, "base64"), "this is not base64")
            if not isinstance(target, str) or is_template(target):
                continue
            first = targets.setdefault(posixpath.normpath(target), index)
            if first != index:
                yield Fault((*entry_path, "to"), f"file number {first + 1} is put at `{target}` already")


def sources_below(data: dict[str, Any], folder_of: Callable[[NodePath], Path]) -> Iterator[Fault]:
    """Yield a fault where a file's source is not below the folder of the file that names it, after symlinks."""
    for path, files in file_lists(data):
        for index, file in enumerate(files):
            source = section(file).get("from")
            source_path = (*path, index, "from")
            if isinstance(source, str) and not is_template(source) and not is_below(source, folder_of(source_path)):
                yield Fault(source_path, "`from` must stay below the folder of the spec, symlinks included")


def is_below(source: str, folder: Path) -> bool:
    """Return True where a path, relative ones from `folder`, leads below `folder` after symlinks."""
    top = folder.resolve()
    return (top / source).resolve().is_relative_to(top)


def _check_artifacts(data: dict[str, Any]) -> Iterator[Fault]:
    for path, artifact in entries(data, "artifacts"):
        yield from exactly_one(artifact, path, ("path", "command"), "an artifact")
    names = [str(path[-1]) for path, _ in entries(data, "artifacts")]
    for path, reward in entries(data, "rewards"):
        if section(reward).get("fn", path[-1]) == "tests_pass":
            args = section(section(reward).get("args"))
            applied = args.get("apply")
            if isinstance(applied, str) and not is_template(applied) and applied not in names:
                yield Fault((*path, "args", "apply"), f"there is no artifact `{applied}`{choices(applied, names)}")
            if args.get("reference") == "solution" and not {"turns", "patch"} & section(data.get("solution")).keys():
                yield Fault((*path, "args", "reference"), "the spec has no `solution` with `turns` or a `patch`")


SANDBOX_RULES = (
    _check_backend,
    _bare_machine,
    _check_packages,
    _check_services,
    _check_ssh,
    _check_files,
    _check_artifacts,
)


# ----------------------------------------------------------------------------------------------------- All rules

FolderOf = Callable[[NodePath], Path]


def broken_rules(data: dict[str, Any], folder_of: FolderOf | None) -> Iterator[Fault]:
    """Yield every fault of a spec's plain values."""
    for rule in (*DATA_RULES, *SANDBOX_RULES, *RUN_RULES):
        yield from rule(data)
    if folder_of is not None:
        yield from sources_below(data, folder_of)
