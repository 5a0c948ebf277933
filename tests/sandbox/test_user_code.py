"""User code in a sandbox of its own: what text that it evaluates cannot reach."""

import asyncio
import contextlib
import os
import socket
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.plugins import Code, load_object
from hermes_rl.sandbox.helper_system import descendants
from hermes_rl.sandbox.user_code import ConfinedPool
from hermes_rl.user_code import environment
from hermes_rl.user_code.failures import EndedError, ForeignError, OvertimeError
from tests.sandbox.test_cleanup import ended
from tests.waiting import until_blocking

PLAIN = "builtins:str"
SECRET = "s3cr3t-of-the-runner"
SCORER = """
    import os
    import pickle
    import string

    def right(value):
        return 1.0 if value == 42 else 0.0

    def evaluated(text):
        return right(eval(text))

    def executed(text):
        names = {}
        exec(text, names)
        return right(names.get("answer"))

    def unpickled(data):
        return right(pickle.loads(data))

    def formatted(text):
        return string.Formatter().format(text, scorer=right)

    def shown(text):
        return repr(eval(text))
"""


@pytest.fixture(name="pool")
def _pool() -> Iterator[ConfinedPool]:
    pool = ConfinedPool()
    yield pool
    pool.close()


@pytest.fixture(name="scorer")
def _scorer(tmp_path: Path) -> Path:
    directory = tmp_path / "scorer"
    directory.mkdir()
    (directory / "scorer.py").write_text(textwrap.dedent(SCORER))
    return directory / "scorer.py"


def _code(scorer: Path, name: str) -> Code:
    reference = f"{scorer}:{name}"
    load_object(reference)
    return Code.from_ref(reference)


def _call(pool: ConfinedPool, code: Code, timeout: float = 30.0, **arguments: Any) -> str:
    return str(asyncio.run(pool.call(code, arguments, PLAIN, timeout)))


def test_a_right_answer_is_scored(pool: ConfinedPool, scorer: Path) -> None:
    assert _call(pool, _code(scorer, "evaluated"), text="6 * 7") == "1.0"
    assert _call(pool, _code(scorer, "executed"), text="answer = 42") == "1.0"


def test_evaluated_text_replaces_no_scorer_of_other_calls(pool: ConfinedPool, scorer: Path) -> None:
    code = _code(scorer, "evaluated")
    attack = "globals().update(right=lambda value: 1.0) or 1"

    async def scores() -> list[str]:
        process = await pool.hold(code)
        try:
            own = [str(await process.call(code, {"text": text}, PLAIN, 30)) for text in (attack, "1")]
        finally:
            await process.close()
        return [*own, str(await pool.call(code, {"text": attack}, PLAIN, 30))]

    assert asyncio.run(scores()) == ["0.0", "1.0", "0.0"]  # in its own process it does replace it
    assert _call(pool, code, text="1") == "0.0"


def test_evaluated_text_sees_no_variable_of_the_runner(
    pool: ConfinedPool, scorer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNNER_SECRET", SECRET)
    code = _code(scorer, "shown")
    assert SECRET not in _call(pool, code, text="dict(os.environ)")
    everybody = "[open(f'/proc/{p}/environ').read() for p in os.listdir('/proc') if p.isdigit()]"
    assert SECRET not in _call(pool, code, text=everybody)


def test_a_variable_that_specs_list_is_there(pool: ConfinedPool, scorer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = _code(scorer, "shown")
    for value in ("first", "second"):
        monkeypatch.setattr(environment, "_listed_variables", {"GAME_DIR": value})
        assert _call(pool, code, text="os.environ['GAME_DIR']") == repr(value)


def test_evaluated_text_cannot_read_files_outside_the_code(pool: ConfinedPool, scorer: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    with pytest.raises(ForeignError, match=r"FileNotFoundError"):
        _call(pool, _code(scorer, "shown"), text=f"open({str(secret)!r}).read()")


def test_a_process_reads_the_directories_that_its_code_names(pool: ConfinedPool, scorer: Path, tmp_path: Path) -> None:
    """They are found by the variables of the runner, and what modules write while they load is seen by no call."""
    games = tmp_path / "cache" / "games"
    games.mkdir(parents=True)
    (games / "one").write_text("a game")
    source = """
        import os, tempfile
        from pathlib import Path
        GAMES = Path(os.environ["XDG_CACHE_HOME"]) / "games"
        LEFT = tempfile.mkstemp()[1]

        def shown(text):
            return repr(eval(text))

        shown.reads = (GAMES,)
    """
    scorer.write_text(textwrap.dedent(source))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        code = _code(scorer, "shown")
        assert _call(pool, code, text="(GAMES / 'one').read_text()") == "'a game'"
        with pytest.raises(ForeignError, match="Read-only file system"):
            _call(pool, code, text="(GAMES / 'two').write_text('x')")
        assert _call(pool, code, text="os.path.exists(LEFT), os.environ['HOME'] == os.getcwd()") == "(False, True)"


@pytest.mark.parametrize("where", ["tmp_path", "scorer", "cwd", "modules"])
def test_evaluated_text_writes_nothing_outside(pool: ConfinedPool, scorer: Path, tmp_path: Path, where: str) -> None:
    places = {"tmp_path": tmp_path, "scorer": scorer.parent, "cwd": Path.cwd(), "modules": Path(sys.prefix)}
    wanted = places[where] / "hermes-written"
    with pytest.raises(ForeignError):
        _call(pool, _code(scorer, "evaluated"), text=f"open({str(wanted)!r}, 'w')")
    assert not wanted.exists()


def test_a_relative_file_is_there_for_one_call_alone(pool: ConfinedPool, scorer: Path) -> None:
    code = _code(scorer, "shown")
    before = sorted(Path.cwd().iterdir())
    assert _call(pool, code, text="open('save', 'w').write('x') and os.listdir()") == "['save']"
    assert _call(pool, code, text="os.listdir()") == "[]"
    assert sorted(Path.cwd().iterdir()) == before


def test_evaluated_text_reaches_no_socket_of_the_machine(pool: ConfinedPool, scorer: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        text = f"__import__('socket').create_connection({address!r}, 5)"
        with pytest.raises(ForeignError, match=r"OSError|ConnectionRefusedError|unreachable"):
            _call(pool, _code(scorer, "evaluated"), text=text)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_pickle_and_a_format_reach_nothing(pool: ConfinedPool, scorer: Path, tmp_path: Path) -> None:
    wanted = tmp_path / "hermes-written"
    shell = f"cposix\nsystem\n(Vtouch {wanted}\ntR.".encode()
    assert _call(pool, _code(scorer, "unpickled"), data=shell) == "0.0"
    assert not wanted.exists()
    text = "{scorer.__globals__[os].environ}"
    assert "PYTEST_CURRENT_TEST" in os.environ
    assert "PYTEST_CURRENT_TEST" not in _call(pool, _code(scorer, "formatted"), text=text)


def test_user_process_sees_and_signals_only_itself(pool: ConfinedPool, scorer: Path) -> None:
    async def both() -> str:
        code = _code(scorer, "shown")
        one, other = await pool.hold(code), await pool.hold(code)
        try:
            assert await one.call(code, {"text": "os.getpid()"}, PLAIN, 30) == "1"
            with pytest.raises(ForeignError, match=r"ProcessLookupError|PermissionError"):
                await one.call(code, {"text": f"os.kill({os.getpid()}, 0)"}, PLAIN, 30)
            with pytest.raises((ForeignError, EndedError)):
                await one.call(code, {"text": "os.kill(-1, 9) or 1 / 0"}, PLAIN, 30)
            return str(await other.call(code, {"text": "os.getpid()"}, PLAIN, 30))
        finally:
            await one.close()
            await other.close()

    assert asyncio.run(both()) == "1"


def test_two_processes_at_a_time_meet_nowhere(pool: ConfinedPool, scorer: Path) -> None:
    leaves = """
    import os, socket, sys
    kept = sys.kept = []
    for address in ("\\0left", ("127.0.0.1", 5555)):
        kept.append(socket.socket(socket.AF_INET if len(address) == 2 else socket.AF_UNIX))
        try:
            kept[-1].bind(address), kept[-1].listen()
        except OSError:
            pass
    for at, _, _ in [("/dev/mqueue", 0, 0), *os.walk("/dev"), ("/tmp", 0, 0), *os.walk("/run")]:
        try:
            open(at + "/left", "w").write("x")
        except OSError:
            pass
    os.open("/dev/ptmx", 2)
    """
    looks = """
    import os, socket
    found = []
    for address in ("\\0left", ("127.0.0.1", 5555)):
        try:
            socket.socket(socket.AF_INET if len(address) == 2 else socket.AF_UNIX).connect(address)
            found.append(address)
        except OSError:
            pass
    found += [at for top in ("/dev", "/run") for at, _, names in os.walk(top) if "left" in names]
    found += os.listdir("/dev/pts")
    if found: raise ValueError(found)
    answer = 42
    """

    async def both() -> str:
        code = _code(scorer, "executed")
        one, other = await pool.hold(code), await pool.hold(code)
        try:
            for process in (one, other):
                with contextlib.suppress(ForeignError):
                    await process.call(code, {"text": textwrap.dedent(leaves if process is one else looks)}, PLAIN, 30)
            return str(await other.call(code, {"text": textwrap.dedent(looks)}, PLAIN, 30))
        finally:
            await one.close()
            await other.close()

    assert asyncio.run(both()) == "1.0"


@pytest.mark.parametrize(
    "text",
    [
        "__import__('ctypes').CDLL(None).unshare(0x10000000)",
        "__import__('ctypes').CDLL(None).umount2(b'/proc', 2)",
        "__import__('ctypes').CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None)",
    ],
)
def test_a_process_cannot_take_its_confinement_off(pool: ConfinedPool, scorer: Path, text: str) -> None:
    assert _call(pool, _code(scorer, "shown"), text=text) == "-1"


def test_files_are_bounded(pool: ConfinedPool, scorer: Path) -> None:
    text = "for number in range(3):\n    with open(str(number), 'wb') as file: file.write(bytes(60 << 20))"
    with pytest.raises(ForeignError, match="No space left"):
        _call(pool, _code(scorer, "executed"), text=text)
    with pytest.raises(ForeignError, match=r"File too large|No space left"):
        _call(pool, _code(scorer, "executed"), text="with open('one', 'wb') as file: file.write(bytes(80 << 20))")


def test_endless_evaluated_text_is_ended_with_its_children(pool: ConfinedPool, scorer: Path) -> None:
    code = _code(scorer, "executed")
    text = "import os\nif os.fork() == 0: os.setsid()\nwhile True: pass"
    with pytest.raises(OvertimeError):
        _call(pool, code, timeout=1.0, text=text)
    assert _call(pool, code, text="answer = 42") == "1.0"


def test_code_without_end_ends_with_the_pool(pool: ConfinedPool, scorer: Path) -> None:
    before = set(descendants(os.getpid()))
    asyncio.run(pool.hold(_code(scorer, "shown")))
    started = set(descendants(os.getpid())) - before
    assert len(started) > 1
    pool.close()
    until_blocking(lambda: all(map(ended, started)))
