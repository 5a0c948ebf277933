"""Artifacts: taken from a sandbox, kept on the host, laid into another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hermes_rl.rollouts.sandboxes import keep_artifacts, kept_artifacts
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import FileInfo, Sandbox, SandboxConfig
from hermes_rl.tools.artifacts import LIMIT, ArtifactFile, ArtifactRequest, RestoredArtifacts, TakenArtifact, collect


@pytest.fixture(params=["bubblewrap", "none"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def taken(sandbox: Sandbox, **request: str) -> TakenArtifact:
    found = await collect(sandbox, [ArtifactRequest("a", **request)], timeout=10)
    return found["a"]


async def test_files_folders_and_outputs(backend: str) -> None:
    async with create_sandbox(SandboxConfig(backend=backend)) as sandbox:
        await sandbox.run(
            "mkdir -p d/e; printf 'x\\0y' > d/f; echo run > d/e/g; chmod 755 d/e/g; ln -s /etc/passwd d/l"
        )
        await sandbox.run("mkfifo d/pipe")
        assert (await taken(sandbox, path="d/f")).files == (ArtifactFile("", b"x\0y", 0o644),)
        folder = await taken(sandbox, path="d")
        assert sorted(folder.files, key=lambda file: file.path) == [
            ArtifactFile("e/g", b"run\n", 0o755),
            ArtifactFile("f", b"x\0y", 0o644),
        ]
        assert folder.size == 7
        printed = await taken(sandbox, command="echo out; echo err >&2")
        assert printed.files == (ArtifactFile("", b"out\n", 0o644),)
        assert printed.digest != folder.digest


async def test_what_cannot_be_taken_is_a_problem_of_the_agent(backend: str) -> None:
    async with create_sandbox(SandboxConfig(backend=backend)) as sandbox:
        assert "No such file" in str((await taken(sandbox, path="missing")).problem)
        assert "exit status 3: why" in str((await taken(sandbox, command="echo why >&2; exit 3")).problem)
        await sandbox.run(f"truncate -s {LIMIT + 1} big; mkfifo pipe")
        assert "too large" in str((await taken(sandbox, path="big")).problem)
        assert "more than 64 MiB" in str((await taken(sandbox, command="cat big")).problem)
        assert (await taken(sandbox, path="pipe")).problem is not None
        await sandbox.run("rm big; mkdir many; cd many; seq 1 10001 | xargs touch")
        assert "10000 files and folders" in str((await taken(sandbox, path="many")).problem)


async def test_a_command_that_does_not_end(backend: str) -> None:
    async with create_sandbox(SandboxConfig(backend=backend)) as sandbox:
        found = await collect(sandbox, [ArtifactRequest("a", command="sleep 60")], timeout=0.2)
        assert found["a"].problem is not None


async def test_artifacts_are_restored_into_another_sandbox_and_removed() -> None:
    artifacts = {
        "patch": TakenArtifact("patch", "~/.artifacts/patch", (ArtifactFile("", b"diff", 0o644),)),
        "src": TakenArtifact(
            "src", "src", (ArtifactFile("a.py", b"new", 0o644), ArtifactFile("sub/b.py", b"b", 0o755))
        ),
    }
    async with create_sandbox(SandboxConfig()) as sandbox:
        await sandbox.write_file("src/a.py", b"old", 0o600)
        laid = RestoredArtifacts()
        await laid.lay(sandbox, artifacts)
        assert await sandbox.read_file("~/.artifacts/patch") == b"diff"
        assert await sandbox.read_file("src/a.py") == b"new"
        assert (await sandbox.stat("src/sub/b.py")).mode == 0o755
        for path in list(laid.replaced):
            await laid.remove(sandbox, path)
        assert await sandbox.read_file("src/a.py") == b"old"
        assert (await sandbox.stat("src/a.py")).mode == 0o600
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("src/sub/b.py")


def test_kept_on_the_host_as_files_and_folders_only(tmp_path: Path) -> None:
    artifacts = {
        "one": TakenArtifact("one", "x", (ArtifactFile("", b"1", 0o755),)),
        "tree": TakenArtifact("tree", "t", (ArtifactFile("a/b", b"2", 0o644), ArtifactFile("\udcff", b"3", 0o600))),
        "none": TakenArtifact("none", "n", problem="it is not there"),
    }
    for _ in range(2):  # a second attempt under the same id replaces the first
        record = keep_artifacts(tmp_path / "artifacts", "group/../7-0", artifacts)
    folder = tmp_path / "artifacts" / "group%2F..%2F7-0"
    assert (folder / "one").read_bytes() == b"1"
    assert (folder / "one").stat().st_mode & 0o777 == 0o711
    assert [path.name for path in (folder / "tree").iterdir()] == ["files.tar"]
    found = kept_artifacts(tmp_path, record, artifacts)
    assert {name: each.digest for name, each in found.items()} == {n: a.digest for n, a in artifacts.items()}
    assert [(file.path, file.mode) for file in found["tree"].files] == [("a/b", 0o644), ("\udcff", 0o644)]
    assert record["one"] == {
        "path": "artifacts/group%2F..%2F7-0/one",
        "target": "x",
        "files": 1,
        "bytes": 1,
        "sha256": artifacts["one"].digest,
    }
    assert record["none"] == {"problem": "it is not there"}
    assert list(tmp_path.iterdir()) == [tmp_path / "artifacts"]


@pytest.mark.parametrize(
    "path", ["x" * 4095, "/".join(["n" * 255] * 15), "\udcff\n\x7f/\u202e", "-rf", "d/" * 2000 + "f"]
)
def test_no_name_of_the_agent_is_one_on_this_machine(tmp_path: Path, path: str) -> None:
    artifact = TakenArtifact("a", "a", (ArtifactFile(path, b"x", 0o755), ArtifactFile(f"{path}2", b"", 0o600)))
    record = keep_artifacts(tmp_path / "artifacts", "r", {"a": artifact})
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["files.tar"]
    again = kept_artifacts(tmp_path, json.loads(json.dumps(record)), ["a"])["a"]
    assert again.files == (ArtifactFile(path, b"x", 0o755), ArtifactFile(f"{path}2", b"", 0o644))


@pytest.mark.parametrize("name", ["\u4e2d" * 30, "a" * 5000, "/" * 90, "\ud83d"])
def test_a_long_name_of_a_rollout_is_a_short_one_on_this_machine(tmp_path: Path, name: str) -> None:
    groups = {f"{name}{number}": bytes([number]) for number in (0, 1)}
    for rollout, data in groups.items():
        artifact = TakenArtifact(rollout, "x", (ArtifactFile("", data, 0o644),))
        record = keep_artifacts(tmp_path / "artifacts", rollout, {rollout: artifact})
        kept = kept_artifacts(tmp_path, json.loads(json.dumps(record)), [rollout])
        assert kept[rollout].files == artifact.files
    assert len(list((tmp_path / "artifacts").iterdir())) == 2


def test_what_an_earlier_version_kept_is_read(tmp_path: Path) -> None:
    (tmp_path / "artifacts/r/a/sub").mkdir(parents=True)
    (tmp_path / "artifacts/r/a/sub/f").write_bytes(b"x")
    files = (ArtifactFile("sub/f", b"x", 0o644),)
    said = {"path": "artifacts/r/a", "target": "t", "files": 1, "bytes": 1}
    record = {"a": {**said, "sha256": TakenArtifact("a", "t", files).digest}}
    assert kept_artifacts(tmp_path, record, ["a"])["a"].files == files


async def test_a_folder_that_is_listed_with_a_name_that_no_file_has_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def listed(path: str, *, limit: int = 0) -> list[FileInfo]:
        """List as programs of an image may that the agent has replaced."""
        return [FileInfo("../out", "file", 1, 0o644, 0.0)]

    async with create_sandbox(SandboxConfig()) as sandbox:
        await sandbox.run("mkdir d")
        monkeypatch.setattr(sandbox, "list_dir", listed)
        assert "no file can be named '../out'" in str((await taken(sandbox, path="d")).problem)


IN_THE_WAY = {
    "a folder where a file was": ("mkdir -p w/x; echo n > w/x/y", "mkdir w; echo o > w/x", "w/x"),
    "a file where a folder was": ("mkdir w; echo n > w/x", "mkdir -p w/x/y; echo o > w/x/y/z", "w/x/y/z"),
    "a file that nobody may write": ("mkdir w; echo n > w/x; chmod 444 w/x", "mkdir w; echo o > w/x", "w/x"),
    "over a file that nobody may write": ("mkdir w; echo n > w/x", "mkdir w; echo o > w/x; chmod 444 w/x", "w/x"),
    "over a link to a folder": ("mkdir w; echo n > w/x", "mkdir -p w d; ln -s ../d w/x", None),
    "over a link to nothing": ("mkdir w; echo n > w/x", "mkdir -p w; ln -s nothing/there w/x", None),
}


@pytest.mark.parametrize("how", sorted(IN_THE_WAY))
async def test_what_is_in_the_way_of_an_artifact_makes_room_and_comes_back(how: str) -> None:
    left, image, before = IN_THE_WAY[how]
    async with create_sandbox(SandboxConfig()) as own, create_sandbox(SandboxConfig(setup=(image,))) as fresh:
        await own.run(left)
        laid = RestoredArtifacts()
        await laid.lay(fresh, {"w": await taken(own, path="w")})
        assert (await fresh.run("find w -type f | xargs cat")).output == "n\n"
        replaced = [path for path, file in laid.replaced.items() if file is not None]
        assert replaced == ([] if before is None else [fresh.resolve(before)])
        for path in [*replaced, *(path for path in laid.replaced if path not in replaced)]:
            await laid.remove(fresh, path)
        assert (await fresh.run("cat $(find w -type f)")).output == ("" if before is None else "o\n")


LEAVES = "#!/bin/sh\ntouch /tmp/ran\nsetsid sleep 777 >/dev/null 2>&1 &\ncat 2>/dev/null\n"
GIT = "git -c user.name=a -c user.email=a@localhost"
CONFIGURED = {
    "fsmonitor": "git config core.fsmonitor /tmp/evil",
    "fsmonitor of the home": "git config --global core.fsmonitor /tmp/evil",
    "clean filter": "git config filter.x.clean /tmp/evil; echo '* filter=x' > .gitattributes",
    "filter process": "git config filter.x.process /tmp/evil; echo '* filter=x' > .git/info/attributes",
    "text conversion": "git config diff.x.textconv /tmp/evil; echo '* diff=x' > .gitattributes",
    "differ": "git config diff.x.command /tmp/evil; echo '* diff=x' > .gitattributes",
    "external differ": "git config diff.external /tmp/evil",
    "hooks": "git config core.hooksPath /tmp/hooks; mkdir /tmp/hooks; cp /tmp/evil /tmp/hooks/post-index-change",
    "own hooks": "cp /tmp/evil .git/hooks/post-index-change",
    "included file": "git config -f ../more core.fsmonitor /tmp/evil; git config include.path ../../more",
    "another configuration": "git config extensions.worktreeConfig true; cp .git/config .git/config.worktree; "
    "git config -f .git/config.worktree core.fsmonitor /tmp/evil",
    "a common folder": "cp -r .git /tmp/common; git config -f /tmp/common/config core.fsmonitor /tmp/evil; "
    "echo /tmp/common > .git/commondir",
    "pager": "git config core.pager /tmp/evil; git config pager.diff /tmp/evil",
    "alias": "git config alias.add '!/tmp/evil'; git config alias.diff '!/tmp/evil'",
    "a repository inside": "mkdir sub; (cd sub; git init -q; touch x; git add x; " + GIT + " commit -qm sub; "
    "git config core.fsmonitor /tmp/evil); git add sub; touch sub/y",
}


@pytest.mark.parametrize("how", CONFIGURED)
async def test_taking_a_patch_runs_nothing_that_the_agent_has_configured(how: str) -> None:
    async with create_sandbox(SandboxConfig(workdir="/home/user/repo")) as sandbox:
        await sandbox.write_file("/tmp/evil", LEAVES.encode(), 0o755)
        begin = f"git init -q && echo a > kept && git add -A && {GIT} commit -qm base && git tag base"
        done = await sandbox.run(f"{begin} && echo b >> kept && echo c > new && rm -f /tmp/ran; {CONFIGURED[how]}")
        await sandbox.run("rm -f /tmp/ran")
        patch = await taken(sandbox, command="git add -A && git diff --cached --binary base")
        assert patch.problem is None, (done.output, patch.problem)
        assert b"+b\n" in patch.files[0].data and b"+++ b/new" in patch.files[0].data
        assert (await sandbox.run("ls /tmp/ran; ps ax | grep '[s]leep 777'")).stdout.count(b"sleep 777") == 0
        with pytest.raises(FileNotFoundError):
            await sandbox.stat("/tmp/ran")


REPOSITORIES = {
    "where the command runs": "git add -A && git diff --cached --binary base",
    "above it": "mkdir -p deep && cd deep && git add -A .. && git diff --cached base",
    "by -C": "cd / && git -C /home/user/repo add -A && git -C /home/user/repo diff --cached base",
    "through a pipe": "(git add -A) && git diff --cached base | cat",
    "committed": "git add -A && git commit -qm done && git format-patch --stdout base",
    "not added": "git add -N . && git diff",
}


@pytest.mark.parametrize("how", REPOSITORIES)
async def test_a_patch_is_what_git_says_in_any_place_and_way(how: str) -> None:
    async with create_sandbox(SandboxConfig(workdir="/home/user/repo")) as sandbox:
        files = "echo skipped > .gitignore && echo a | tee kept skipped"
        begin = f"git init -q && {files} && git add -Af && {GIT} commit -qm base"
        await sandbox.run(f"{begin} && git tag base && git pack-refs --all && echo b >> kept && echo c > new")
        patch = await taken(sandbox, command=REPOSITORIES[how])
        assert patch.problem is None
        said = patch.files[0].data
        assert b"+b\n" in said and b"+++ b/new" in said and b"skipped" not in said


async def test_edit_of_equal_size_and_time_is_in_the_patch() -> None:
    """Git goes by times in seconds and by sizes, and reads what it cannot tell apart by them."""
    begin = 'while [ "$(date +%1N)" -gt 3 ]; do sleep 0.05; done; git init -q && echo a > kept && git add -A'
    async with create_sandbox(SandboxConfig(workdir="/home/user/repo")) as sandbox:
        await sandbox.run(f"{begin} && {GIT} commit -qm base && echo b > kept; sleep 1.1")
        patch = await taken(sandbox, command="git add -A && git diff --cached HEAD")
        assert "+b" in patch.files[0].data.decode()


async def test_processes_left_by_an_artifact_command_are_killed(backend: str) -> None:
    async with create_sandbox(SandboxConfig(backend=backend)) as sandbox:
        await taken(sandbox, command="(trap '' TERM HUP; exec setsid sleep 778) >/dev/null 2>&1 & echo out")
        assert b"sleep 778" not in (await sandbox.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout.replace(
            b"cat ", b""
        )
    async with create_sandbox(SandboxConfig(backend=backend, keep_processes=True)) as sandbox:
        await taken(sandbox, command="setsid sleep 779 >/dev/null 2>&1 & echo out")
        waiting = "until cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -q 'sleep 77[9]'; do :; done"
        assert not (await sandbox.run(waiting, timeout=60)).timed_out


async def test_image_without_clean_checkout_programs_still_gives_a_patch() -> None:
    setup = ("mkdir /tmp/own && ln -s /usr/bin/git /tmp/own/git",)
    async with create_sandbox(SandboxConfig(workdir="/home/user/repo", setup=setup)) as sandbox:
        await sandbox.run(f"git init -q && echo a > kept && git add -A && {GIT} commit -qm base && echo b >> kept")
        await sandbox.write_file("/tmp/evil", LEAVES.encode(), 0o755)
        await sandbox.run("git config core.fsmonitor /tmp/evil")
        patch = await taken(sandbox, command="export PATH=/tmp/own; git add -A && git diff --cached HEAD")
        assert patch.problem is None and b"+b\n" in patch.files[0].data
        with pytest.raises(FileNotFoundError):
            await sandbox.stat("/tmp/ran")
