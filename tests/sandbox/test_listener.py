"""What a command says on a descriptor of its own is heard with the names of the senders, and bounded."""

from __future__ import annotations

import pytest

from hermes_rl.sandbox import listener
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import Sandbox, SandboxConfig

SPEAK = "python3 -c \"import os; os.write(8, b'1\\tone\\n'); os.write(8, b'1\\ttwo\\n')\""


async def test_what_is_said_is_heard_in_order_on_every_backend(sandbox: Sandbox) -> None:
    result, heard = await sandbox.run_heard(f"{SPEAK}; exit 3", timeout=20)
    assert result.exit_code == 3
    assert [text.strip("\n") for _, text in heard or [] if text] == ["1\tone", "1\ttwo"]


@pytest.mark.parametrize("backend", ["bubblewrap", "none"])
async def test_each_message_carries_its_actual_sender(backend: str) -> None:
    async with create_sandbox(SandboxConfig(backend=backend)) as sandbox:
        _, heard = await sandbox.run_heard(f"{SPEAK}; {SPEAK}", timeout=20)
        assert heard is not None
        assert heard[0][0] == heard[1][0] != heard[2][0] == heard[3][0]


async def test_messages_sent_after_the_command_ended_are_ignored() -> None:
    async with create_sandbox(SandboxConfig()) as sandbox:
        _, heard = await sandbox.run_heard(f"(sleep .2; {SPEAK}) >/dev/null 2>&1 & true", timeout=20)
        assert heard == []


async def test_who_says_too_much_is_heard_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "COUNT_LIMIT", 50)
    talk = "import os\nfor n in range(1000): os.write(8, b'x')"
    async with create_sandbox(SandboxConfig()) as sandbox:
        result, heard = await sandbox.run_heard(f'python3 -c "{talk}"', timeout=20)
        assert heard is None
        assert result.exit_code != 0


async def test_a_sandbox_without_shared_descriptors_keeps_it_in_a_file() -> None:
    async with create_sandbox(SandboxConfig()) as sandbox:
        result, heard = await Sandbox.run_heard(sandbox, f"{SPEAK}; exit 3", timeout=20)
        assert (result.exit_code, heard) == (3, [(1, "1\tone"), (1, "1\ttwo"), (0, "")])
        assert [info.name for info in await sandbox.list_dir("/tmp") if info.name.startswith("report-")] == []
