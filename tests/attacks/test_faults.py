"""Each closed fault of the reviews has relatives that are tried, here or beside the code that it was in.

A relative is an input of the same kind that the review did not try.
"""

from __future__ import annotations

import math
import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.commands import ROOT

RELATIVES: dict[str, tuple[str, ...]] = {
    "B2": ("agent.test_endpoint::IDLE",),
    "E5": (
        "cli.test_terminal_bench_2::test_a_reward_that_the_agent_protects_from_the_grader_is_none",
        "cli.test_terminal_bench_2::test_script_that_ends_well_without_its_reward_scores_0",
        "cli.test_terminal_bench_2::test_reward_outside_0_to_1_is_scored_as_zero",
    ),
    "E17": ("spec.test_template_limits::test_a_template_that_does_not_end_or_multiplies_text_is_refused",),
    "E21": ("cli.test_harbor::test_tests_of_one_step_are_not_there_in_the_next",),
    "E22": ("attacks.test_relatives::METRICS",),
    "E23": ("service.test_requests::LARGE",),
    "G1": (
        "tools.test_mcp_tools::test_failed_start_is_not_agents_doing_before_it_has_acted",
        "tools.test_mcp_tools::test_start_that_takes_too_long_is_never_agents_doing",
        "tools.test_mcp_tools::test_few_servers_start_at_once",
    ),
    "G2": (
        "tools.test_mcp_http::test_expired_session_is_reopened_and_the_call_is_retried",
        "tools.test_mcp_http::test_answer_404_of_the_new_session_too_is_the_models_to_read",
        "tools.test_mcp_http::test_an_answer_of_the_http_layer_is_an_infrastructure_failure",
        "tools.test_mcp_http::test_an_answer_that_is_none_is_an_infrastructure_failure",
    ),
    "G4": ("attacks.test_tool_servers::LEFT",),
    "G6": (
        "tools.test_mcp_http::test_rollouts_have_separate_sessions_unless_shared",
        "tools.test_mcp_http::test_a_call_that_waits_is_not_lost_with_its_session",
    ),
    "H2": ("real.blind_answers::CONSTANTS",),
    "H4": ("attacks.test_relatives::REFUSALS",),
    "H5": ("real.port_attacks::EMPTIED",),
    "H6": ("attacks.test_relatives::PORT_PATHS",),
    "H7": ("real.port_attacks::WORST", "cli.hostile_answers::POWERS"),
}
"""Faults whose relatives have no number before their name: the tests, or the tables of inputs."""
LEAST = 5
"""Cases of a fault: itself, and four relatives."""


def cases(location: str) -> int:
    """Return the number of entries of a table, or of cases of a test."""
    module, _, name = location.partition("::")
    found = getattr(import_module(f"tests.{module}"), name)
    if not callable(found):
        return len(found)
    marks = getattr(found, "pytestmark", [])
    return math.prod(len(list(mark.args[1])) for mark in marks if mark.name == "parametrize")


@pytest.mark.parametrize("fault", RELATIVES)
def test_fault_has_at_least_four_relatives(fault: str) -> None:
    assert sum(map(cases, RELATIVES[fault])) >= LEAST


def test_the_faults_have_a_hundred_and_twenty_relatives_here() -> None:
    texts = [path.read_text("utf-8") for path in Path(__file__).parent.glob("*.py")]
    named = {name for text in texts for name in re.findall(r"\"([ABEGH]\d+[: ][^\"]+)\"", text)}
    counted = {fault for table in RELATIVES.values() for fault in table if fault.startswith("attacks.")}
    assert len(named) + sum(map(cases, counted)) >= 120


def test_each_row_of_the_threat_model_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "security.md").read_text("utf-8")
    (table,) = re.findall(r"^\| attacker \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    for row in table.splitlines():
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row.split(" | ")[-1])
        assert named, row
        for file, test in named:
            assert re.search(rf"^(async )?def {test}\(", Path(ROOT, "tests", file).read_text("utf-8"), re.MULTILINE), (
                test
            )
