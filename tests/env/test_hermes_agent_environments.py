"""hermes-agent's environments run with changed imports, or name the unsupported line at the start."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import shutil
import stat
import sys
import tarfile
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

import hermes_rl
from hermes_rl import HermesAgentBaseEnv
from hermes_rl.env.program import run
from hermes_rl.errors import RunError, UserError
from hermes_rl.tokens.hub import HubTokenizer
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.env.canned import ended
from tests.env.test_program import ROOT
from tests.env.test_token_exact import tokenizer_folder
from tests.env.upstream.agentic_opd import AgenticOPDEnv
from tests.env.upstream.model import Messages, Model, call, says
from tests.env.upstream.tblite import TBLiteEvalEnv
from tests.env.upstream.terminal_test import TerminalTestEnv
from tests.env.upstream.terminalbench_2 import TerminalBench2EvalEnv
from tests.env.upstream.web_research import WebResearchEnv
from tests.env.upstream.yc_bench import YCBenchEvalEnv
from tests.env.upstream.yc_bench_given import GivenEnv
from tests.servers.token_policy import TokenPolicy
from tests.tokens.families import CODER, write_coder
from tests.tools.searxng import searxng

Serve = Callable[[Callable[[Messages], dict[str, Any]]], Awaitable[Model]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    started: list[Model] = []

    async def begin(answer: Callable[[Messages], dict[str, Any]]) -> Model:
        model = Model(answer)
        await model.start()
        started.append(model)
        return model

    yield begin
    for one in started:
        await one.stop()


def flags(model: Model, *more: str) -> list[str]:
    return [
        "--openai.base_url", model.url, "--openai.model_name", "m", "--env.use_wandb", "false",
        "--env.terminal_backend", "local", "--env.tokenizer_name", str(small_tokenizer_path()), *more,
    ]  # fmt: skip


async def program(module: str, *arguments: str, folder: Path, **environ: str) -> tuple[int, str]:
    """Run an environment in a process of its own: hermes-agent's tools keep the variables that they begin with."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "SEARXNG_URL"))}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"tests.env.upstream.{module}", *arguments, cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), **environ},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    return await ended(process, 120)


async def play(cls: type[HermesAgentBaseEnv], mode: str, given: list[str]) -> None:
    await asyncio.to_thread(run, cls, [mode, *given])


def metrics(folder: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((folder / "metrics.json").read_text())["results"]["all"]
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def writes_the_word(messages: Messages) -> dict[str, Any]:
    if messages[-1]["role"] == "tool":
        return says("Done.")
    word = messages[-1]["content"].split()[1]
    return call("terminal", command=f"echo {word} > ~/{word}.txt")


async def test_terminal_test(serve: Serve, tmp_path: Path) -> None:
    model = await serve(writes_the_word)
    path = tmp_path / "groups.jsonl"
    await play(TerminalTestEnv, "process", flags(model, "--env.data_path_to_save_groups", str(path)))
    assert [one["scores"] for one in lines(path)] == [[1.0] * 3] * 3
    await play(TerminalTestEnv, "evaluate", flags(model, "--env.data_dir_to_save_evals", str(tmp_path)))
    assert metrics(tmp_path) == {"eval/num_samples": 1}


def solves(messages: Messages) -> dict[str, Any]:
    if messages[-1]["role"] == "tool":
        return says("Done.")
    return call("terminal", command="mkdir -p /workspace; echo 'def f(): return 7' > /workspace/f.py")


@pytest.mark.slow
async def test_hermes_swe(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    rows = [
        {"prompt": "Write f", "test": "from f import f; assert f() == 7"},
        {"prompt": "Write g", "test": "import g"},
    ]
    (tmp_path / "rows" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, path = await serve(solves), tmp_path / "groups.jsonl"
    more = [
        "--env.dataset_name", str(tmp_path / "rows"), "--env.total_steps", "2", "--env.group_size", "2",
        "--env.data_path_to_save_groups", str(path),
    ]  # fmt: skip
    async with searxng() as service:
        code, output = await program(
            "hermes_swe", "process", *flags(model, *more), folder=tmp_path, SEARXNG_URL=service.url
        )
    assert code == 0, output
    assert sorted(one["scores"] for one in lines(path)) == [[0.1, 0.1], [1.0, 1.0]]
    assert "web_search" in {tool["function"]["name"] for tool in model.bodies[0]["tools"]}


@pytest.mark.slow
async def test_unusable_toolset_is_reported_before_loading_data(serve: Serve, tmp_path: Path) -> None:
    model = await serve(solves)
    more = flags(model, "--env.dataset_name", "no/such-dataset")
    code, output = await program("hermes_swe", "process", *more, folder=tmp_path)
    assert code == 2 and "error: toolset web cannot work here: set SEARXNG_URL" in output, output
    assert model.bodies == []


def researches(messages: Messages) -> dict[str, Any]:
    if messages[-1]["content"].startswith("Judge"):
        return says('{"score": 1.0, "reason": "right"}')
    return says("Ann wrote it.") if messages[-1]["role"] == "tool" else call("web_search", query="who")


@pytest.mark.slow
async def test_web_research(serve: Serve, tmp_path: Path) -> None:
    model, path = await serve(researches), tmp_path / "groups.jsonl"
    async with searxng() as service:
        more = ["--env.total_steps", "2", "--env.group_size", "2", "--env.data_path_to_save_groups", str(path)]
        evaluation = ["--env.eval_size", "1", "--env.data_dir_to_save_evals", str(tmp_path)]
        for words in (["process", *flags(model, *more)], ["evaluate", *flags(model, *evaluation)]):
            code, output = await program("web_research", *words, folder=tmp_path, SEARXNG_URL=service.url)
            assert code == 0, output
        assert len(service.queries) == 5
    assert [one["scores"] for one in lines(path)] == [[1.0, 1.0]] * 2
    assert metrics(tmp_path) == {"eval/mean_reward": 1.0}


def codes(prompt: str, chance: random.Random) -> str:
    if "Judge the turn" in prompt:
        return "[HINT]Run the tests first.[/HINT]<|im_end|>"
    if "<tool_response>" in prompt:
        return "All tests pass.<|im_end|>"
    command = "echo 'def add0(a, b): return 0' > solution.py; touch test_solution.py"
    return write_coder("I write it now", None, [("terminal", {"command": command})]) + "<|im_end|>"


@pytest.mark.slow
async def test_agentic_opd(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", keeps_thinking=True)
    (folder / "chat_template.jinja").write_text(CODER)
    policy, path = TokenPolicy(HubTokenizer(str(folder)), codes), tmp_path / "groups.jsonl"
    async with policy.running() as url:
        own = [
            "--openai.base_url", url, "--openai.tokenizer_name", str(folder), "--env.tokenizer_name", str(folder),
            "--env.use_wandb", "false", "--env.distill_topk", "4", "--env.group_size", "2", "--env.total_steps", "1",
        ]  # fmt: skip
        await play(AgenticOPDEnv, "process", [*own, "--env.data_path_to_save_groups", str(path)])
        await play(AgenticOPDEnv, "evaluate", [*own, "--env.data_dir_to_save_evals", str(tmp_path)])
    (line,) = lines(path)
    assert line["scores"] == [1.0, 1.0]
    for tokens, ids, values in zip(line["tokens"], line["distill_token_ids"], line["distill_logprobs"], strict=True):
        assert len(tokens) == len(ids) == len(values)
        taught = [place for place, some in enumerate(ids) if any(some)]
        assert taught and all(ids[place][0] == tokens[place] and values[place][0] < 0 for place in taught)
        assert {len(some) for some in ids} == {4}
    assert metrics(tmp_path) == {"eval/mean_reward": 1.0}


def packed(**files: str) -> str:
    """An archive in the form of the dataset's columns."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return base64.b64encode(stream.getvalue()).decode()


TEST_SH = """\
if [ "$(cat /app/answer)" = "$(cat /tests/expected)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def answers(messages: Messages) -> dict[str, Any]:
    if messages[-1]["role"] == "tool":
        return says("Done.")
    return call("terminal", command="ls /tests 2>/dev/null; mkdir -p /app; cat /etc/which-image > /app/answer")


@pytest.fixture
def tasks(tmp_path: Path, rootfs: Path) -> Path:
    """Tasks of which each has an image of its own, unpacked."""
    rows = []
    for name, expected in (("one", "image-one"), ("two", "image-two"), ("three", "something else")):
        image = tmp_path / "images" / name
        shutil.copytree(rootfs, image, symlinks=True, copy_function=os.link)
        (image / "etc" / "which-image").write_text(f"image-{name}")
        rows.append(
            {
                "task_name": name, "category": "easy" if name != "three" else "hard", "instruction": "Answer.",
                "docker_image": str(image), "environment_tar": packed(Dockerfile="FROM scratch\n"),
                "tests_tar": packed(expected=expected), "test_sh": TEST_SH,
            }
        )  # fmt: skip
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "rows"


@pytest.mark.slow
@pytest.mark.parametrize("cls", [TerminalBench2EvalEnv, TBLiteEvalEnv])
async def test_terminal_bench_2_and_its_lighter_kind(
    cls: type[TerminalBench2EvalEnv], serve: Serve, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = await serve(answers)
    more = [
        "--env.dataset_name", str(tasks), "--env.data_dir_to_save_evals", str(tmp_path), "--env.eval_by", "[category]",
    ]  # fmt: skip
    await play(cls, "evaluate", flags(model, *more))
    found = metrics(tmp_path)
    assert (found["eval/by/category/easy/mean_reward"], found["eval/by/category/easy/rows"]) == (1.0, 2.0)
    assert found["eval/by/category/hard/mean_reward"] == 0.0
    assert found["eval/pass_rate"] == pytest.approx(2 / 3)
    assert (found["eval/pass_rate_easy"], found["eval/pass_rate_hard"]) == (1.0, 0.0)
    assert [one.get("error") for one in lines(tmp_path / "samples.jsonl")] == [None] * 3


@pytest.mark.slow
async def test_missing_column_error_lists_the_existing_columns(
    serve: Serve, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = await serve(answers)
    more = ["--env.dataset_name", str(tasks), "--env.eval_by", "[kind]"]
    with pytest.raises(UserError, match="have no column 'kind'; they have category, passed, reward, task_name"):
        await play(TBLiteEvalEnv, "evaluate", flags(model, *more))


async def test_evaluation_reports_failures_not_caused_by_the_policy(
    serve: Serve, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = await serve(answers)
    more = ["--env.dataset_name", str(tasks), "--env.data_dir_to_save_evals", str(tmp_path)]
    with pytest.raises(UserError, match=r"3 agent loops .* failed.*Dockerfile is not an image: build it"):
        await play(TerminalBench2EvalEnv, "evaluate", flags(model, *more, "--env.force_build", "true"))
    assert metrics(tmp_path)["eval/pass_rate"] == 0
    text = (tasks / "train.jsonl").read_text().replace(str(tmp_path / "images"), "registry.example/tb2")
    (tasks / "train.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"registry.example/tb2/\w+', which the backend bubblewrap cannot have"):
        await play(TerminalBench2EvalEnv, "evaluate", flags(model, *more))
    model.answer = refuses
    with pytest.raises(RunError, match=r"agent loops of this evaluation failed, which is nothing that the policy did"):
        await play(WebResearchWithoutWeb, "evaluate", flags(model))


def refuses(messages: Messages) -> dict[str, Any]:
    raise web.HTTPBadRequest


class WebResearchWithoutWeb(WebResearchEnv):
    """No tool is needed to see that the model cannot be reached."""

    @classmethod
    def config_init(cls) -> Any:
        config, servers = super().config_init()
        config.enabled_toolsets = ["file"]
        return config, servers


GAME = """\
#!{python}
import os, sys
path = os.environ["DATABASE_URL"].removeprefix("sqlite:///")
if sys.argv[1:3] == ["sim", "init"]:
    open(path, "w").write("0.0")
elif sys.argv[1:3] == ["company", "status"]:
    open(path, "w").write("0.75")
"""


def runs_the_company(messages: Messages) -> dict[str, Any]:
    return says("Over.") if messages[-1]["role"] == "tool" else call("terminal", command="yc-bench company status")


async def test_yc_bench_error_names_the_line_and_its_fix_works(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "yc-bench"
    program.parent.mkdir()
    program.write_text(GAME.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    model = await serve(runs_the_company)
    with pytest.raises(UserError) as refused:
        await play(YCBenchEvalEnv, "evaluate", flags(model))
    said = str(refused.value)
    assert "yc_bench.py:" in said and "DATABASE_URL in os.environ does not reach the agent's commands" in said
    assert "{'env': {'DATABASE_URL': …}}" in said and "`terminal_backend: none`" in said
    more = ["--env.db_dir", str(tmp_path / "games"), "--env.data_dir_to_save_evals", str(tmp_path)]
    given = [one if one != "local" else "none" for one in flags(model, *more)]
    await play(GivenEnv, "evaluate", given)
    assert metrics(tmp_path) == {"eval/avg_composite_score": 0.75}


LEFT = """
from hermes_rl import HermesAgentBaseEnv


class Left(HermesAgentBaseEnv):
    async def setup(self): ...
    async def get_next_item(self): ...
    async def evaluate(self, *args, **kwargs):
        from environments.agent_loop import HermesAgentLoop, _tool_executor
        from tools.terminal_tool import cleanup_all_environments, get_active_environments_info
        from hermes_rl import Loop
"""


def test_every_import_that_was_left_is_named_with_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left_over.py").write_text(textwrap.dedent(LEFT))
    monkeypatch.syspath_prepend(str(tmp_path))
    import left_over  # type: ignore[import-not-found]

    with pytest.raises(UserError) as refused:
        left_over.Left(left_over.Left.env_config_cls(), [])
    first, *told = str(refused.value).splitlines()
    assert first == "Left has lines that cannot work here:"
    assert [one.strip() for one in told] == [
        "left_over.py:9: write `from hermes_rl import HermesAgentLoop` for what is imported from "
        "environments.agent_loop",
        "left_over.py:9: environments.agent_loop._tool_executor: leave it out, and the code that uses it: tools need "
        "no pool of threads",
        "left_over.py:10: write `from hermes_rl import cleanup_all_environments` for what is imported from "
        "tools.terminal_tool",
        "left_over.py:10: tools.terminal_tool.get_active_environments_info: it does not exist; see docs/python.md for "
        "the available names",
        "left_over.py:11: hermes_rl has no Loop",
    ]


SHIM = """
from environments.agent_loop import AgentResult, HermesAgentLoop
from environments.base import HermesAgentBaseEnv


class Shimmed(HermesAgentBaseEnv):
    async def setup(self): ...
    async def get_next_item(self): ...
    async def evaluate(self, *args, **kwargs):
        from environments.tool_context import ToolContext
        from environments.agent_loop import _tool_executor
"""


def test_custom_module_that_reexports_hermes_rl_is_checked_by_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "environments"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "base.py").write_text("from hermes_rl import HermesAgentBaseEnv\n")
    (folder / "agent_loop.py").write_text("from hermes_rl import AgentResult, HermesAgentLoop\n")
    (folder / "tool_context.py").write_text("from hermes_rl import ToolContext\n")
    (tmp_path / "shimmed.py").write_text(textwrap.dedent(SHIM))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "environments", raising=False)
    import shimmed  # type: ignore[import-not-found]

    config = shimmed.Shimmed.env_config_cls(tokenizer_name=str(small_tokenizer_path()))
    with pytest.raises(UserError) as refused:
        shimmed.Shimmed(config, [APIServerConfig(base_url="http://127.0.0.1:9/v1")])
    _, *told = str(refused.value).splitlines()
    assert [one.strip().partition(": ")[0] for one in told] == ["shimmed.py:11"], "what is handed on works"
    (folder / "agent_loop.py").write_text("from hermes_rl import AgentResult, HermesAgentLoop\n_tool_executor = None\n")
    monkeypatch.delitem(sys.modules, "environments.agent_loop")
    shimmed.Shimmed(config, [APIServerConfig(base_url="http://127.0.0.1:9/v1")])


POOLED = """
import asyncio
from hermes_rl import HermesAgentBaseEnv, HermesAgentLoop, _tool_executor, apply_patches, resize_tool_pool
import hermes_rl

apply_patches()
hermes_rl._tool_executor = _tool_executor


class Pooled(HermesAgentBaseEnv):
    async def setup(self):
        resize_tool_pool(self.config.tool_pool_size)
        self.scores = []

    async def get_next_item(self): ...

    async def evaluate(self, *args, **kwargs):
        score = await asyncio.get_running_loop().run_in_executor(_tool_executor, lambda: 0.5)
        self.scores.append(score)
        _tool_executor.shutdown(wait=False, cancel_futures=True)
"""


async def test_reference_thread_pool_is_accepted_and_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pooled.py").write_text(textwrap.dedent(POOLED))
    monkeypatch.syspath_prepend(str(tmp_path))
    import pooled  # type: ignore[import-not-found]

    config = pooled.Pooled.env_config_cls(tokenizer_name=str(small_tokenizer_path()), use_wandb=False)
    env = pooled.Pooled(config, [APIServerConfig(base_url="http://127.0.0.1:9/v1")])
    await env._run_evaluate()
    await env.evaluate()
    assert env.scores == [0.5, 0.5], "a pool that was shut down takes work again"
    assert not {"_tool_executor", "apply_patches", "resize_tool_pool"} & set(hermes_rl.__all__)
