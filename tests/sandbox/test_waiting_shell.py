"""The shell that waits for the terminal's commands: nobody can tell it from a new one, and nothing depends on it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import CommandResult, ResourceLimits, Sandbox, SandboxConfig, SandboxFile
from hermes_rl.sandbox.helper_sandbox import HelperSandbox
from hermes_rl.sandbox.shell_server import ShellServer, _live, may_wait
from hermes_rl.tools.base import ShellState
from tests.waiting import until

TEXT = r"""
echo out; echo err >&2; exit 3
seq 200 | tail -1
pwd; mkdir -p 'a b/c' && cd 'a b' && export WORD='x "y"↵z' EMPTY= ; false
pwd; echo "$WORD"; unset WORD; cd c
pwd; echo "[$WORD]" "[${EMPTY-none}]"
export TRICK=$'a↵declare -x TERM="dumb"↵b' TERM=vt100; env | grep -A2 TRICK
env | grep -A2 TRICK; echo "$TERM"; export TERM=dumb
echo "$TERM"; unset TRICK; export -n TRICK
cd -
local_word=x; f() { echo f; }; shopt -s nullglob; set -f; alias l=ls; hash ls
echo "[$local_word]"; type f; shopt nullglob; echo *; alias; hash
exec echo replaced
exec false
exit
kill -9 $BASHPID
kill -TERM $BASHPID
bash -c 'kill -INT $BASHPID'; echo after
(exit 7)
exit 300
exit -1
false | true
set -o pipefail; false | true
set -e; false; echo not reached
(set -u; echo "$nowhere"); echo $?
set -e; trap 'echo failed at $LINENO' ERR; false
trap 'echo mine' EXIT; exit 5
trap 'echo caught' TERM; kill -TERM $BASHPID; echo after
trap -p | grep -v hermes | wc -l
readonly HOME; HOME=/; echo not reached
break; continue; echo $?
return 4; echo $?
for i in 1 2 3; do break; done; echo $i
if↵echo
echo 'unclosed
echo "$(printf 'a\377b\001\177c')" | od -c
cat
cat; read line; echo "$?[$line]"
echo one; cat <<END | tr a-z A-Z↵here $USER↵END
no_such_command; echo $?
/etc/passwd
cd /nowhere; echo $?
exec 3>&-; echo closed
exec 3>three; echo hi >&3; cat three
exec >&-; echo lost
exec 2>/dev/null; ls /nowhere
ls /proc/self/fd | wc -l
grep -E '^Sig(Blk|Ign|Cgt)' /proc/self/status
echo "$-" "$0" "$#" "$SHLVL" "$BASH_SUBSHELL" "$LINENO" "$?" "[$!]" "${PIPESTATUS[*]}"
(echo "$BASH_SUBSHELL"; (echo "$BASH_SUBSHELL"))
bash -c 'echo $SHLVL $-; sleep 0.05; exit 9'
sleep 2.1; test "$SECONDS" -ge 2; echo $?
test "$SECONDS" -le 1; echo $?
sleep 0.3 & wait $!; echo $?; jobs; wait %1
sleep 0.2 & disown; jobs; echo gone
(sleep 60; echo late) &
sleep 0.1; echo next
umask; umask 077; ulimit -n 64; ulimit -n
umask; ulimit -n; ulimit -u; ulimit -c
echo 'two↵lines' $'and\ttabs' "\\" '$HOME' `echo ticks` ~ {a,b}
x=1 y=2 env | grep -c '^[xy]='
declare -A map=([k]=v); export map; declare -x ARRAY; export -p | grep -c .
test -t 0; echo $?; test -t 1; echo $?; test -p /dev/stdout; echo $?
echo to stderr >/dev/stderr; echo to stdout >/dev/stdout
ps -o pgid= -p $BASHPID | wc -l; kill -0 0; echo $?
cd "a b" 2>/dev/null || cd; pwd; mkdir gone; cd gone; rmdir ../gone
pwd; export PATH=/usr/bin:/bin:/nowhere; echo "$OLDPWD" | wc -l
getopts a opt -a; echo $opt $OPTIND; REPLY=mine; echo $REPLY
IFS=:; set -- a:b; echo $1 $*; echo "[$REPLY]" "[$_HERMES_RL_STATE]"
echo "[$IFS]" | od -c; printf '%s' 'no newline at the end'
first↵second↵echo $LINENO $?
second() { return 2; }; second
source /dev/stdin <<< 'echo sourced'; . ./nowhere; echo $?
eval 'echo evaluated; exit 6'
exit 1 | exit 2
printf 'export X=%s' '1' > s; . ./s; echo $X
echo $X; unset X HOME; cd
set -m; sleep 0.01 & wait; echo $?
mapfile -t lines < <(printf '1\n2\n'); echo ${#lines[@]}; exec 9</dev/null; coproc cat; kill $COPROC_PID
yes | head -c 300000 | wc -c
seq 1 100000
printf 'x%.0s' {1..5000}; echo
LANG=C bash -c 'echo ü' | wc -c; echo ü
"""
COMMANDS = [line.replace("↵", "\n") for line in TEXT.strip().splitlines()]
"""Each is one of the agent's; what it leaves is there for the next."""


class Terminal:
    """What the tool `terminal` is to a sandbox; with `anew` each command gets a new shell."""

    def __init__(self, sandbox: Sandbox, *, anew: bool = False) -> None:
        self.sandbox, self.anew, self.state = sandbox, anew, ShellState()

    async def run(self, command: str, timeout: float = 20, limit: int = 400_000) -> CommandResult:
        script, exports = self.state.script(command, None), self.state.exports
        if self.anew:
            result = await Sandbox.run_reporting(self.sandbox, script, exports, timeout=timeout, output_limit=limit)
        else:
            result = await self.sandbox.run_reporting(script, exports, timeout=timeout, output_limit=limit)
        self.state.learn(result.stderr, keep_cwd=False)
        return result

    async def said(self, command: str) -> str:
        return (await self.run(command)).output


@pytest.fixture
async def terminal(sandbox: Sandbox) -> AsyncIterator[Terminal]:
    found = Terminal(sandbox)
    await found.run("true")
    yield found


def number(sandbox: Sandbox) -> int | None:
    """Which shell waits, of all that this sandbox has had."""
    assert isinstance(sandbox, HelperSandbox)
    server = sandbox.waiting_shell.server if sandbox.waiting_shell is not None else None
    return None if server is None else server.request_id


async def test_no_command_can_tell_it_from_a_new_shell(config: SandboxConfig) -> None:
    async with create_sandbox(config) as one, create_sandbox(config) as other:
        ours, anew, differ = Terminal(one), Terminal(other, anew=True), []
        for command in COMMANDS:
            told = []
            for terminal in (ours, anew):
                result, state = await terminal.run(command), terminal.state
                found = repr((result.exit_code, result.stdout, state.cwd, state.exports))
                top = os.path.dirname(terminal.sandbox.home)  # noqa: PTH120 - a path of the sandbox
                told.append(found.replace(top, "~").replace(terminal.sandbox.id, "id"))
            differ += [] if told[0] == told[1] else [(command, *told)]
        assert differ == []
        assert number(one) is not None
        assert number(other) is None


async def test_fatal_shell_error_ends_the_command_with_status_1(fenced: Sandbox) -> None:
    """The known difference: a new `bash -c` ends with 127, 127 and 130 here, a subshell as any script's with 1."""
    terminal = Terminal(fenced)
    assert (await terminal.run('set -u; echo "$nowhere"; echo not reached')).exit_code == 1
    assert (await terminal.run("echo ${nowhere:?}; echo not reached")).exit_code == 1
    assert (await terminal.run("kill -INT $BASHPID; echo not reached")).exit_code == 1


async def test_one_shell_runs_many_commands(terminal: Terminal) -> None:
    first = number(terminal.sandbox)
    assert [await terminal.said(f"echo {n}") for n in range(20)] == [f"{n}\n" for n in range(20)]
    assert number(terminal.sandbox) == first is not None


async def test_command_that_reads_its_process_id_gets_a_new_shell(terminal: Terminal) -> None:
    said = [await terminal.said(command) for command in ("echo $$", "echo ${$}", "echo $$")]
    assert len(set(said)) == 3


async def test_what_a_command_has_left_writes_into_no_other(terminal: Terminal) -> None:
    # It says nothing yet while its own command is about to end, which takes long on a busy machine.
    left = "(until [ -e next ]; do sleep 0.01; done; while sleep 0.01; do echo left; done)"
    assert await terminal.said(f"{left} & echo $! >pid; echo one") == "one\n"
    assert await terminal.said("touch next; sleep 0.3; echo two") == "two\n"
    assert await terminal.said("kill -0 $(cat pid) && echo runs") == "runs\n"


async def test_concurrent_commands_do_not_share_state(terminal: Terminal) -> None:
    commands = [f"sleep 0.1; cd /; export A={n}; echo $A" for n in range(6)]
    assert await asyncio.gather(*map(terminal.said, commands)) == [f"{n}\n" for n in range(6)]


GONE = (
    "for _ in $(seq 100); do kill -0 $(cat pid) 2>/dev/null || break; sleep 0.05; done; kill -0 $(cat pid) || echo gone"
)


async def test_timeout_kills_what_it_runs_and_nothing_else(terminal: Terminal) -> None:
    await terminal.run("sleep 61 >/dev/null 2>&1 & echo $! >kept")
    result = await terminal.run("echo begun; (sleep 62 & echo $! >pid; wait) | cat; echo end", timeout=1)
    assert (result.timed_out, result.exit_code, result.stdout) == (True, 124, b"begun\n")
    assert (await terminal.said(GONE)).endswith("gone\n")
    assert await terminal.said("kill -0 $(cat kept) && echo runs") == "runs\n"


@pytest.mark.parametrize(("signal", "code"), [("STOP", 147), ("TSTP", 148)])
async def test_a_command_that_stops_its_own_shell_ends(terminal: Terminal, signal: str, code: int) -> None:
    result = await terminal.run(f"echo begun; sleep 68 & echo $! >pid; kill -{signal} $BASHPID; echo end", timeout=60)
    assert (result.exit_code, result.timed_out, result.stdout) == (code, False, b"begun\n")
    assert (await terminal.said(GONE)).endswith("gone\n")
    assert await terminal.said("echo next") == "next\n"


async def test_what_a_command_runs_is_killed_where_stopping_it_ends_its_shell(terminal: Terminal) -> None:
    ignoring = "trap '' HUP TERM CONT; sleep 69 & echo $! >pid; kill -TSTP $BASHPID; echo end"
    assert (await terminal.run(ignoring, timeout=60)).exit_code == 148
    assert (await terminal.said(GONE)).endswith("gone\n")


async def test_children_of_a_stopped_command_are_killed_despite_a_late_notice(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(terminal.sandbox, HelperSandbox)
    connection = terminal.sandbox.connection
    tell = connection.tell
    later = lambda *fields: asyncio.get_running_loop().call_later(0.3, tell, *fields)  # noqa: E731
    await terminal.said("true")
    monkeypatch.setattr(connection, "tell", later)
    ignoring = "trap '' HUP TERM CONT; sleep 69 & echo $! >pid; kill -STOP $BASHPID; echo end"
    assert (await terminal.run(ignoring, timeout=60)).exit_code == 147
    await asyncio.sleep(1)
    monkeypatch.undo()
    assert (await terminal.said(GONE)).endswith("gone\n")


async def test_cancelling_kills_what_it_runs(terminal: Terminal) -> None:
    task = asyncio.create_task(terminal.run("echo $BASHPID >pid; sleep 63"))
    await terminal.sandbox.run("until [ -s pid ]; do sleep 0.01; done", timeout=30)
    task.cancel()
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
    assert (await terminal.said(GONE)).endswith("gone\n")


async def test_a_long_report_comes_whole(terminal: Terminal) -> None:
    await terminal.run("for i in {1..60}; do export V$i=$(printf %01000d $i); done", limit=1 << 20)
    assert await terminal.said("echo ${#V1} ${V60: -2} $(env | grep -c '^V[0-9]')") == "1000 60 60\n"


async def test_output_keeps_head_and_tail(terminal: Terminal) -> None:
    result = await terminal.run("seq 100000", limit=1000)
    assert result.truncated
    assert result.output.startswith("1\n2\n")
    assert result.output.endswith("99999\n100000\n")


FIND = "read -r _ _ _ server _ </proc/$BASHPID/stat"


@pytest.mark.parametrize("signal", ["KILL", "TERM", "STOP"])
async def test_commands_continue_after_the_shell_server_is_killed(
    terminal: Terminal, signal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_rl.sandbox.shell_server.KILL_SECONDS", 0.5)
    result = await terminal.run(f"{FIND}; kill -{signal} $server; sleep 0.2; echo last", timeout=1)
    assert (result.exit_code != 0) == (signal != "STOP") or result.timed_out
    assert await terminal.said("echo next") == "next\n"
    await terminal.run(f"{FIND}; (sleep 0.1; kill -{signal} $server) >/dev/null 2>&1 &", timeout=1)
    await asyncio.sleep(0.3)
    await terminal.run("echo whether it is noticed now or later is all the same", timeout=1)
    assert await terminal.said("echo next") == "next\n"


async def test_once_the_agent_has_ended_there_is_none(terminal: Terminal) -> None:
    await terminal.sandbox.end_shells()
    assert number(terminal.sandbox) is None
    assert await terminal.said("echo anew") == "anew\n"
    assert number(terminal.sandbox) is None


async def test_killing_all_kills_it(terminal: Terminal) -> None:
    await terminal.run(f"{FIND}; echo $server >pid")
    await terminal.sandbox.kill_all()
    assert (await terminal.sandbox.run("kill -0 $(cat pid) || echo gone")).output.endswith("gone\n")
    assert await terminal.said("echo anew") == "anew\n"


async def test_shell_other_than_bash_starts_for_each_command(sandbox: Sandbox) -> None:
    assert isinstance(sandbox, HelperSandbox)
    assert not may_wait("/bin/sh", ())
    sandbox.shell, sandbox.waiting_shell = "/bin/sh", None
    terminal = Terminal(sandbox)
    assert await terminal.said("cd /; export A=1; echo one") == "one\n"
    assert await terminal.said('pwd; echo "$A"') == "/\n1\n"
    assert number(sandbox) is None


CROWD = """
import os, time
while True:
    try:
        if os.fork() == 0:
            time.sleep(64)
    except OSError:
        open("full", "w").close()
        time.sleep(0.01)
"""


async def test_full_process_limit_fails_the_command_at_once() -> None:
    async with create_sandbox(SandboxConfig(limits=ResourceLimits(processes=12))) as sandbox:
        terminal = Terminal(sandbox)
        await terminal.run(f"setsid python3 -c '{CROWD}' >/dev/null 2>&1 </dev/null &")

        async def full() -> bool:
            return "full" in {info.name for info in await sandbox.list_dir(".")}

        await until(full)
        async with asyncio.timeout(30):
            result = await terminal.run("echo never")
        assert result.exit_code != 0


async def test_the_end_of_the_sandbox_ends_the_command(terminal: Terminal) -> None:
    task = asyncio.create_task(terminal.run("sleep 65"))
    await asyncio.sleep(0.1)
    await terminal.sandbox.close()
    with pytest.raises(SandboxFailure, match="closed"):
        await task


async def test_closed_terminals_leave_no_processes_or_descriptors(backend: str) -> None:
    async with create_sandbox(SandboxConfig(backend=backend)):
        pass  # the first one of a process begins what stays for all, such as the watchman of their groups
    live, descriptors = len(_live), _descriptors()  # of earlier tests, which may still be closed
    for command in ("true", "sleep 66 &", "kill -9 $BASHPID", f"{FIND}; kill -9 $server", "sleep 0.05"):
        async with create_sandbox(SandboxConfig(backend=backend)) as sandbox:
            await Terminal(sandbox).run("true")
            await Terminal(sandbox).run(command)
    # Sockets of the fake engine are closed a little later.
    await until(lambda: len(_live) <= live and _descriptors() <= descriptors)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


GROW = """
import glob, os
for path in glob.glob("/proc/[0-9]*/fd/*"):
    try:
        if "memfd:command" not in os.readlink(path):
            continue
        for change in (lambda: os.truncate(path, 1 << 30), lambda: os.truncate(path, 0),
                       lambda: os.pwrite(os.open(path, os.O_RDWR), b"x", 1 << 24)):
            try:
                change()
                print("changed")
            except OSError as error:
                print("refused", error.errno)
    except OSError:
        continue
"""


async def test_the_file_that_a_waiting_shell_has_keeps_its_size() -> None:
    async with create_sandbox(SandboxConfig()) as sandbox:
        await sandbox.write_file("grow.py", GROW.encode())
        for _ in range(2):
            said = (await sandbox.run_reporting("python3 grow.py; export LEFT=1", "")).output
            assert "refused" in said and "changed" not in said
        done = await sandbox.run_reporting("echo on; X=$(head -c 60000 /dev/zero | tr '\\0' x); export X", "")
        assert done.output == "on\n" and done.stderr.endswith(b".\n") and len(done.stderr) > 60_000
        short = await sandbox.run_reporting("true", "")
        assert short.stderr.endswith(b".\n") and len(short.stderr) < 2000


async def test_abandoned_shell_server_reads_no_file_when_ready() -> None:
    server = ShellServer(1, lambda: None)
    file = server.inherited()[3]
    server.end(0)
    server.close()
    other = os.open(os.devnull, os.O_RDONLY)  # its number may be that of another file by now
    if other != file:
        os.dup2(other, file)
        os.close(other)
    try:
        assert not await server.ready()
    finally:
        os.close(file)
    assert not server.idle


STEERING = {
    "BASH_ENV": "/home/user/rc",
    "ENV": "/home/user/rc",
    "SHELLOPTS": "braceexpand:xtrace",
    "BASHOPTS": "nullglob",
    "POSIXLY_CORRECT": "1",
    "PROMPT_COMMAND": "echo prompt",
    "PS4": "> ",
    "TMOUT": "1",
    "IFS": ":",
    "GLOBIGNORE": "rc",
    "BASH_FUNC_echo%%": '() { builtin echo mine "$@"; }',
    "PLAIN": "1",
}
"""Variables that mean something to a shell, each with a value that shows."""


@pytest.mark.parametrize("name", STEERING)
async def test_a_command_prints_the_same_where_a_variable_steers_the_shell(name: str) -> None:
    config = SandboxConfig(files=(SandboxFile("rc", b"echo sourced\n"),), env={name: STEERING[name]})
    commands = ("echo one; set -- a:b; echo $1 *", "shopt -po posix; echo two", "true; echo three")
    async with create_sandbox(config) as sandbox:
        printed = [(await sandbox.run_reporting(command, "")).output for command in commands]
        anew = [(await Sandbox.run_reporting(sandbox, command, "")).output for command in commands]
    assert printed == anew
