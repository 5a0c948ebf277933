"""Names of toolsets and distributions."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.errors import UserError
from hermes_rl.tools.base import Schemas, Toolkit
from hermes_rl.tools.catalogue import (
    DISTRIBUTIONS,
    describe_toolsets,
    find_tool,
    known_toolsets,
    own_names,
    resolve_toolsets,
    sample_distribution,
    toolkit_of,
    toolsets,
)


def names(tools: tuple[Any, ...]) -> list[str]:
    return [tool.name for tool in tools]


def test_toolsets_and_their_tools() -> None:
    assert names(resolve_toolsets(["terminal", "file", "todo"])) == [
        "terminal",
        "process",
        "read_file",
        "write_file",
        "patch",
        "search_files",
        "todo",
    ]
    assert names(resolve_toolsets(["todo", "todo"])) == ["todo"]
    assert names(resolve_toolsets(["terminal", "file"], ["file"])) == ["terminal", "process"]
    assert resolve_toolsets([]) == ()
    assert set(describe_toolsets()) == {"terminal", "file", "code_execution", "todo"}


def test_none_is_all_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert len(resolve_toolsets(None)) == 8
    assert "all of them" in caplog.text


@pytest.mark.parametrize("arguments", [(["terminl"],), (["file"], ["terminl"])])
def test_unknown_names(arguments: tuple[list[str], ...]) -> None:
    with pytest.raises(UserError, match="did you mean `terminal`"):
        resolve_toolsets(*arguments)


def test_tools_by_name() -> None:
    assert find_tool("patch").name == "patch"
    with pytest.raises(UserError, match="did you mean `patch`"):
        find_tool("pach")


def test_schemas_carry_their_tools() -> None:
    toolkit = Toolkit(resolve_toolsets(["terminal"]))
    assert toolkit_of(toolkit.schemas).names == {"terminal", "process"}
    assert toolkit_of(toolkit.schemas, {"terminal"}).names == {"terminal"}
    plain = [dict(schema) for schema in toolkit.schemas]
    assert not isinstance(plain, Schemas)
    assert toolkit_of(plain).names == {"terminal", "process"}


def test_two_tools_of_one_name() -> None:
    with pytest.raises(UserError, match="two tools are named 'todo'"):
        Toolkit([find_tool("todo"), find_tool("todo")])


def test_draws_are_seeded() -> None:
    own = {"terminal": 0.5, "file": 0.5, "todo": 0.5}
    draws = {seed: sample_distribution(own, seed) for seed in range(200)}
    assert all(sample_distribution(own, seed) == drawn for seed, drawn in draws.items())
    assert len(set(draws.values())) == 7
    assert 70 < sum("file" in drawn for drawn in draws.values()) < 130


@given(st.dictionaries(st.sampled_from(["terminal", "file", "web"]), st.floats(0.001, 1), min_size=1), st.integers())
def test_a_draw_is_never_empty(chances: dict[str, float], seed: int) -> None:
    drawn = sample_distribution(chances, seed)
    assert drawn
    assert set(drawn) <= set(chances)


def test_certain_and_impossible() -> None:
    assert sample_distribution({"terminal": 1, "file": 0}, "seed") == ("terminal",)
    for wrong in ({}, {"file": 0.0}, {"file": 2.0}):
        with pytest.raises(UserError):
            sample_distribution(wrong, 1)
    with pytest.raises(UserError, match="did you mean `file`"):
        sample_distribution({"fil": 1}, 1)


def test_named_distributions() -> None:
    assert sample_distribution("terminal_only", 1) == ("terminal", "file")
    with pytest.raises(UserError, match="did you mean `terminal_only`"):
        sample_distribution("terminalonly", 1)
    for chances in DISTRIBUTIONS.values():
        assert set(chances) <= set(known_toolsets())


def test_only_the_modules_of_the_wanted_toolsets_are_imported() -> None:
    code = (
        "import sys\nfrom hermes_rl.tools.catalogue import known_toolsets, resolve_toolsets\n"
        "assert 'todo' in known_toolsets()\nresolve_toolsets(['terminal'])\n"
        "print(*sorted(name.rpartition('.')[2] for name in sys.modules if 'hermes_rl.tools.toolsets.' in name))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["_process", "terminal"]


def test_a_toolset_has_the_name_of_its_module() -> None:
    assert {name: toolset.name for name, toolset in toolsets().items()} == {name: name for name in own_names()}


SOURCE = """
from hermes_rl.tools.base import Tool, Toolset


class Weigh(Tool):
    name = "weigh"
    description = "Weigh something."
    parameters = {"type": "object", "properties": {}, "required": []}

    async def call(self, args, runtime):
        return "7 kg"


SCALES = Toolset("scales", "Scales.", (Weigh(),))
"""


def test_a_toolset_of_a_package(install: Callable[..., Path]) -> None:
    points = {"hermes_rl.toolsets": "scales = lab:SCALES\nnothing = lab:Weigh\ntodo = lab:SCALES"}
    install("lab", SOURCE, points)
    assert names(resolve_toolsets(["scales", "todo"])) == ["weigh", "todo"]
    assert {"scales", "todo", "web"} <= set(known_toolsets())
    with pytest.raises(UserError, match="did you mean `scales`"):
        resolve_toolsets(["scale"])
    with pytest.raises(UserError, match=r"the toolset 'nothing' \(lab:Weigh\) is not a .*Toolset"):
        resolve_toolsets(["nothing"])
