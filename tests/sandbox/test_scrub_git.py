"""`scrub_git`: nothing that HEAD does not reach is left in the repositories of a sandbox, or it does not start."""

from __future__ import annotations

import pytest

from hermes_rl.data.rows import Row
from hermes_rl.errors import SandboxFailure
from hermes_rl.rollouts.sandboxes import sandbox_config
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.spec.load import parse_spec

REPOSITORY = """
git init -q "$1" && cd "$1"
git config user.email a@b.c; git config user.name x
echo bug > a.py; git add .; git commit -qm base; git branch old; git tag v1
echo fixed > a.py; git commit -qam "the fix"; git tag -a v2 -m fix; git notes add -m fixed
git update-ref refs/remotes/origin/main HEAD; git symbolic-ref refs/remotes/origin/HEAD refs/remotes/origin/main
PACK
echo stashed > a.py; git stash -q
git checkout -q HEAD~1
echo staged > b.py; git add b.py; rm b.py
"""
LEFT = (
    "git log --all --oneline; git for-each-ref --format='%(refname)'; git stash list; git reflog; "
    "git cat-file --batch-all-objects --batch-check='%(objecttype)' | sort | uniq -c; cat a.py; git status --short"
)


def spec_with(setup: str, name: str = ".") -> str:
    lines = setup.replace("$1", name).strip().replace("\n", "\n        ")
    head = "dataset: {items: [{}]}\nprompt: {user: a}\nsandbox:\n  scrub_git: true\n  setup:\n    - |\n"
    return f"{head}        {lines}\n"


ELSEWHERE = "cp -r .git/objects ~/store; rm -rf .git/objects/??; echo ~/store > .git/objects/info/alternates"


@pytest.mark.parametrize(
    "pack",
    ["", "git gc -q", "git repack -adq; for p in .git/objects/pack/*.pack; do touch ${p%pack}keep; done", ELSEWHERE],
)
async def test_what_head_does_not_reach_is_removed(pack: str) -> None:
    setup = REPOSITORY.replace("PACK", pack)
    nested = setup + "(" + REPOSITORY.replace("PACK", "").replace("$1", "inner") + ")"
    config = sandbox_config(parse_spec(spec_with(nested)), Row("r", {}, 0, "d"))
    sandbox = create_sandbox(config)
    try:
        await sandbox.start()
        for directory in (".", "inner"):
            found = [line.split() for line in (await sandbox.run(f"cd {directory}; {LEFT}")).output.splitlines()]
            assert found[0][1:] == ["base"]
            rest = [line for line in found[1:] if line[0] != "??"]
            assert rest == [
                ["refs/heads/old"],
                ["refs/tags/v1"],
                ["1", "blob"],
                ["1", "commit"],
                ["1", "tree"],
                ["bug"],
            ]
    finally:
        await sandbox.close()


@pytest.mark.parametrize(
    ("setup", "told"),
    [
        ("true", "is in no git repository"),
        ("git init -q .", "has no commit"),
        (REPOSITORY.replace("PACK", "") + "git worktree add -q ../other old", "has linked worktrees"),
        (REPOSITORY.replace("PACK", "") + "touch .git/packed-refs.lock", "packed-refs.lock"),
    ],
)  # fmt: skip
async def test_set_up_fails_when_something_is_left(setup: str, told: str) -> None:
    sandbox = create_sandbox(sandbox_config(parse_spec(spec_with(setup)), Row("r", {}, 0, "d")))
    with pytest.raises(SandboxFailure, match=told):
        await sandbox.start()
