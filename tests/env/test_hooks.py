"""What an author's own methods do wrong is told in one sentence with its place, and ends a program with status 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from hermes_rl import HermesAgentEnvConfig
from hermes_rl.env.program import main
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.env.canned import NOBODY, Canned
from tests.env.greetings import Greetings


def line_of(text: str) -> int:
    """The first line of this file that holds a text."""
    return next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


def refused(
    cls: type[Any], capsys: pytest.CaptureFixture[str], *flags: str, mode: str = "process", place: str | None = None
) -> str:
    """Run a program whose author made a mistake; the sentence that it ends with, which names this line of this file."""
    with pytest.raises(SystemExit) as ended:
        main(cls, [mode, "--env.data_path_to_save_groups", "groups.jsonl", "--env.total_steps", "2", *flags])
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert ended.value.code == 2, lines
    assert len(errors) == 1 and "Traceback" not in "".join(lines), lines
    if place is not None:
        assert f"test_hooks.py:{line_of(place)}" in errors[0]
    return errors[0].removeprefix("error: ")


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Offline:
    """A configuration with servers that nobody asks."""

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[APIServerConfig]]:
        config = HermesAgentEnvConfig(group_size=2, tokenizer_name=str(small_tokenizer_path()))
        return config, [APIServerConfig(base_url=NOBODY, model_name="m")]


class Raises(Offline, Canned):
    """One of its methods raises."""

    raising = ""

    @classmethod
    def _raise(cls, hook: str) -> None:
        if hook == cls.raising:
            raise ValueError("a mistake of mine")

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[APIServerConfig]]:
        cls._raise("config_init")
        return super().config_init()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._raise("__init__")
        super().__init__(*args, **kwargs)

    async def setup(self) -> None:
        await super().setup()
        self._raise("setup")

    async def get_next_item(self) -> int:
        self._raise("get_next_item")
        return await super().get_next_item()

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Any = None) -> None:
        self._raise("add_rollouts_for_wandb")

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        self._raise("wandb_log")

    async def cleanup(self) -> None:
        self._raise("cleanup")

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._raise("evaluate")


@pytest.mark.parametrize(
    "hook",
    ["config_init", "__init__", "setup", "get_next_item", "add_rollouts_for_wandb", "wandb_log", "cleanup", "evaluate"],
)
def test_exception_in_a_hook_is_reported_with_its_line(
    hook: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Raises, "raising", hook)
    mode = "evaluate" if hook == "evaluate" else "process"
    said = refused(Raises, capsys, mode=mode, place="raise ValueError")
    assert said.startswith(f"Raises.{hook} raised ValueError: a mistake of mine at ")


class Asks(Offline, Greetings):
    """What its prompt is, a test says."""

    prompt: Any = None

    def format_prompt(self, item: Any) -> Any:
        if isinstance(self.prompt, Exception):
            raise self.prompt  # in format_prompt
        return self.prompt


@pytest.mark.parametrize("prompt", [None, 7, ["Write"], b"Write"])
def test_prompt_that_is_not_text_is_refused(
    prompt: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Asks, "prompt", prompt)
    said = refused(Asks, capsys, place="def format_prompt")
    assert said.startswith(f"Asks.format_prompt returned {type(prompt).__name__}, not a text")


def test_exception_in_format_prompt_is_reported_with_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Asks, "prompt", KeyError("question"))
    said = refused(Asks, capsys, place="# in format_prompt")
    assert said.startswith("Asks.format_prompt raised KeyError: 'question' at ")


@pytest.mark.parametrize("messages", ["Write", [{"content": "Write"}], ["Write"], [{"role": "user", "content": 7}], []])
def test_messages_that_are_none_are_refused(messages: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class Speaks(Offline, Greetings):
        def format_messages(self, item: Any) -> Any:
            return messages

    said = refused(Speaks, capsys, place="def format_messages")
    assert said.startswith("Speaks.format_messages returned ") and "not a list of messages" in said


def test_hooks_without_async_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    class Plain(Offline, Canned):
        def setup(self) -> None:  # type: ignore[override]
            self.number = 0

        def get_next_item(self) -> int:  # type: ignore[override]
            self.number += 1
            return self.number

        def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:  # type: ignore[override]
            self.logged = True

        def cleanup(self) -> None:  # type: ignore[override]
            """Nothing is left behind."""

    main(Plain, ["process", "--env.data_path_to_save_groups", "groups.jsonl", "--env.total_steps", "2"])
    assert len(Path("groups.jsonl").read_text().splitlines()) == 2


def test_missing_methods_of_a_subclass_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    from hermes_rl import HermesAgentBaseEnv

    class Half(Offline, HermesAgentBaseEnv):
        async def setup(self) -> None:
            """Nothing is loaded."""

    assert refused(Half, capsys) == "Half does not define evaluate, get_next_item"


@pytest.mark.parametrize("flag", ["--env.group_size", "--env.max_token_length", "--env.total_steps"])
def test_numbers_of_which_there_can_be_none_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Fine(Offline, Canned):
        """Nothing is wrong with it."""

    with pytest.raises(SystemExit) as ended:
        main(Fine, ["process", "--env.data_path_to_save_groups", "groups.jsonl", flag, "0"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(f"error: {flag}: "), said
