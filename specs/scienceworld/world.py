"""Load ScienceWorld's tasks, and simulate one of them as the user that replies to the agent."""

import fcntl
import json
import os
from collections.abc import Iterator
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from hermes_rl import UserError

EACH, SOLVED = 25, 1
"""Variations of a task in a split, and how many of them have a solution."""
MOST_MOVES = 100
"""Moves of an episode, as the original's default has it."""


class Simulator:
    """The simulator, in a separate Java process."""

    def __init__(self, memory: str = "1g") -> None:
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
        from scienceworld.constants import BASEPATH, JAR_PATH

        options = [f"-Xmx{memory}", "-XX:+UseSerialGC"]
        try:
            # Without a secret, every process of the machine could run code in it.
            port, secret, process = launch_gateway(
                classpath=JAR_PATH, die_on_exit=True, javaopts=options, cwd=BASEPATH, return_proc=True, enable_auth=True
            )
        except FileNotFoundError as error:
            raise UserError("ScienceWorld needs Java: apt-get install default-jre-headless") from error
        parameters = GatewayParameters(auto_field=True, port=port, auth_token=secret)
        self.gateway = JavaGateway(gateway_parameters=parameters, java_process=process)
        self.server = self.gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()

    def close(self) -> None:
        """End the Java."""
        self.gateway.shutdown()
        self.gateway.java_process.kill()
        self.gateway.java_process.wait()


def variations(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield the variations of a split, the first ones with the commands that solve them."""
    try:
        import scienceworld  # noqa: F401
    except ImportError as error:
        raise UserError(f"ScienceWorld is not installed: pip install scienceworld==1.2.3 ({error})") from error
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hermes-rl" / "scienceworld-1.2.3"
    file = folder / f"{split}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            content = "".join(json.dumps(row) + "\n" for row in listed(split))
            file.with_suffix(".new").write_text(content, "utf-8")
            file.with_suffix(".new").replace(file)
    yield from map(json.loads, file.read_text("utf-8").splitlines())


def listed(split: str) -> Iterator[dict[str, Any]]:
    """Yield the first variation of each task, then the second, and so on."""
    simulator = Simulator("3g")  # it holds memory for each task that it has loaded
    server, variations_by_task = simulator.server, dict[str, list[int]]()
    for task in server.getTaskNames():
        server.load(task, 0, "easy", False)
        variations_by_task[task] = list(server.getVariationsTest() if split == "test" else server.getVariationsTrain())[
            :EACH
        ]
    for index in takewhile(lambda number: any(len(each) > number for each in variations_by_task.values()), count()):
        for task, variation in [(task, each[index]) for task, each in variations_by_task.items() if len(each) > index]:
            gold: list[str] = []
            if index < SOLVED:
                server.load(task, variation, "easy", True)
                gold = list(server.getGoldActionSequence())
            turns = [{"say": command} for command in gold] if len(gold) <= MOST_MOVES else []
            yield {"id": f"{task}-{variation}", "task": task, "variation": variation, "gold": turns}
    simulator.close()


class Science:
    """One task, whose simulator replies to the agent as its user."""

    imports = ("py4j.java_gateway", "scienceworld.constants")
    """What is loaded once, and not in each rollout's process."""

    def __init__(self, item: dict[str, Any]) -> None:
        self.simulator = Simulator()
        self.server = self.simulator.server
        self.server.load(item["task"], item["variation"], "easy", False)
        self.server.reset()
        self.score = 0

    def act(self, command: str | None) -> str | dict[str, Any]:
        """Return the simulator's reply to a command; before the first, the task and a look around."""
        observation = str(self.server.step("look around" if command is None else command.strip()))
        self.score = round(100 * self.server.getScore())
        if command is None:
            return f"{self.server.getTaskDescription()}\n\n{observation}"
        done = bool(self.server.getCompleted()) or self.server.getNumMoves() > MOST_MOVES or self.score < 0
        return {"say": observation, "done": done}

    def close(self) -> None:
        """Stop the simulator."""
        self.simulator.close()


def points(result: Any, state: Science) -> float:
    """Return the share of the task's goals that were reached; -1 for an action that makes the task impossible."""
    return state.score / 100
