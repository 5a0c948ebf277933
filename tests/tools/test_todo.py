"""The tool todo."""

from __future__ import annotations

from tests.tools.calling import Player


def item(identity: str, content: str = "x", status: str = "pending") -> dict[str, str]:
    return {"id": identity, "content": content, "status": status}


async def test_write_read_and_merge(play: Player) -> None:
    written = await play("todo", todos=[item("a"), item("b")])
    assert [each["id"] for each in written["todos"]] == ["a", "b"]
    merged = await play("todo", todos=[item("b", "new", "completed"), item("c")], merge=True)
    assert [each["id"] for each in merged["todos"]] == ["a", "b", "c"]
    assert merged["todos"][1] == item("b", "new", "completed")
    assert merged["summary"] == {"total": 3, "pending": 2, "in_progress": 0, "completed": 1, "cancelled": 0}
    assert await play("todo") == merged
    assert (await play("todo", todos=[item("z")]))["summary"]["total"] == 1
    assert not play.runtime.started


async def test_wrong_items_change_nothing(play: Player) -> None:
    await play("todo", todos=[item("a")])
    for todos in ([item("b", status="done")], [{"id": "b"}], [item("b", "x" * 5000)], "nonsense"):
        assert (await play.outcome("todo", {"todos": todos})).error is not None
    assert [each["id"] for each in (await play("todo"))["todos"]] == ["a"]
