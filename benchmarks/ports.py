"""What a turn of a port costs, and of the original's own runner: both ask one server, which plays the gold turns.

    python benchmarks/ports.py [--tau2 PYTHON] [--bfcl PYTHON] [--repetitions N]

Each contender is a program of its own: `tau2 run` and `hermes-rl run tau2-airline evaluate`; a pool of threads over
BFCL's own handler of chat completions with its checker behind it, and `hermes-rl run bfcl evaluate`. The server, in a
process of its own, knows each row by what its user says and answers as a perfect agent would, so that both make the
same calls. Measured is the processor time of a contender with all processes that it starts. It is played with few rows
and with many: the difference, divided by the difference in turns (model calls of the agent), is what a turn costs,
without start and imports. Ratios are formed within each repetition; shown are the median and the range.

`--tau2` names an interpreter that has τ²-bench and this package, whose data `TAU2_DATA_DIR` names; `--bfcl` one that
has BFCL's package and this one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import machine, say, spread, table

ROOT = Path(__file__).resolve().parents[1]
AT_A_TIME = 4
SIZES = {"tau2": (4, 20), "bfcl": (80, 200)}
"""Rows of the shorter and of the longer run."""
MARK = re.compile(r"\(task (.+?)\)")
STOP = "###STOP###"
Turns = list[dict[str, Any]]


# ------------------------------------------------------------------------ The rows' gold turns, and who is asked what


def scripts(name: str) -> dict[str, Any]:
    """What the server plays: `agent`, turns by what a user says first, and `user`, words by their system prompt."""
    sys.path.insert(0, str(ROOT / "specs" / name))
    import world

    agent: dict[str, Turns] = {}
    user: dict[str, list[str]] = {}
    if name == "bfcl":
        for row in world.entries(seed=0, split="eval"):
            if row["kind"] == "base":
                agent[row["says"][0]["say"]] = row["gold"]
    else:
        for row in world.airline(seed=0, split="test"):
            agent[row["id"]] = [{key: turn[key] for key in ("tools", "say") if key in turn} for turn in row["gold"][1:]]
            user[row["user_system"]] = [f"Hello. (task {row['id']})", STOP]
    return {"agent": agent, "user": user}


def serve(file: str) -> None:
    """Answer chat completions from the scripts in a file; the address is printed, and `/turns` counts the agent's."""
    from aiohttp import web

    played = json.loads(Path(file).read_text("utf-8"))
    turns = [0]

    def text_of(message: dict[str, Any]) -> str:
        content = message.get("content")
        return content if isinstance(content, str) else "".join(part["text"] for part in content or ())

    async def answer(request: web.Request) -> web.Response:
        messages = (await request.json())["messages"]
        turn_index = sum(message["role"] == "assistant" for message in messages)
        user_texts = played["user"].get(text_of(messages[0]))
        if user_texts is not None:
            turn: dict[str, Any] = {"say": user_texts[min(turn_index, len(user_texts) - 1)]}
        else:
            turns[0] += 1
            first = next(text_of(message) for message in messages if message["role"] == "user")
            marked = MARK.search(first)
            script = played["agent"][marked[1] if marked else first]
            index = turn_index - (1 if marked else 0)  # the greeting is none of its turns
            turn = script[index] if index < len(script) else {"say": "That was all."}
        message = {"role": "assistant", "content": turn.get("say")}
        if turn.get("tools"):
            message["tool_calls"] = [
                {
                    "id": f"call{turn_index}-{index}",
                    "type": "function",
                    "function": {"name": call["name"], "arguments": json.dumps(call["args"])},
                }
                for index, call in enumerate(turn["tools"])
            ]
        reason = "tool_calls" if turn.get("tools") else "stop"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "scripted", "usage": usage}
        return web.json_response({**body, "choices": [{"index": 0, "message": message, "finish_reason": reason}]})

    async def counted(request: web.Request) -> web.Response:
        count, turns[0] = turns[0], 0
        return web.json_response(count)

    async def run() -> None:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes([web.post("/v1/chat/completions", answer), web.get("/turns", counted)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        say(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    asyncio.run(run())


# ---------------------------------------------------------------------------------------------------- The contenders


def bfcl_itself(count: int) -> None:
    """BFCL's handler and checker over the first rows, in threads as its own command has them."""
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
    from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler
    from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry

    entries = load_dataset_entry("multi_turn_base")[:count]
    truths = {row["id"]: row["ground_truth"] for row in load_ground_truth_entry("multi_turn_base")}
    handler = OpenAICompletionsHandler("scripted", 0.0, "scripted-FC", True)

    def score(entry: dict[str, Any]) -> bool:
        test_entry = {key: entry[key] for key in ("id", "initial_config", "involved_classes")}
        replies, _ = handler.inference(entry, include_input_log=False, exclude_state_log=True)
        turns = [[decoded for step in turn if (decoded := decoded_of(step))] for turn in replies]
        return bool(multi_turn_checker(turns, truths[entry["id"]], test_entry, "multi_turn_base", "checked")["valid"])

    def decoded_of(step: Any) -> list[str]:
        try:
            return list(handler.decode_execute(step, has_tool_call_tag=False))
        except Exception:  # noqa: BLE001 - words are no calls, which its own evaluation finds out like this
            return []

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        right = sum(pool.map(score, entries))
    assert right > 0.9 * count, f"{right} of {count} entries are right"  # its threads share the worlds' modules


def command(name: str, is_hermes: bool, python: str, address: str, count: int, folder: str) -> list[str]:
    """The program of a contender."""
    if is_hermes:
        spec = "tau2-airline" if name == "tau2" else "bfcl"
        server = f"{{type: openai, base_url: '{address}/v1', model: scripted}}"
        settings = [f"servers.policy={server}", f"evaluate.limit={count}", f"evaluate.concurrency={AT_A_TIME}"]
        settings += [f"servers.user={server}"] if name == "tau2" else ["dataset.filter=kind == 'base'"]
        sets = [word for each in settings for word in ("--set", each)]
        return [python, "-m", "hermes_rl.cli.main", "run", spec, "evaluate", "--quiet", "--out", folder, *sets]
    if name == "bfcl":
        return [python, __file__, "--itself", str(count)]
    models = [word for role in ("agent", "user") for word in (f"--{role}-llm", "openai/scripted")]
    rest = ["--domain", "airline", "--task-split-name", "test", "--num-tasks", str(count), "--log-level", "ERROR"]
    return [python, "-m", "tau2.cli", "run", *models, *rest, "--max-concurrency", str(AT_A_TIME), "--save-to", "run"]


def processor_time(argv: Sequence[str], address: str, folder: Path) -> float:
    """Seconds of processor time of a program with all that it starts, which has to succeed."""
    api_settings = {"OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_BASE": f"{address}/v1", "OPENAI_API_KEY": "none"}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, **api_settings, "PYTHONPATH": paths, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    if data := os.environ.get("TAU2_DATA_DIR"):
        environ["TAU2_DATA_DIR"] = str(data_beside(Path(data), folder))
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(argv, env=environ, stdout=output, stderr=output)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit((folder / "output").read_text("utf-8", "replace")[-4000:])
    return used.ru_utime + used.ru_stime


def data_beside(data: Path, folder: Path) -> Path:
    """A folder with the original's data, into which it may write its results."""
    target = folder / "data"
    target.mkdir()
    for part in data.iterdir():
        if part.name != "simulations":
            (target / part.name).symlink_to(part.resolve())
    return target


@contextmanager
def server(name: str, python: str) -> Any:
    """The address of a server that plays the gold turns of a port."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scripts.json"
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        result = subprocess.run(
            [python, __file__, "--scripts", name], env=environ, capture_output=True, text=True, check=True
        )
        file.write_text(result.stdout.splitlines()[-1], "utf-8")
        process = subprocess.Popen([sys.executable, __file__, "--serve", str(file)], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait()


def measured(name: str, is_hermes: bool, python: str, address: str) -> tuple[float, int]:
    """Milliseconds of processor time for a turn, and how many turns that was found with."""
    from urllib.request import urlopen

    measurements = []
    for count in SIZES[name]:
        with tempfile.TemporaryDirectory() as folder:
            argv = command(name, is_hermes, python, address, count, str(Path(folder) / "run"))
            seconds = processor_time(argv, address, Path(folder))
        with urlopen(f"{address}/turns") as answer:
            measurements.append((seconds, int(json.loads(answer.read()))))
    (short, few), (long, many) = measurements
    return (long - short) / (many - few) * 1000, many - few


def compare(pythons: dict[str, str], repetitions: int) -> None:
    """Print the table of the originals that have an interpreter."""
    rows = []
    for name, python in pythons.items():
        times: dict[bool, list[float]] = {True: [], False: []}
        with server(name, python) as address:
            for repetition in range(repetitions):
                for is_hermes in (True, False) if repetition % 2 else (False, True):
                    milliseconds, turns = measured(name, is_hermes, python, address)
                    times[is_hermes].append(milliseconds)
        ratios = [hermes_time / theirs for hermes_time, theirs in zip(times[True], times[False], strict=True)]
        rows.append([name, str(turns), spread(times[False]), spread(times[True]), spread(ratios)])
    heads = ("original", "turns", "its own runner, CPU ms per turn", "hermes-rl, CPU ms per turn", "ratio")
    say(f"{machine()}\n\n{table(heads, rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tau2", help="an interpreter with τ²-bench and hermes-rl")
    parser.add_argument("--bfcl", help="an interpreter with bfcl-eval and hermes-rl")
    parser.add_argument("--repetitions", type=int, default=3)
    for hidden in ("--scripts", "--serve", "--itself"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    elif options.itself:
        bfcl_itself(int(options.itself))
    elif options.scripts:
        say(json.dumps(scripts(options.scripts)))
    else:
        compare({name: python for name in ("tau2", "bfcl") if (python := getattr(options, name))}, options.repetitions)


if __name__ == "__main__":
    main()
