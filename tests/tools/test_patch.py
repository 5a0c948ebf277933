"""The tool patch and the ways of finding a passage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.tools import editing
from hermes_rl.tools.editing import NoMatchError, replace
from tests.tools.calling import Player

CODE = "def one():\n    x = 1\n    return x\n\n\ndef two():\n    x = 1\n    return x + 1\n"


def test_exact_passage() -> None:
    assert replace(CODE, "return x + 1", "return 3") == CODE.replace("return x + 1", "return 3")
    assert replace(CODE, "\n\ndef two", "\ndef two").count("\n") == CODE.count("\n") - 1


def test_passage_must_be_unique_unless_all() -> None:
    with pytest.raises(NoMatchError, match="2 times"):
        replace(CODE, "x = 1", "x = 2")
    assert replace(CODE, "x = 1", "x = 2", everywhere=True).count("x = 2") == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def two():  \n    x = 1", "def two():\n    x = 5"),  # trailing white space
        ("  def two():\n      x = 1", "  def two():\n      x = 5"),  # indented elsewhere
        ("def  two():\n\tx =  1", "def two():\n    x = 5"),  # runs of white space
    ],
)
def test_small_differences_are_forgiven(old: str, new: str) -> None:
    assert replace(CODE, old, new) == CODE.replace("def two():\n    x = 1", "def two():\n    x = 5")


def test_replacement_takes_the_indentation_found() -> None:
    assert replace("if a:\n        b()\n", "b()\n", "c()\nd()\n") == "if a:\n        c()\nd()\n"
    assert replace("if a:\n        b( )\n", "b(  )\n", "c()\n    d()\n") == ("if a:\n        c()\n            d()\n")


def test_typographic_quotes() -> None:
    assert replace("say('it')\n", "say(‘it’)", "say('that')") == "say('that')\n"


def test_windows_line_ends_stay() -> None:
    assert replace("a\r\nb\r\nc\r\n", "a\nb", "x\ny") == "x\r\ny\r\nc\r\n"
    assert replace("a\r\nb\nc\n", "b\nc", "d") == "a\r\nd\n"


@pytest.mark.parametrize(("old", "new", "why"), [("", "x", "empty"), ("a", "a", "same"), ("zz", "a", "not found")])
def test_what_cannot_be_replaced(old: str, new: str, why: str) -> None:
    with pytest.raises(NoMatchError, match=why):
        replace(CODE, old, new)


def test_hint_names_the_line() -> None:
    with pytest.raises(NoMatchError, match="line 6"):
        replace(CODE, "def two():\n    y = 7", "x")


words = st.text("ab \n\t", max_size=40)


@given(before=words, old=st.text("xyz\n", min_size=1, max_size=10), after=words, new=st.text("cd\n", max_size=10))
def test_unique_exact_passage_is_replaced_and_nothing_else(before: str, old: str, after: str, new: str) -> None:
    text = before + old + after
    if text.count(old) == 1 and old.strip() and old != new:
        assert replace(text, old, new) == before + new + after


@given(lines=st.lists(st.text("abc ", max_size=6), min_size=1, max_size=12), data=st.data())
def test_v4a_does_what_the_lines_say(lines: list[str], data: st.DataObject) -> None:
    numbered = [f"{i}:{line}" for i, line in enumerate(lines)]
    at = data.draw(st.integers(0, len(lines) - 1))
    added = data.draw(st.lists(st.text("+- x", max_size=5), max_size=3))
    low, high = max(0, at - 2), at + 3
    body = [" " + line for line in numbered[low:at]]
    body += ["-" + numbered[at], *("+" + line for line in added)]
    body += [" " + line for line in numbered[at + 1 : high]]
    patch = "\n".join(["*** Begin Patch", "*** Update File: f", "@@", *body, "*** End Patch"])
    text = "\n".join(numbered) + "\n"
    expected = [*numbered[:at], *added, *numbered[at + 1 :]]
    changed = editing.update(text, editing.parse(patch)[0].hunks)
    assert changed == "".join(line + "\n" for line in expected)


@given(st.text(max_size=200))
def test_any_text_is_a_patch_or_an_error(text: str) -> None:
    try:
        changes = editing.parse(text)
    except editing.PatchFormError:
        return
    assert changes


PATCH = """*** Begin Patch
*** Update File: code.py
@@ def two @@
     x = 1
-    return x + 1
+    return x + 2
*** Add File: new/file.txt
+hello
+
+world
*** Delete File: old.txt
*** Move File: from.txt -> to.txt
*** End Patch"""


async def test_patch_of_several_files(play: Player) -> None:
    await play("write_file", path="code.py", content=CODE)
    await play("write_file", path="old.txt", content="x\n")
    await play("write_file", path="from.txt", content="moved\n")
    answer = await play("patch", mode="patch", patch=PATCH)
    assert answer["success"]
    assert answer["files_modified"] == ["code.py"]
    assert answer["files_created"] == ["new/file.txt", "to.txt"]
    assert answer["files_deleted"] == ["old.txt", "from.txt"]
    assert "+    return x + 2" in answer["diff"]
    sandbox = await play.runtime.sandbox()
    assert await sandbox.read_file("code.py") == CODE.replace("x + 1", "x + 2").encode()
    assert await sandbox.read_file("new/file.txt") == b"hello\n\nworld\n"
    assert await sandbox.read_file("to.txt") == b"moved\n"
    assert {info.name for info in await sandbox.list_dir(".")} == {"code.py", "new", "to.txt"}


async def test_patch_that_does_not_fit_changes_nothing(play: Player) -> None:
    await play("write_file", path="a", content="1\n")
    await play("write_file", path="b", content="2\n")
    patch = "*** Begin Patch\n*** Update File: a\n-1\n+one\n*** Update File: b\n-3\n+three\n*** End Patch"
    answer = await play("patch", mode="patch", patch=patch)
    assert not answer["success"]
    assert "b: hunk 1" in answer["error"]
    assert (await play("read_file", path="a"))["content"] == "1|1"


async def test_two_changes_of_one_file(play: Player) -> None:
    await play("write_file", path="a", content="1\n2\n3\n")
    patch = "*** Update File: a\n@@\n-1\n+one\n@@\n-3\n+three\n*** Update File: a\n-2\n+two\n"
    assert (await play("patch", mode="patch", patch=patch))["files_modified"] == ["a"]
    assert (await play("read_file", path="a"))["content"] == "1|one\n2|two\n3|three"


async def test_lines_are_inserted_below_a_hint_or_at_the_end(play: Player) -> None:
    await play("write_file", path="a", content="import os\n\nx = 1")
    patch = "*** Update File: a\n@@ import os @@\n+import sys\n*** Update File: a\n@@\n+y = 2\n"
    await play("patch", mode="patch", patch=patch)
    assert (await play("read_file", path="a"))["content"] == "1|import os\n2|import sys\n3|\n4|x = 1\n5|y = 2"


async def test_deleting_lines_deletes_their_line_breaks(play: Player) -> None:
    await play("write_file", path="a", content="1\n2\n3\n")
    await play("patch", mode="patch", patch="*** Update File: a\n@@\n-2\n")
    assert (await play("read_file", path="a"))["content"] == "1|1\n2|3"


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        ("", "empty"),
        ("hello", "expected"),
        ("*** Update File: a\n", "no hunks"),
        ("*** Move File: a\n", "old -> new"),
        ("*** Add File: a\n+x\n", "exists already"),
        ("*** Update File: missing\n-x\n", "No such file"),
        ("*** Delete File: missing\n", "No such file"),
    ],
)
async def test_patches_that_are_wrong(play: Player, patch: str, why: str) -> None:
    await play("write_file", path="a", content="1\n")
    answer = await play("patch", mode="patch", patch=patch)
    assert not answer["success"]
    assert why in answer["error"]


async def test_replace_mode_is_the_default_and_keeps_other_bytes(play: Player) -> None:
    sandbox = await play.runtime.sandbox()
    await sandbox.write_file("latin", b"caf\xe9\nold\n", 0o755)
    answer = await play("patch", path="latin", old_string="old", new_string="new")
    assert answer["success"]
    assert await sandbox.read_file("latin") == b"caf\xe9\nnew\n"
    assert (await sandbox.stat("latin")).mode == 0o755


@pytest.mark.parametrize("arguments", [{"mode": "patch"}, {"path": "a"}, {"path": "a", "old_string": "x"}])
async def test_missing_parameters_of_a_mode(play: Player, arguments: dict[str, str]) -> None:
    outcome = await play.outcome("patch", arguments)
    assert outcome.error is not None
    assert "needs" in outcome.content
