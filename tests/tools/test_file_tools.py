"""The tools read_file, write_file and search_files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.tools.search import Query, search
from tests.rootfs import small_root
from tests.tools.calling import Player

ODD = ["a b.txt", "new\nline", "quo'te\"s", "größer ☕.py", "-rf", "$(id)", "*?[x]"]


@pytest.mark.parametrize("name", ODD)
async def test_any_name(play: Player, name: str) -> None:
    await play("write_file", path=name, content="hello\n")
    assert (await play("read_file", path=name))["content"] == "1|hello"
    found = await play("search_files", pattern="hel+o")
    assert [match["path"] for match in found["matches"]] == [name]
    assert (await play("patch", path=name, old_string="hello", new_string="bye"))["success"]
    assert (await play("read_file", path=name))["content"] == "1|bye"


async def test_write_answers_and_makes_folders(play: Player) -> None:
    assert await play("write_file", path="a/b/c.txt", content="größer") == {
        "bytes_written": 8,
        "path": "a/b/c.txt",
    }
    sandbox = await play.runtime.sandbox()
    assert await sandbox.read_file("a/b/c.txt") == "größer".encode()


async def test_pages(play: Player) -> None:
    await play("write_file", path="f", content="".join(f"line {i}\n" for i in range(1, 1201)))
    first = await play("read_file", path="f")
    assert first["content"].startswith("1|line 1\n2|line 2")
    assert (first["total_lines"], first["truncated"]) == (1200, True)
    assert "offset=501" in first["hint"]
    last = await play("read_file", path="f", offset=1200, limit=10)
    assert (last["content"], last["truncated"]) == ("1200|line 1200", False)
    assert (await play("read_file", path="f", offset=5000))["content"] == ""


async def test_long_lines_and_large_pages_are_cut(play: Player) -> None:
    await play("write_file", path="f", content="\n".join("x" * 5000 for _ in range(100)))
    page = await play("read_file", path="f")
    assert "... [truncated]" in page["content"]
    assert page["truncated"]
    assert len(page["content"]) < 95_000


async def test_empty_file_and_no_final_newline(play: Player) -> None:
    await play("write_file", path="empty", content="")
    assert (await play("read_file", path="empty"))["total_lines"] == 0
    await play("write_file", path="f", content="a\n\nb")
    assert (await play("read_file", path="f"))["content"] == "1|a\n2|\n3|b"


async def test_missing_file_suggests_others(play: Player) -> None:
    await play("write_file", path="src/settings.py", content="")
    answer = await play("read_file", path="src/setings.py")
    assert answer == {"error": "File not found: src/setings.py", "similar_files": ["settings.py"]}


@pytest.mark.parametrize(("path", "reason"), [(".", "Is a directory"), ("/etc/x", "Read-only"), ("f/x", "")])
async def test_errors_are_answers(play: Player, path: str, reason: str) -> None:
    await play("write_file", path="f", content="")
    answer = await play("write_file", path=path, content="x")
    assert reason in answer["error"]
    assert path in answer["error"]


async def test_binary_file(play: Player) -> None:
    sandbox = await play.runtime.sandbox()
    await sandbox.write_file("b", b"\x7fELF\0\0")
    assert "Binary" in (await play("read_file", path="b"))["error"]


async def test_text_that_is_not_utf8_is_readable(play: Player) -> None:
    sandbox = await play.runtime.sandbox()
    await sandbox.write_file("latin", b"caf\xe9\n")
    assert (await play("read_file", path="latin"))["content"] == "1|caf\ufffd"


async def test_content_that_cannot_be_written(play: Player) -> None:
    outcome = await play.outcome("write_file", '{"path": "f", "content": "\\ud800"}')
    assert outcome.error is not None
    assert "UTF-8" in outcome.content


async def test_null_byte_in_a_path_is_an_error(play: Player) -> None:
    outcome = await play.outcome("read_file", {"path": "a\0b"})
    assert outcome.error is not None


async def test_paths_follow_the_terminal(play: Player) -> None:
    await play("terminal", command="mkdir -p d; cd d")
    await play("write_file", path="here", content="x")
    await play("write_file", path="~/home", content="y")
    assert (await play("terminal", command="ls; ls ~"))["output"] == "here\nd\nhome"
    assert (await play("search_files", pattern="x"))["matches"][0]["path"] == "here"


async def make_tree(play: Player) -> None:
    for path, content in {
        "src/one.py": "def one():\n    return 1\n",
        "src/two.py": "def two():\n    return 22\n",
        "notes.txt": "return nothing\n",
        ".hidden/x.py": "return 9\n",
    }.items():
        await play("write_file", path=path, content=content)


async def test_search_content(play: Player) -> None:
    await make_tree(play)
    found = await play("search_files", pattern=r"return \d+")
    assert found == {
        "total_count": 2,
        "matches": [
            {"path": "src/one.py", "line": 2, "content": "    return 1"},
            {"path": "src/two.py", "line": 2, "content": "    return 22"},
        ],
    }
    found = await play("search_files", pattern="return", file_glob="*.txt", path=".")
    assert [match["path"] for match in found["matches"]] == ["notes.txt"]
    assert (await play("search_files", pattern="nowhere"))["total_count"] == 0


async def test_search_modes_and_pages(play: Player) -> None:
    await make_tree(play)
    assert (await play("search_files", pattern="return", output_mode="count"))["counts"] == {
        "notes.txt": 1,
        "src/one.py": 1,
        "src/two.py": 1,
    }
    files = await play("search_files", pattern="return", output_mode="files_only", limit=2)
    assert (files["files"], files["truncated"]) == (["notes.txt", "src/one.py"], True)
    rest = await play("search_files", pattern="return", output_mode="files_only", offset=2)
    assert rest["files"] == ["src/two.py"]
    around = await play("search_files", pattern="def one", context=1)
    assert around["matches"][0]["content"] == "def one():\n    return 1"


async def test_search_names(play: Player) -> None:
    await make_tree(play)
    assert sorted((await play("search_files", pattern="*.py", target="files"))["files"]) == [
        "src/one.py",
        "src/two.py",
    ]
    assert (await play("search_files", pattern="note", target="files"))["files"] == ["notes.txt"]
    assert (await play("search_files", pattern="src/t*.py", target="files"))["files"] == ["src/two.py"]


async def test_search_errors_are_answers(play: Player) -> None:
    assert "Invalid regular expression" in (await play("search_files", pattern="("))["error"]
    assert "Path not found" in (await play("search_files", pattern="x", path="no/such"))["error"]


async def test_search_skips_files_that_are_not_text(play: Player) -> None:
    await play("terminal", command="mkfifo pipe; printf 'find\\0me' > bin; ln -s /dev/zero endless; echo find > f")
    found = await play("search_files", pattern="find")
    assert [match["path"] for match in found["matches"]] == ["f"]


async def test_search_that_takes_for_ever_ends(play: Player) -> None:
    await play("write_file", path="f", content="a" * 60)
    outcome = await play.outcome("search_files", {"pattern": "(a+)+$x"}, timeout=5.0)
    assert outcome.error is None
    assert "too long" in outcome.content


async def test_a_search_needs_no_python_of_the_image(tmp_path: Path) -> None:
    image = small_root(tmp_path, ["sh"])
    async with create_sandbox(SandboxConfig(image=str(image))) as sandbox:
        await sandbox.write_file("notes.txt", b"hay\nneedle 1\n")
        found = await search(sandbox, Query(r"needle \d"), cwd=None, timeout=30)
        assert [(match["path"], match["line"]) for match in found["matches"]] == [("notes.txt", 2)]
