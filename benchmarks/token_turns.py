"""What a turn on a token-level server costs in a whole run, beside a bare client of the same server.

    python benchmarks/token_turns.py [--rollouts N] [--concurrency C] [--repetitions N] [--checkout DIRECTORY …]
                                     [--isolate process|default|none …]

One server answers in the form of vLLM: rollouts of 8 turns of some 25 tokens, prompts of some 300 tokens, and a call of
a Python tool in each turn but the last. Two kinds of contenders, each of which is a command:

- bare client: aiohttp posts the ids of the prompt, and adds the ids of the answer and of the tool's result to them;
- hermes-rl: `hermes-rl run spec.yaml process` with one Python tool and one reward, so with rendering, provenance,
  records, rewards, and all of its processes.

Processor time of a turn is what N rollouts take beyond an eighth of them, so without the start of either. Ratios to the
bare client are those of pairs that were measured one after the other. With several checkouts, or values of `--isolate`,
the commands of all of them alternate, and each has its ratio to the first of them too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from loop import serving
from loop_server import Connection, Model, http, latency
from report import PAIRS, machine, ratio, say, spread, table, usage

TURNS, GROUP = 8, 8
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "the shelf"}}\n</tool_call>'
RESULT = "There is a book, and behind it a key. " * 2
TASK = "Look at one place after the other, and say what is there. " * 17
SPEC = """
dataset: {{items: {items}}}
prompt: {{system: {task}, user: "{{{{ q }}}}"}}
tools: [{{python: "code.py:look"{isolate}}}]
rewards: {{done: {{fn: "code.py:done"}}}}
agent: {{max_turns: 50}}
servers: {{policy: {{type: vllm, base_url: "{url}", model: bench, tokenizer: {tokenizer}, max_concurrency: 8192}}}}
process: {{groups: {groups}, group_size: {size}, concurrency: {concurrency}}}
"""
CODE = f'''
async def look(place: str) -> str:
    """Look at a place."""
    return {RESULT!r}

def done(result):
    assert not result.tool_errors
    return float(len(result.final_response) % 2)
'''
ISOLATE = {"process": ", isolate: process", "default": "", "none": ", isolate: none"}


def main() -> None:
    repository = Path(__file__).parents[1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1024, help="a multiple of 64 (default: 1024)")
    parser.add_argument("--concurrency", type=int, default=64, help="rollouts at a time (default: 64)")
    parser.add_argument("--repetitions", type=int, default=PAIRS, help=f"at least {PAIRS} give intervals of 95 %%")
    parser.add_argument("--checkout", type=Path, action="append", help="a checkout to measure (default: this one)")
    parser.add_argument("--isolate", nargs="+", choices=ISOLATE, default=["default"], help="where the tool runs")
    parser.add_argument("--bare", nargs=3, metavar=("URL", "ROLLOUTS", "CONCURRENCY"), help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
    elif options.bare:
        asyncio.run(bare(options.bare[0], *map(int, options.bare[1:])))
    else:
        checkouts = [path.resolve() for path in options.checkout or [repository]]
        measure(checkouts, options)


def measure(checkouts: list[Path], options: argparse.Namespace) -> None:
    cases = [(checkout, isolate) for isolate in options.isolate for checkout in checkouts]
    times_by_case: dict[tuple[Path, str] | None, list[float]] = {case: [] for case in (None, *cases)}
    with serving(__file__, "--serve") as url, tempfile.TemporaryDirectory() as directory:
        for repetition in range(options.repetitions):
            for case in (None, *(cases if repetition % 2 else reversed(cases))):
                took = [
                    seconds(case, url, rollouts, options.concurrency, Path(directory))
                    for rollouts in (options.rollouts // 8, options.rollouts)
                ]
                times_by_case[case].append((took[1] - took[0]) / (options.rollouts * 7 / 8 * TURNS) * 1000)
    say(f"{options.rollouts} rollouts of {TURNS} turns, {options.concurrency} at a time, {options.repetitions} ")
    say(f"repetitions; median (smallest to largest), ratios with an interval of 95 %.\n{machine()}.\n")
    rows = [["bare client", spread(times_by_case[None]), "1"]]
    for checkout, isolate in cases:
        times = times_by_case[checkout, isolate]
        row = [f"hermes-rl, isolate: {isolate}", spread(times), str(ratio(times, times_by_case[None]))]
        if len(checkouts) > 1:
            row[0] += f": {checkout}"
            row.append(str(ratio(times, times_by_case[checkouts[0], isolate])))
        elif len(cases) > 1:
            row.append(str(ratio(times, times_by_case[cases[0]])))
        rows.append(row)
    heads = ["", "CPU ms per turn", "to the bare client", *(["to the first of them"] if len(cases) > 1 else [])]
    say(table(heads, [[*row, *[""] * (len(heads) - len(row))] for row in rows]))


def seconds(case: tuple[Path, str] | None, url: str, rollouts: int, concurrency: int, work: Path) -> float:
    """Return the processor time of a contender's command and of the processes that it waited for."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if case is None:
        command = [sys.executable, str(Path(__file__).resolve()), "--bare", url, str(rollouts), str(concurrency)]
        return usage(command, work, {**environment, "PYTHONPATH": str(Path(__file__).parents[1])}).cpu
    checkout, isolate = case
    shutil.rmtree(work / "played", ignore_errors=True)
    (work / "code.py").write_text(CODE, "utf-8")
    tokenizer = checkout / "hermes_rl" / "tokens" / "small"  # that of another checkout is loaded by transformers
    items = json.dumps([{"q": f"Begin with place {index}."} for index in range(rollouts // GROUP)])
    spec = SPEC.format(
        items=items, task=json.dumps(TASK), isolate=ISOLATE[isolate], url=url, tokenizer=tokenizer,
        groups=rollouts // GROUP, size=GROUP, concurrency=concurrency,
    )  # fmt: skip
    # Before that file moved, `isolate:` of a tool was `process:`.
    if not (checkout / "hermes_rl" / "user_code" / "fork_server.py").exists():
        spec = spec.replace("isolate: process", "process: true").replace("isolate: none", "process: false")
    (work / "spec.yaml").write_text(spec, "utf-8")
    command = [sys.executable, "-m", "hermes_rl.cli.main", "run", "spec.yaml", "process", "--quiet", "--out", "played"]
    used = usage(command, work, {**environment, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"})
    records = (work / "played" / "rollouts.jsonl").read_text().splitlines()
    played = [json.loads(line) for line in records]
    assert [record["turns"] for record in played] == [TURNS] * rollouts, played[0]
    return used.cpu


# ------------------------------------------------------------------ the server


def texts() -> list[str]:
    return [f"Next.\n{CALL}"] * (TURNS - 1) + [
        "It was seen: a book, and behind it a key, in each of the places that were named."
    ]


def encoder() -> Any:
    from hermes_rl.tokens.load import load_tokenizer, make_renderer

    return make_renderer(load_tokenizer())


class Engine(Model):
    """Answers as vLLM does. Turns are counted by the tokens with which each call begins."""

    def __init__(self) -> None:
        super().__init__(1, latency(0.0, "fixed"), "noop")
        renderer = encoder()
        begins = [str(token) for token in renderer.tokenizer.encode(CALL.partition('",')[0])]
        self.mark = (", ".join(begins).encode(), ",".join(begins).encode())
        self.answers = [answer([*renderer.tokenizer.encode(text), renderer.stop_ids[0]]) for text in texts()]

    def ask(self, path: str) -> bytes:
        if path == "/v1/models":
            return http(json.dumps({"object": "list", "data": [{"id": "bench", "max_model_len": 32768}]}).encode())
        return http(b"{}", "404 Not Found")


def answer(ids: list[int]) -> bytes:
    logprobs = {"tokens": ["t"] * len(ids), "token_logprobs": [-0.25] * len(ids), "top_logprobs": None}
    choice = {"index": 0, "text": "", "token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"}
    usage = {"prompt_tokens": 900, "completion_tokens": len(ids), "total_tokens": 900 + len(ids)}
    return http(json.dumps({"id": "cmpl-1", "model": "bench", "choices": [choice], "usage": usage}).encode())


async def serve() -> None:
    engine = Engine()
    listening = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", 0, backlog=4096)
    host, port = listening.sockets[0].getsockname()[:2]
    say(f"http://{host}:{port}/v1")
    await listening.serve_forever()


# ------------------------------------------------------------------ the bare client


async def bare(url: str, rollouts: int, concurrency: int) -> None:
    """Play so many rollouts: ids are sent, and ids come back."""
    import aiohttp

    tokenizer = encoder().tokenizer
    prompt, result = tokenizer.encode(TASK + "Begin with place 1."), tokenizer.encode(RESULT)
    end, remaining = tokenizer.encode("</tool_call>")[0], iter(range(rollouts))

    async def lane() -> None:
        for _ in remaining:
            ids, goes_on = list(prompt), True
            while goes_on:
                body = {"model": "bench", "prompt": ids, "logprobs": 0, "return_token_ids": True, "max_tokens": 4096}
                async with session.post(f"{url}/completions", json=body) as response:
                    sampled = json.loads(await response.read())["choices"][0]["token_ids"]
                goes_on = end in sampled
                ids += sampled + result

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(lane() for _ in range(concurrency)))


if __name__ == "__main__":
    main()
