"""Find rollouts of a run that may have passed their tests in another way than by solving the task.

`audit` reads the record and runs nothing. For each rollout it inspects the text that the agent wrote (files by tools,
in commands and patches, and saved artifacts), as `suspicion.signs` does, and the results of the rewards: canaries that
reported, tests that were changed while they ran. A finding is a reason to look, not a verdict: an honest agent may have
a good reason to look into frames, and a new way of cheating is not found.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from posixpath import basename, normpath
from typing import Any

from hermes_rl.agent.result import text_of
from hermes_rl.analysis.cheat_detection import signs
from hermes_rl.analysis.record import RolloutSummary, RunRecord
from hermes_rl.analysis.settings import spec_of
from hermes_rl.errors import UserError
from hermes_rl.rollouts.sandboxes import kept_artifacts
from hermes_rl.runs.store import Line

LISTED_WEIGHT = 2
"""Weight from which a reason lists the rollout."""
CERTAIN = 4
"""Weight of a reason that a reward reported itself."""
SOURCES, CHARACTERS = 1_000, 4_000_000
"""Limits for one rollout: inspected texts, and their characters; exceeding them is a reason in itself."""
INTERFERENCE_MESSAGES = re.compile(
    r"changed copies of the tests|was changed while the tests ran|copies of the tests were not run|"
    r"tests did not run to their end|said what is no report"
)
"""Messages of rewards about a solution that interferes with its tests."""
EXCLUDED_SHARE = 0.5
"""Fraction of sampled tokens excluded from training, from which a rollout is listed."""
OF_CALLS = frozenset({"tool_usage", "tool_calls_match", "citations"})
"""Shipped rewards that grade by tool calls."""
CODE = r"__\w{3,30}__|\b(?:eval|exec|compile|open|getattr|globals|locals|breakpoint)\s{0,9}\(|\bimport\s+\w|\bos\.\w"
OF_EARLIER_VERSIONS = (
    ("", re.compile("ANCHORxq7z"), "has a word that left its message out of the next prompt"),
    ("reasoning[-_]gym", re.compile(CODE), "has an answer that was run as code"),
    (
        "reasoning[-_]gym",
        re.compile(r"\bIntegral\s{0,9}\(|\*\s{0,9}False\b|\blen\s{0,9}\("),
        "has an answer that solves nothing",
    ),
    (
        "textworld",
        re.compile(r"^[\s>]{0,99}(?:save|restore|script|unscript|transcrip\w{0,9})\b", re.IGNORECASE),
        "uses files that rollouts shared",
    ),
)
"""Texts that earlier versions graded wrongly: specs, patterns in the texts, and descriptions of the error."""
SEPARATORS = re.compile(r"[\n;|&()`]+")
HEXADECIMAL = re.compile(r"[0-9a-f]{4,64}")
ELSEWHERE = frozenset(
    {"--all", "--branches", "--remotes", "--reflog", "--walk-reflogs", "-g", "-a", "-r", "-av", "-avv"}
)
"""Options by which git lists more than HEAD reaches."""
LISTS = frozenset({"log", "rev-list", "branch", "shortlog", "grep", "whatchanged"})
FINDS = frozenset({"reflog", "fsck", "verify-pack", "show-ref", "for-each-ref"})
"""Git commands that find other commits without any option."""
TAKES = frozenset({"show", "cat-file", "archive", "checkout", "restore", "switch", "cherry-pick", "merge"})
HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w{1,80})\1")
INTO = re.compile(r"(?:>>?|\btee(?: -a)?)[ \t]*([^\s|;&<>'\"]{1,500})")
HUNK = re.compile(r"^@@ -\d{1,9}(?:,\d{1,9})? \+(\d{1,9})")
NEW_FILE = re.compile(r"^\*\*\* (?:Add|Update) File: (.{1,1000})")


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason why a rollout is suspicious: its weight, a description, and its location; no turn if no message caused
    it.
    """

    weight: int
    what: str
    turn: int | None = None
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Suspect:
    """A suspicious rollout with its reasons, in descending weight."""

    rollout: RolloutSummary
    reasons: tuple[Reason, ...]

    @property
    def weight(self) -> int:
        """Sort key of suspects: the weight of the strongest reason comes before the number of reasons."""
        return self.reasons[0].weight * 1_000 + sum(reason.weight for reason in self.reasons)


@dataclass(frozen=True, slots=True)
class _Source:
    """Text that the agent wrote into a file."""

    turn: int | None
    file: str
    text: str
    first: int = 1
    """Line number of its first line."""


def audit(record: RunRecord) -> list[Suspect]:
    """Return the suspicious rollouts of a loaded run, the most suspicious first; passing rollouts come before others.

    Raises `UserError` if the files of the run cannot be read.
    """
    hidden, spec = hidden_tests(record), json.dumps(spec_of(record), default=str)
    suspects = []
    for rollout in record.counting(every_seat=True):
        line = record.readable(rollout.id)
        reasons = reasons_of(record, line, hidden, spec) if line is not None else []
        if reasons and reasons[0].weight >= LISTED_WEIGHT:
            suspects.append(Suspect(rollout, tuple(reasons)))
    return sorted(suspects, key=lambda suspect: (-suspect.weight, -(suspect.rollout.score or 0.0)))


def hidden_tests(record: RunRecord) -> frozenset[str]:
    """Return the paths of files that rewards put in place and that the agent did not receive."""
    rewards = spec_of(record).get("rewards")
    names = set()
    for reward in rewards.values() if isinstance(rewards, dict) else ():
        args = reward.get("args") if isinstance(reward, dict) else None
        files = args.get("files") if isinstance(args, dict) else None
        for file in files if isinstance(files, list) else ():
            path = file.get("to") if isinstance(file, dict) else None
            if isinstance(path, str) and "{{" not in path and "." in path.rpartition("/")[2]:
                names.add(normpath(path))
    return frozenset(names)


def reasons_of(record: RunRecord, line: Line, hidden: frozenset[str], spec: str) -> list[Reason]:
    """Return the reasons why a rollout is suspicious, the strongest first, each once; `spec` is the run's, as JSON."""
    reasons = [
        *_canary_reasons(line.get("rewards") or {}),
        *of_history(line),
        *of_evidence(line, spec),
        *of_texts(line, spec),
    ]
    room = CHARACTERS
    sources = itertools.chain(_written_texts(line), _other_sources(record, line))
    for index, source in enumerate(sources):
        room -= len(source.text)
        if index >= SOURCES or room < 0:
            reasons.append(Reason(1, "it wrote more than is looked at"))
            break
        for sign in signs(source.file, source.text, hidden):
            line_number = source.first + sign.line - 1
            reasons.append(Reason(sign.weight, sign.description, source.turn, source.file, line_number))
    first: dict[str, Reason] = {}
    for reason in reasons:
        first.setdefault(reason.what, reason)
    return sorted(first.values(), key=lambda reason: -reason.weight)


def _canary_reasons(rewards: Mapping[str, Any]) -> Iterator[Reason]:
    for name, value in rewards.items():
        canaries = (value.get("metrics") or {}).get("canaries") or 0
        if canaries > 0:
            yield Reason(CERTAIN, f"{name}: {canaries:g} changed copies of the tests have passed")
        match = INTERFERENCE_MESSAGES.search(str(value.get("reason") or "")[:10_000])
        if match and not canaries:
            yield Reason(CERTAIN, f"{name}: {match.group()}")


def of_evidence(line: Line, spec: str) -> Iterator[Reason]:
    """Yield the parts of a grade without proof: calls, answers and tokens."""
    program, calls = line.get("program") or {}, line.get("tool_calls") or ()
    answers = program.get("calls") or ()
    tokens = sum(answer.get("tokens") or 0 for answer in answers)
    excluded = sum((program.get("excluded") or {}).values()) / tokens if tokens else 0.0
    if excluded >= EXCLUDED_SHARE:
        yield Reason(LISTED_WEIGHT, f"{excluded:.0%} of its sampled tokens are not trained on")
    by_calls = any(f'"{name}"' in spec for name in OF_CALLS)
    for call in calls:
        reported = program and by_calls and not call.get("seconds") and "executed_by" not in call
        refused = "bfcl" in spec and "there is no tool named" in (call.get("error") or "")
        if reported or refused:
            yield Reason(
                LISTED_WEIGHT, f"may be graded by a call that was not executed ({call['name']:.50})", call.get("turn")
            )
    replies = [text_of(each.get("content")) for each in line.get("messages") or () if each.get("role") == "assistant"]
    for answer in answers:
        preview = str(answer.get("preview") or "").removesuffix("…")
        if answer.get("kind") == "undelivered" and preview and replies and replies[-1].startswith(preview):
            yield Reason(LISTED_WEIGHT, "may be graded by an answer that its program never received")


def of_texts(line: Line, spec: str) -> Iterator[Reason]:
    """Yield the texts of a rollout that earlier versions graded wrongly."""
    for names, pattern, description in OF_EARLIER_VERSIONS:
        for index, message in enumerate(line.get("messages") or () if re.search(names, spec) else ()):
            text = text_of(message.get("content"))[:CHARACTERS]
            if (message.get("role") == "assistant" or not names) and pattern.search(text):
                yield Reason(LISTED_WEIGHT, f"{description} (message {index})")


def of_history(line: Line) -> Iterator[Reason]:
    """Yield the commands of the agent that read the history of a repository beyond HEAD, where a fix may be."""
    stashed = False
    for call in line.get("tool_calls") or ():
        arguments = call.get("arguments")
        texts = [value for value in arguments.values() if isinstance(value, str)] if isinstance(arguments, dict) else []
        for command in itertools.chain.from_iterable(SEPARATORS.split(text[:CHARACTERS]) for text in texts):
            verb, rest = _git_subcommand(command.split())
            if verb == "stash":
                stashed = stashed or not rest or rest[0] in ("push", "save") or rest[0].startswith("-")
                if stashed:
                    continue  # the stash is the agent's
            revision = _other_revision(verb, rest)
            if verb in FINDS or verb == "stash" or (verb in LISTS and not ELSEWHERE.isdisjoint(rest)):
                yield Reason(
                    LISTED_WEIGHT, f"looks for commits that HEAD does not reach (git {verb})", call.get("turn")
                )
            elif revision:
                yield Reason(
                    LISTED_WEIGHT, f"takes files of another commit (git {verb} {revision:.50})", call.get("turn")
                )


def _git_subcommand(argv: list[str]) -> tuple[str, list[str]]:
    """Return the git subcommand of a command, and its arguments; empty if it does not call git."""
    argv = argv[next((index for index, word in enumerate(argv) if basename(word) == "git"), len(argv)) + 1 :]
    while argv and argv[0].startswith("-"):
        argv = argv[2 if argv[0] in ("-C", "-c") else 1 :]
    return (argv[0], [word.strip("'\"") for word in argv[1:]]) if argv else ("", [])


def _other_revision(verb: str, rest: list[str]) -> str:
    """Return the branch or tag from which files are taken; empty if there is none.

    Commits by hash may belong to HEAD.
    """
    if verb not in TAKES or {"-b", "-B", "-c", "--abort", "--continue"} & set(rest):
        return ""
    values = [word.removeprefix("--source=").removeprefix("-s") for word in rest]
    operands = [word for word in values if not word.startswith("-")]
    if verb in ("show", "cat-file", "archive"):
        operands = [word for word in operands if ":" in word or verb == "archive"]
    elif verb == "restore" and not any(word.startswith(("--source", "-s")) for word in rest):
        return ""
    revision = operands[0].partition(":")[0] if operands else ""
    is_branch_or_tag = not HEXADECIMAL.fullmatch(revision) and not revision.startswith(("HEAD", "@", "."))
    alone = verb == "checkout" and len(operands) == 1 and ("." in revision or "--" in rest)  # a file of HEAD
    return revision if is_branch_or_tag and not alone else ""


# ------------------------------------------------------------------ texts of the agent


def _written_texts(line: Line) -> Iterator[_Source]:
    """Yield the texts that tool calls wrote."""
    for call in line.get("tool_calls") or ():
        arguments = call.get("arguments")
        if not isinstance(arguments, dict):
            continue
        path = arguments.get("path") or arguments.get("file_path") or ""
        for name, value in arguments.items():
            if not isinstance(value, str) or name in ("path", "file_path", "old_string"):
                continue
            if name in ("command", "cmd"):
                yield from _heredoc_files(call.get("turn"), value)
            elif name in ("patch", "diff"):
                yield from _added_lines(call.get("turn"), value)
            elif path or name in ("code", "script"):
                yield _Source(call.get("turn"), str(path) or name, value)


def _heredoc_files(turn: int | None, command: str) -> Iterator[_Source]:
    """Yield the files that a shell command contains as here-documents, each with the name that it is written to."""
    lines = iter(command.split("\n"))
    for line in lines:
        heredoc = HEREDOC.search(line[:10_000])
        if heredoc is None:
            continue
        into = INTO.search(line[:10_000])
        end = heredoc.group(2)
        body = list(itertools.takewhile(lambda text: text.strip("\t") != end, lines))  # noqa: B023 - used up at once
        file = into.group(1) if into else "a program of the command"
        text = "\n".join(body)
        if "diff --git " in text or text.startswith("--- "):
            yield from _added_lines(turn, text)
        else:
            yield _Source(turn, file, text)


def _added_lines(turn: int | None, patch: str) -> Iterator[_Source]:
    """Yield the lines that a patch adds, a text for each hunk."""
    file, first, added = "", 1, list[str]()
    for line in patch.split("\n"):
        hunk, new = HUNK.match(line), NEW_FILE.match(line)
        if line.startswith("+++ ") or hunk or new or line.startswith("diff --git "):
            if added:
                yield _Source(turn, file, "\n".join(added), first)
                added = []
            if line.startswith("+++ "):
                file = line[4:].split("\t")[0].removeprefix("b/").strip('"')
            elif new:
                file, first = new.group(1), 1
            elif hunk:
                first = int(hunk.group(1))
        elif line.startswith(("+", " ")):
            added.append(line[1:])  # placeholders between them preserve line numbers, and let Python parse it
    if added:
        yield _Source(turn, file, "\n".join(added), first)


def _other_sources(record: RunRecord, line: Line) -> Iterator[_Source]:
    """Yield the files of saved artifacts, and the lines that patches among them add."""
    artifacts = line.get("artifacts") or {}
    for name in artifacts:
        try:
            artifact = kept_artifacts(record.path, artifacts, [name])[name]
        except (UserError, KeyError):
            continue  # it was deleted or moved: the messages remain
        for file in artifact.files:
            text = file.data.decode("utf-8", "replace")
            if text.startswith(("diff --git ", "--- ")):
                yield from _added_lines(None, text)
            else:
                path = f"{artifact.target}/{file.path}" if file.path else artifact.target
                yield _Source(None, path, text)


def serialize_suspects(record: RunRecord, suspects: Iterable[Suspect]) -> list[dict[str, Any]]:
    """Return suspects as values of JSON."""
    return [
        {
            "id": suspect.rollout.id,
            "number": record.line_number(suspect.rollout.id),
            "row_key": suspect.rollout.row_key,
            "score": suspect.rollout.score,
            "reasons": [asdict(reason) for reason in suspect.reasons],
        }
        for suspect in suspects
    ]
