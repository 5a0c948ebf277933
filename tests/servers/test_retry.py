"""The retry policy by itself: what is tried again, how long it waits, what it says in the end."""

from __future__ import annotations

from email.utils import format_datetime

import pytest

from hermes_rl.errors import ServerFailure
from hermes_rl.scrubber import EXCERPT, Scrubber
from hermes_rl.servers.transport import (
    AttemptFailed,
    RetryPolicy,
    failed_status,
    is_context_overflow,
    public_url,
    retry_after,
    with_retries,
)
from tests.servers.loopback_server import Naps


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 529])
def test_passing_troubles_are_tried_again(status: int) -> None:
    assert failed_status(status, {}, "", "").retryable


@pytest.mark.parametrize("status", [301, 307, 400, 401, 403, 404, 422])
def test_what_will_not_change_is_not(status: int) -> None:
    assert not failed_status(status, {}, "", "").retryable


def test_an_exhausted_account_is_not_tried_again() -> None:
    assert not failed_status(429, {}, '{"error": {"code": "insufficient_quota"}}', "").retryable


def test_retry_after_is_a_number_or_a_date() -> None:
    from datetime import UTC, datetime

    later = format_datetime(datetime.fromtimestamp(1_000_060, UTC), usegmt=True)
    assert retry_after("2.5") == 2.5
    assert retry_after(later, now=lambda: 1_000_000.0) == 60
    assert retry_after(later, now=lambda: 2_000_000.0) == 0
    assert [retry_after(value) for value in (None, "soon", "", "nan", "inf")] == [None] * 5
    beyond = ("Jan  999999999999999999999  31  00:00:00", "-9999 Feb 0001 -1:0:0 999999999999999999999 9999 -1:0:0")
    assert [retry_after(value) for value in beyond] == [None, None]


def test_backoff_doubles_up_to_its_cap() -> None:
    policy = RetryPolicy(base=1, cap=10, random=lambda: 1.0)
    assert [policy.pause(n, AttemptFailed("x")) for n in (1, 2, 3, 4, 5, 5000)] == [1, 2, 4, 8, 10, 10]
    assert RetryPolicy(random=lambda: 0.0).pause(5, AttemptFailed("x")) == 0


def test_a_pause_is_at_least_what_the_server_asked_for_within_reason() -> None:
    policy = RetryPolicy(random=lambda: 0.5)
    assert 7 <= policy.pause(1, AttemptFailed("x", retry_after=7)) <= 8
    assert policy.pause(1, AttemptFailed("x", retry_after=1e6)) <= policy.longest_wait + policy.base


async def _run(policy: RetryPolicy, outcomes: list[AttemptFailed | str]) -> tuple[str, int]:
    async def attempt() -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, str):
            return outcome
        raise outcome

    return await with_retries(policy, "policy", attempt, lambda: False)


async def test_the_first_answer_counts(policy: RetryPolicy, naps: Naps) -> None:
    assert await _run(policy, [AttemptFailed("a"), AttemptFailed("b"), "yes"]) == ("yes", 3)
    assert naps.seconds == [0.5, 1.0]


async def test_failure_lists_the_cause_of_every_attempt(policy: RetryPolicy) -> None:
    failures: list[AttemptFailed | str] = [AttemptFailed("a")] * 7 + [AttemptFailed("b")]
    with pytest.raises(ServerFailure) as caught:
        await _run(policy, failures)
    assert str(caught.value) == "server 'policy' gave no usable answer in 8 attempts: [1-7] a; [8] b"
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert len(caught.value.__cause__.exceptions) == 8


async def test_timeouts_have_a_separate_retry_limit(policy: RetryPolicy) -> None:
    with pytest.raises(ServerFailure, match="3 attempts"):
        await _run(policy, [AttemptFailed("slow", timed_out=True) for _ in range(9)])


async def test_nothing_is_tried_again_that_will_not_change(policy: RetryPolicy, naps: Naps) -> None:
    with pytest.raises(ServerFailure, match=r"1 attempt: \[1\] denied"):
        await _run(policy, [AttemptFailed("denied", retryable=False)])
    assert naps.seconds == []


@pytest.mark.parametrize(
    "text",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens",
        "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
        '{"error": {"code": "context_length_exceeded"}}',
        "the request exceeds the available context size",
        "max_tokens must be at least 1, got 0.",
        "max_completion_tokens must be at least 1, got -3",
        "prompt is too long: 210000 tokens > 200000 maximum",
        "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
    ],
)
def test_context_overflow_is_recognised_by_status_and_text(text: str) -> None:
    assert is_context_overflow(400, text)
    assert not is_context_overflow(429, text)


@pytest.mark.parametrize("text", ["invalid tool schema", "temperature must be 1", "unknown field 'context'"])
def test_other_refusals_are_not_context_overflows(text: str) -> None:
    assert not is_context_overflow(400, text)


def test_no_form_of_a_secret_is_shown() -> None:
    secret = 'k/"ey+123'
    scrubber = Scrubber([secret, "", "x"])
    for form in (secret, 'k/\\"ey+123', "k%2F%22ey%2B123", "Bearer abcdef", "sk-proj-abcdefghijk"):
        assert scrubber.scrub(f"a {form} z") == "a *** z"
    assert scrubber.scrub("x marks the spot") == "x marks the spot"


def test_an_excerpt_is_one_short_line_and_never_half_a_secret() -> None:
    excerpt = Scrubber(["secret-value"]).excerpt("a \n" * 140 + "secret-value" * 20)
    assert len(excerpt) <= EXCERPT
    assert "secret" not in excerpt
    assert "\n" not in excerpt


def test_an_address_is_shown_without_credentials() -> None:
    assert public_url("https://me:pw@host:1/v1?key=abc") == "https://host:1/v1"
