"""`pytest -n`: small runs of pytest, each in a directory and process of its own."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.forks import LONGEST, chunks_of
from tests.small_runs import finish, start

Run = Callable[..., SimpleNamespace]
NOTE = """
import os, time, pytest
def note(*words):
    with open(os.environ["NOTES"], "a") as file:
        print(os.getpid(), *words, file=file)
def noting():
    # How many processes have noted a test.
    with open(os.environ["NOTES"]) as file:
        return len({line.split()[0] for line in file if line.split()[1] == "test"})
def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Write modules of tests, by name, and run them."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = one_worker(name): a group")

    def run_modules(*options: str, **modules: str) -> SimpleNamespace:
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(NOTE + text)
        return finish(start(tmp_path, *options))

    return run_modules


def notes(folder: Path) -> list[list[str]]:
    """Return the words of each note: a process and what it has noted."""
    return [line.split() for line in (folder / "notes").read_text().splitlines()]


MANY = """
@pytest.mark.parametrize("number", range(60))
def test_it(number):
    note("test", number)
    wait_for(lambda: noting() == workers)  # none takes all tests before the others have started
"""


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_each_test_runs_once_in_as_many_processes_as_asked_for(run: Run, tmp_path: Path, workers: int) -> None:
    done = run("-n", str(workers), test_it=f"workers = {max(workers, 1)}\nnote('import')\n{MANY}")
    assert "60 passed" in done.stdout
    played = [(pid, words[0]) for pid, kind, *words in notes(tmp_path) if kind == "test"]
    assert sorted(int(number) for _, number in played) == list(range(60))
    imported = [pid for pid, kind, *_ in notes(tmp_path) if kind == "import"]
    assert len(imported) == 1
    assert len({pid for pid, _ in played}) == max(workers, 1)
    assert (imported[0] in {pid for pid, _ in played}) is (workers == 0)


def test_auto_runs_two_workers_for_each_core(run: Run, tmp_path: Path) -> None:
    count = 2 * len(os.sched_getaffinity(0))
    done = run("-n", "auto", test_it=f"workers = {count}\n{MANY.replace('60', str(20 * count))}")
    assert done.returncode == 0, done.stdout
    assert len({pid for pid, *_ in notes(tmp_path)}) == count


GROUP = """
@pytest.mark.parametrize("number", range(50))
@pytest.mark.one_worker("one")
def test_of_group(number):
    note("group", number)
"""


def test_tests_of_one_group_run_on_one_worker_in_order(run: Run, tmp_path: Path) -> None:
    done = run(test_a=GROUP.replace("50", "10"), test_b=f"workers = 2\n{MANY}", test_c=GROUP)
    assert "120 passed" in done.stdout
    played = [(pid, int(number)) for pid, kind, number in notes(tmp_path) if kind == "group"]
    assert len({pid for pid, _ in played}) == 1
    assert [number for _, number in played] == [*range(10), *range(50)]


def item(nodeid: str, group: str | None = None) -> Any:
    mark = group and SimpleNamespace(args=(group,))
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: mark if name == "one_worker" else None)


def test_chunks_hold_each_test_once_and_groups_come_first() -> None:
    items = [item(f"{module}::{number}") for module in "ab" for number in range(500)]
    items += [item(f"c::{number}", "pair"[number % 2 :]) for number in range(100)]
    chunks = chunks_of(items, 4)
    assert sorted(itertools.chain(*chunks)) == list(range(1100))
    assert chunks[:2] == [list(range(1000, 1100, 2)), list(range(1001, 1100, 2))]
    assert all(len({items[position].nodeid[0] for position in chunk}) == 1 for chunk in chunks)
    assert max(map(len, chunks[2:])) == LONGEST
    assert [len(chunk) for chunk in chunks[-8:]] == [1] * 8


FIXTURES = """
@pytest.fixture(scope="session", autouse=True)
def of_session():
    note("begin", "session")
    yield
    note("end", "session")
@pytest.fixture(scope="module", autouse=True)
def of_module(request):
    note("begin", request.module.__name__)
    yield
    note("end", request.module.__name__)
"""


def test_each_worker_runs_module_and_session_fixtures_once(run: Run, tmp_path: Path) -> None:
    modules = {
        f"test_{name}": "\n@pytest.mark.parametrize('n', range(30))\ndef test_it(n):\n    note('test', n)\n"
        for name in "abcd"
    }
    done = run(conftest=FIXTURES, **modules)
    assert "120 passed" in done.stdout
    for worker in {pid for pid, *_ in notes(tmp_path)}:
        told = [words for pid, *words in notes(tmp_path) if pid == worker]
        assert [words[0] for words in told if words[1] == "session"] == ["begin", "end"]
        assert (told[0], told[-1]) == (["begin", "session"], ["end", "session"])
        of_modules = [words for words in told if words[1].startswith("test_")]
        begun = of_modules[::2]
        assert of_modules[1::2] == [["end", name] for _, name in begun]
        assert [kind for kind, _ in begun] == ["begin"] * len(begun)
        assert len({name for _, name in begun}) == len(begun), "a module's fixture was there twice"


def test_a_failing_teardown_of_a_session_fixture_fails_the_run(run: Run) -> None:
    done = run(
        test_it="""
@pytest.fixture(scope="session")
def broken():
    yield
    raise ValueError("torn")
def test_it(broken): pass
"""
    )
    assert done.returncode == 1
    assert "ValueError: torn" in done.stdout
    assert "1 passed, 1 error" in done.stdout


DYING = """
@pytest.mark.parametrize("number", range(20))
def test_it(number):
    note("test", number)
    if number == 2:
        HOW
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "shown"),
    [
        ("os.kill(os.getpid(), 9)", "signal 9 (Killed)"),
        ("import ctypes; ctypes.string_at(0)", "signal 11 (Segmentation fault)"),
        ("os._exit(0)", "exit status 0"),
        ("if os.fork(): os._exit(7)\n        time.sleep(3); os._exit(0)", "exit status 7"),
    ],
    ids=["kill", "segfault", "exit", "exit that leaves a child"],
)
@pytest.mark.parametrize("mark", ["", "@pytest.mark.one_worker('group')"], ids=["ungrouped", "group"])
def test_a_dead_worker_fails_its_test_and_another_runs_the_rest(
    run: Run, tmp_path: Path, mark: str, how: str, shown: str
) -> None:
    done = run("-n", "1", test_it=mark + DYING.replace("HOW", how))
    assert done.returncode == 1
    assert "1 failed, 19 passed" in done.stdout
    assert f"FAILED test_it.py::test_it[2] - worker-0 ended while it was running this test: {shown}" in done.stdout
    assert [int(number) for _, _, number in notes(tmp_path)] == list(range(20))


def test_all_workers_may_die_again_and_again(run: Run) -> None:
    done = run(test_it="@pytest.mark.parametrize('n', range(6))\ndef test_it(n): os._exit(1)\n")
    assert "6 failed" in done.stdout
    assert len(set(re.findall(r"FAILED test_it.py::test_it\[\d\] - (worker-\d)", done.stdout))) == 6


def test_a_run_stops_at_the_first_failure_with_x(run: Run, tmp_path: Path) -> None:
    done = run(
        "-x",
        conftest=FIXTURES,
        test_it="""
@pytest.mark.parametrize("number", range(40))
def test_it(number):
    note("test", number)
    if number == 0:
        wait_for(lambda: noting() == 2)
        assert False, "first"
    time.sleep(0.05)
""",
    )
    assert done.returncode == 1
    assert "stopping after 1 failures" in done.stdout
    assert "1 failed" in done.stdout
    told = notes(tmp_path)
    assert len([words for words in told if words[1] == "test"]) < 20
    assert len([words for words in told if words[1:] == ["end", "session"]]) == 2


def test_maxfail_counts_the_failures_of_all_workers(run: Run) -> None:
    done = run(
        "--maxfail=4", test_it="@pytest.mark.parametrize('n', range(100))\ndef test_it(n): assert time.sleep(0.05)\n"
    )
    assert "stopping after 4 failures" in done.stdout
    assert 4 <= int(re.search(r"(\d+) failed", done.stdout)[1]) <= 8  # type: ignore[index]


def test_last_failed_runs_only_what_failed(run: Run) -> None:
    test = "@pytest.mark.parametrize('n', range(30))\ndef test_it(n): assert n % 10 != 3\n"
    assert "3 failed, 27 passed" in run(test_it=test).stdout
    assert "= 3 failed in" in run("--lf", test_it=test).stdout


REPORTED = """
import warnings
def test_fails(record_property):
    record_property("figure", 7)
    print("printed by", "the test")
    os.write(2, b"written by the test")
    assert 1 == 2
def test_is_skipped(): pytest.skip("some reason")
@pytest.mark.xfail
def test_is_expected_to_fail(): assert False
def test_warns(): warnings.warn(Odd("looks odd"))
class Odd(UserWarning): pass
def test_sleeps(): time.sleep(0.3)
@pytest.fixture
def broken(): raise ValueError("not set up")
def test_has_a_broken_fixture(broken): pass
"""


def test_reports_and_warnings_reach_the_summary_of_the_parent(run: Run, tmp_path: Path) -> None:
    done = run("-rs", "--durations=1", "--junitxml=out.xml", "-o", "junit_family=xunit1", test_it=REPORTED)
    assert done.returncode == 1
    assert "1 failed, 2 passed, 1 skipped, 1 xfailed, 1 warning, 1 error" in done.stdout
    assert "assert 1 == 2" in done.stdout
    assert "printed by the test" in done.stdout
    assert "written by the test" in done.stdout
    assert "Odd: looks odd" in done.stdout
    assert re.search(r"SKIPPED \[1\] test_it.py:\d+: some reason", done.stdout)
    assert re.search(r"\d+\.\d\ds call +test_it.py::test_sleeps", done.stdout)
    cases = {case.attrib["name"]: case for case in ElementTree.parse(tmp_path / "out.xml").iter("testcase")}
    assert len(cases) == 6
    assert {name for name, case in cases.items() if case.find("failure") is not None} == {"test_fails"}
    assert cases["test_fails"].find("properties/property").attrib == {"name": "figure", "value": "7"}  # type: ignore[union-attr]


def test_verbose_runs_name_the_worker_of_each_test(run: Run) -> None:
    done = run("-v", test_it="@pytest.mark.parametrize('n', range(20))\ndef test_it(n): pass\n")
    assert (
        len(re.findall(r"^\[worker-[01]\] +\[ *\d+%\] PASSED test_it.py::test_it\[\d+\]", done.stdout, re.MULTILINE))
        == 20
    )


TWENTY = "@pytest.mark.parametrize('n', range(20))\ndef test_it(n): pass\n"


def test_collection_warnings_are_reported_once(run: Run) -> None:
    done = run(test_it="import warnings; warnings.warn('at import')\n" + TWENTY)
    assert "20 passed, 1 warning" in done.stdout


def test_failed_collection_runs_no_test(run: Run, tmp_path: Path) -> None:
    done = run(test_a="raise ValueError('broken module')", test_b="def test_it(): note('test')")
    assert done.returncode == 2
    assert "ValueError: broken module" in done.stdout
    assert not (tmp_path / "notes").exists()


def test_empty_collection_has_the_usual_exit_status(run: Run) -> None:
    assert run(test_it="").returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_pytest_exit_ends_the_run(run: Run) -> None:
    test = "def test_it(n): time.sleep(0.01); n == 5 and pytest.exit('enough')\n"
    done = run(test_it="@pytest.mark.parametrize('n', range(500))\n" + test)
    assert "Exit: worker-" in done.stdout
    assert "enough" in done.stdout
    assert done.returncode == pytest.ExitCode.INTERRUPTED


def test_a_test_past_its_time_fails_alone(run: Run) -> None:
    done = run(
        test_it="""
@pytest.mark.timeout(0.3)
def test_hangs():
    import threading
    threading.Thread(target=time.sleep, args=(1,), name="beside", daemon=True).start()
    time.sleep(30)
def test_it(): pass
"""
    )
    assert "1 failed, 1 passed" in done.stdout
    assert "Failed: Timeout" in done.stdout
    assert "Stack of beside" in done.stdout


def test_workers_differ_in_folders_and_random_numbers(run: Run, tmp_path: Path) -> None:
    done = run(
        f"--basetemp={tmp_path / 'base'}",
        test_it="""
import random
@pytest.mark.parametrize("number", range(2))
def test_it(number, tmp_path, tmp_path_factory):
    note("test", random.random(), tmp_path, tmp_path_factory.mktemp("more"))
    wait_for(lambda: noting() == 2)
""",
    )
    assert "2 passed" in done.stdout, done.stdout
    assert len({number for _, _, number, *_ in notes(tmp_path)}) == 2
    made = [Path(folder).relative_to(tmp_path / "base") for *_, own, more in notes(tmp_path) for folder in (own, more)]
    assert sorted(folder.name for folder in made) == ["more0", "more0", "test_it_0_0", "test_it_1_0"]
    assert sorted(folder.parts[0] for folder in made) == ["worker-0", "worker-0", "worker-1", "worker-1"]


WAITING = (
    FIXTURES
    + """
import atexit
atexit.register(note, "exit", "now")
@pytest.mark.parametrize("number", range(10))
def test_it(number):
    note("test", number)
    time.sleep(60)
"""
)


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("to", ["parent", "all", "killed parent"])
def test_no_worker_stays_when_a_run_is_interrupted(run: Run, tmp_path: Path, to: str) -> None:
    """Ctrl-C of a terminal goes to all processes, `kill -INT` to one. No process can tear down what SIGKILL has hit."""
    (tmp_path / "test_it.py").write_text(
        NOTE + WAITING.replace("sleep(60)", "sleep(2)" if to == "killed parent" else "sleep(60)")
    )
    process = start(tmp_path)
    deadline = time.monotonic() + 30
    while not (tmp_path / "notes").exists() or len([words for words in notes(tmp_path) if words[1] == "test"]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if to == "all":
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(process.pid, signal.SIGKILL if to == "killed parent" else signal.SIGINT)
    done = finish(process)
    workers = {pid for pid, *_ in notes(tmp_path)} - {str(process.pid)}
    assert len(workers) == 2
    deadline = time.monotonic() + 30
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if to != "killed parent":
        assert done.returncode == pytest.ExitCode.INTERRUPTED
        assert "KeyboardInterrupt" in done.stdout
    for worker in workers:
        told = [words for pid, *words in notes(tmp_path) if pid == worker]
        assert told[-2:] == [["end", "session"], ["exit", "now"]]
        assert len([words for words in told if words[0] == "test"]) == 1
