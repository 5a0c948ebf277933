"""The original DBBench and InterCode-SQL, each with its own MariaDB.

Both are loaded from the checkouts that `AGENTBENCH_DIR` and `INTERCODE_DIR` name. What they import and is no part of
an episode or its score (controllers of containers, loggers) is replaced by what does nothing.
"""

import asyncio
import atexit
import importlib.util
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Dict, List  # noqa: UP035 - the original compares annotations with these

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "specs" / "sql"))
Script = list[Any]
"""What the agent says, or its calls, turn by turn."""


def stub(name: str, **members: Any) -> None:
    """Replace an unneeded module."""
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(members)


def on_its_server(options: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """Yield a server of the original's own, with the settings to connect to it."""
    from server import Server

    server = Server(options)
    atexit.register(server.close)
    return server, {"unix_socket": str(server.directory / "socket"), "user": "root", "collation": "utf8mb4_general_ci"}


# ------------------------------------------------------------------------------------------------------------ DBBench


class Plain:
    """Replacement for a class of the framework of which only the name matters."""

    def __init__(self, *_: Any, **given: Any) -> None:
        vars(self).update(given)


class Cancelled(Exception):
    """The agent sends no further message."""


class Controller:
    """Replacement for the controller of containers: the only server exists already."""

    def __init__(self, driver: str, delegation: Any) -> None:
        self.delegation = delegation

    async def start_session(self, kind: str) -> tuple[str, dict[str, str], dict[str, str]]:
        return os.urandom(8).hex(), {kind: "server"}, {kind: "server"}

    async def end_session(self, session: str) -> None: ...

    async def background_task(self) -> None: ...


class Session:
    """Play a script, and store the reward."""

    def __init__(self, script: Script) -> None:
        self.script, self.reward = list(script), None

    async def action(self) -> Any:
        if not self.script:
            raise Cancelled
        said = self.script.pop(0)
        if not isinstance(said, list):
            return SimpleNamespace(messages=[{"role": "assistant", "content": said}])
        calls = [{"name": call["name"], "arguments": json.dumps(call["args"])} for call in said]
        numbered = [{"id": f"c{n}", "function": call} for n, call in enumerate(calls)]
        return SimpleNamespace(messages=[{"role": "assistant", "content": None, "tool_calls": numbered}])

    def inject(self, item: Any) -> None:
        self.reward = getattr(item, "score", self.reward)


@cache
def dbbench_task() -> Any:
    """Return the original's task, connected to the server."""
    import dbbench as port
    import mysql.connector.aio as mysql

    stub("agentrl"), stub("agentrl.worker")
    stub("agentrl.worker.environment", EnvironmentDelegation=Plain, EnvironmentController=Plain, create_controller=made)
    stub("agentrl.worker.task", Task=Plain, Session=Session)
    names = ("RewardHistoryItem", "SampleIndex", "SampleStatus", "TaskSampleExecutionResult")
    stub("agentrl.worker.typings", AgentCancelledException=Cancelled, **dict.fromkeys(names, Sample))
    messages = [f"ChatCompletion{who}MessageParam" for who in ("System", "Tool", "User")]
    stub("openai.types.chat", **dict.fromkeys(messages, dict))
    connect, (_, how) = mysql.connect, on_its_server(port.NOT_STRICT)
    mysql.connect = lambda **given: connect(**how, database=given["database"], read_timeout=30)
    checkout = Path(os.environ["AGENTBENCH_DIR"])
    folder = checkout / "src/server/tasks/dbbench"
    about = importlib.util.spec_from_file_location(
        "dbbench_original", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert about is not None and about.loader is not None
    sys.modules["dbbench_original"] = importlib.util.module_from_spec(about)
    about.loader.exec_module(sys.modules["dbbench_original"])
    task = importlib.import_module("dbbench_original.task").DBBenchTask
    return task(str(checkout / "data/dbbench/standard.jsonl"), max_round=15, env_options={})


class Sample(Plain):
    """A reward, a status or an outcome."""

    COMPLETED = TASK_LIMIT_REACHED = CANCELLED = TASK_ERROR = None


def made(driver: str, delegation: Any) -> Controller:
    """Return the controller."""
    return Controller(driver, delegation)


def dbbench(row: Any, script: Script) -> float:
    """Return the score of an episode of DBBench."""
    session = Session(script)
    number = int(row.columns["id"].rpartition("-")[2])
    with ThreadPoolExecutor(1) as thread:  # it has an event loop of its own
        thread.submit(lambda: asyncio.run(dbbench_task().start_sample(number, session))).result()
    assert session.reward is not None
    return float(session.reward)


# ------------------------------------------------------------------------------------------------------- InterCode


class Loader(list[Any]):
    """Return the rows."""

    def __init__(self, path: str) -> None:
        super().__init__(json.loads(Path(path).read_text("utf-8")))

    get = list.__getitem__


def in_its_database(record: Dict) -> List:  # type: ignore[type-arg] # noqa: UP006
    """Return the statement that is executed first, as in the original's runners."""
    return [f"use {record['db']}"]


@cache
def intercode_env() -> Any:
    """Return the original's environment, connected to a server with all databases."""
    import mysql.connector
    import spider as port

    server, how = on_its_server(port.ONE_CASE)
    for name, statements in port.databases().items():
        server.execute([f"CREATE DATABASE `{name}`", f"USE `{name}`", *statements])
    checkout = Path(os.environ["INTERCODE_DIR"])
    stub("gymnasium", Env=object), stub("rich"), stub("rich.logging", RichHandler=Handler)
    stub("intercode", __path__=[str(checkout / "intercode")])
    stub("intercode.envs", __path__=[str(checkout / "intercode/envs")])
    stub("intercode.utils", IntercodeDataLoader=Loader, get_container=lambda *_, **__: None)
    module = importlib.import_module("intercode.envs.sql.sql_env")
    module.SQL_CONFIG = how  # type: ignore[attr-defined]
    rows = checkout / "data/sql/spider/ic_spider_dev.json"
    env = module.SqlEnv("none", data_path=str(rows), preprocess=in_its_database)
    env.connect = lambda: mysql.connector.connect(**how)
    return env


def Handler(**_: Any) -> Any:  # noqa: N802 - the name of a class
    """Return a handler that logs nothing."""
    import logging

    return logging.NullHandler()


def intercode(row: Any, script: Script) -> float:
    """Return the score of an episode of InterCode-SQL, which ends with `submit` or after ten turns."""
    env = intercode_env()
    env.cnx.close()  # it has one for all episodes, in which what they write would stay
    env.cnx = env.connect()
    env.cur = env.cnx.cursor(buffered=True)
    env.reset(row.columns["id"])
    for said in script[:10]:
        for call in said if isinstance(said, list) else ():
            if call["name"] == "submit":
                return float(env.step("submit")[1])
            if call["name"] == "execute":
                env.step(call["args"]["sql"])
    return float(env.step("submit")[1])
