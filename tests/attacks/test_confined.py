"""Code of an answer that a reward with `isolate: sandbox` executes, and that looks for a way out of its process.

It has the reward's sandbox and judge in reach, and may ask the runner for both. So what it gets by them is what the
sandbox of the process would give: no file of this machine, and nothing that other rollouts use.
"""

# ruff: noqa: E501 - an attack is one line

from __future__ import annotations

from pathlib import Path

import pytest

import hermes_rl
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import ONLY_SEAT
from hermes_rl.servers.scripted.play import Script
from hermes_rl.spec.load import parse_spec
from tests.thorough import spread

CODE = """
def graded(result, ctx, judge):
    names = {"said": None}
    exec(result.final_response, names)
    return hermes_rl.Score(0.5, reason=str(names["said"])[:5000])

import hermes_rl
"""
FIND = """
import asyncio, ctypes, os, socket, sys
frame = sys._getframe()
while "ctx" not in frame.f_locals: frame = frame.f_back
ctx, judge = frame.f_locals["ctx"], frame.f_locals["judge"]
libc = ctypes.CDLL(None, use_errno=True)
def ask(*args, **kwargs): return ctx._ask(*args, **kwargs)
def hear(call): return asyncio.run(call)
"""
ATTACKS = {
    "a file by upload_file": "ctx.upload_file('HERE/secret', 'x'); said = ctx.read_file('x')",
    "a file by upload": "ctx.upload('HERE/secret', 'x'); said = ctx.read_file('x')",
    "a directory by upload": "ctx.upload('HERE', 'x'); said = ctx.terminal('cat x/*')",
    "a directory by upload_dir": "ctx.upload_dir('HERE', 'x'); said = ctx.terminal('cat x/*')",
    "a file in another sandbox": "with ctx.pristine_sandbox() as other:\n other.upload('HERE/secret', 'x'); said = other.read_file('x')",
    "a class of ours": "from hermes_rl.tools.context import ToolContext\nctx.confined().__class__ = ToolContext; said = ctx.upload('HERE/secret', 'x')",
    "another number": "ctx._number = 0; ctx.upload('HERE/secret', 'x'); said = ctx.read_file('x')",
    "another task": "ctx.task_id = 'x'; ctx.upload('HERE/secret', 'x'); said = ctx.read_file('x')",
    "a private method": "ask('_upload_folder', 'HERE', 'x', replace=True); said = ctx.terminal('cat x/*')",
    "a written file": "ctx.write_file('z', 'SECRET'); ctx.download_file('z', 'HERE/written')",
    "a written directory": "ctx.write_file('q/z', 'SECRET'); ctx.download_dir('q', 'HERE/written')",
    "an opened file": "said = open('HERE/secret').read()",
    "a file by its directory": "said = [open(os.path.join(at, name)).read() for at, _, names in os.walk('HERE') for name in names]",
    "files of the root of others": "said = [open(f'/proc/{pid}/root/HERE/secret').read() for pid in os.listdir('/proc') if pid.isdigit()]",
    "a picture for the judge": "said = hear(judge.chat([{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'file://HERE/secret'}}]}]))",
    "an odd part for the judge": "said = hear(judge.answer([{'role': 'user', 'content': {'file': 'HERE/secret'}}], {}, 'hot'))",
    "a role that is none": "said = hear(judge.rate('x'))",
    "the machine of the rollout": "said = ask('runtime')",
    "what an object is made of": "said = ask('__init__', 'x')",
    "an attribute": "said = ask('task_id')",
    "many sandboxes": "for _ in range(20): ctx._ask('pristine_sandbox')",
    "files of the kernel": "said = [ctx.read_file(path, limit=10**4) for path in ('/proc/1/environ', '/proc/self/environ', '/dev/zero')]",
    "odd limits": "said = [ctx.read_file('/etc/passwd', limit=limit) for limit in (-1, 1 << 80, 'x', None, float('nan'))]",
    "more of a file than the runner reads": "ctx.terminal('truncate -s 100M f'); said = ctx.read_bytes('f', limit=1 << 40) and 'SECRET'",
    "more of a file by an odd limit": "ctx.terminal('truncate -s 100M f'); said = ask('read_bytes', 'f', float('nan')) and 'SECRET'",
    "memory of the runner": "ctx.remember('k', 'SECRET'); said = ctx.recall('k')",
    "odd times": "said = [ask('terminal', 'echo hi', seconds) for seconds in (float('nan'), float('inf'), -1, 1 << 80)]",
    "an odd command": "said = ask('terminal', ['echo', {}])",
    "a path with NUL": "said = ctx.read_file('\\0')",
    "a path of halves": "said = ctx.read_file('\\ud800')",
    "an odd mode": "said = ctx.write_file('m', 'x', mode=1 << 70)",
    "a file that is taken back": "said = ask('withdraw', ['HERE/secret', 1])",
    "the end of its own sandbox": "ask('cleanup'); said = ctx.terminal('echo hi')",
    "a tool": "said = ask('call_tool', 'terminal', {'command': 'cat HERE/secret'})",
    "a solution": "said = ask('play', [{'tools': [{'name': 'terminal', 'args': {'command': 'cp HERE/secret .'}}]}])",
    "variables": "said = [os.environ, open('/proc/1/environ').read()]",
    "a connection": "said = socket.create_connection(('127.0.0.1', PORT), 1).recv(10)",
    "a mount": "said = libc.mount(b'HERE', b'/run', None, 4096, None) or open('/run/secret').read()",
    "a namespace": "said = libc.unshare(0x10000000) or libc.unshare(0x20000)",
    "signals for all": "for pid in (-1, 1): os.kill(pid, 9)",
    "a trace": "said = libc.ptrace(16, 1, 0, 0) or 'SECRET'",
    "a change of the spec": "open('HERE/spec/code.py', 'a').write('SECRET')",
    "what an earlier rollout left in files": "said = [open(f).read() for f in ('/tmp/left', '/dev/shm/left', os.environ['TMPDIR'] + '/left') if os.path.exists(f)]",
}  # fmt: skip
LEAVES = """
ctx.remember("key", "SECRET")
sys.modules["left"] = "SECRET"
for place in ("/tmp", "/dev/shm", os.environ["TMPDIR"], os.environ["HOME"]):
    try: open(place + "/left", "w").write("SECRET")
    except OSError: pass
"""
"""What one answer leaves for another."""
LOOKS = "said = [ctx.recall('key'), sys.modules.get('left')]"


@pytest.mark.generated
async def test_executed_answer_reaches_no_file_and_no_other_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spec").mkdir()
    (tmp_path / "spec/code.py").write_text(CODE)
    (tmp_path / "secret").write_text("SECRET")
    attacks = spread([*ATTACKS], len(ATTACKS) // 3)
    codes = [LEAVES, LOOKS, *(ATTACKS[name] for name in attacks)]
    codes = [FIND + code.replace("HERE", str(tmp_path)).replace("PORT", "1") for code in codes]
    spec = f"""
dataset: {{items: [{", ".join(f"{{n: {n}}}" for n in range(len(codes)))}], key: n}}
prompt: {{user: "Go."}}
servers: {{policy: {{type: scripted}}, judge: {{type: scripted}}}}
rewards: {{graded: {{fn: "code.py:graded", isolate: sandbox}}}}
"""
    monkeypatch.setattr(
        CompiledSpec,
        "script",
        lambda self, key, prior, seat=ONLY_SEAT: Script.from_turns([{"say": codes[key.row.columns["n"]]}], prior),
    )
    found = {}
    async with hermes_rl.open_env(parse_spec(spec, folder=tmp_path / "spec")) as env:
        for row, name in zip(env.rows(), ["leaves", "looks", *attacks], strict=True):
            rollout = await env.run(row, retries=0)
            reward = rollout.rewards.get("graded")
            if rollout.error is not None or reward is None or "SECRET" in str(reward.reason):
                found[name] = (rollout.error, reward)
    assert found == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "spec"]
    assert (tmp_path / "spec/code.py").read_text() == CODE
