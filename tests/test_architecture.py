"""The rooms of docs/architecture.md: imports point one way, each foreign package has one door, each class one home."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hermes_rl"
DOORS = {
    "atroposlib": "env/",
    "wandb": "runs/progress.py",
    "pyarrow": "runs/parquet.py",
    "datasets": ("data/hub.py", "integrations/"),
    "huggingface_hub": ("analysis/push.py", "repositories/hub.py"),
    "transformers": ("tokens/hub.py", "integrations/trl.py"),
    "tokenizers": "tokens/",
    "math_verify": "scoring/",
    "openai": "env/",
    "typer": "cli/",
    "rich": "cli/",
    "aiohttp": ("servers/", "agent/endpoint.py", "trainers/", "env/", "cli/", "sandbox/docker_engine.py"),
    "jinja2": ("spec/", "tokens/"),
    "jsonschema": "spec/json_schema.py",
    "referencing": "spec/json_schema.py",
    "yaml": ("spec/", "runs/directory.py", "env/program.py"),
    "mcp": "tools/mcp_client.py",
    "mcp_types": "tools/mcp_client.py",
    "anyio": "tools/mcp_client.py",
    "model_tools": "tools/hermes_worker.py",
    "toolsets": "tools/hermes_worker.py",
    "tools": ("tools/hermes_worker.py", "sandbox/remote_worker.py"),
    "renderers": "tokens/families.py",
    "ray": "runs/cluster.py",
    "fastapi": ("service/", "view/"),
    "starlette": ("service/", "view/"),
    "uvicorn": "service/",
    "torch": "integrations/",
    "trl": "integrations/trl.py",
    "vllm": "integrations/trl.py",
    "verl": "integrations/verl.py",
    "verifiers": "integrations/verifiers.py",
    "skyrl": "integrations/skyrl.py",
    "tinker": "integrations/tinker.py",
    "tinker_cookbook": "integrations/tinker.py",
    "chz": "integrations/tinker.py",
    "slime": "integrations/slime.py",
    "openrlhf": "integrations/openrlhf.py",
    "agentlightning": "integrations/agentlightning.py",
    "openenv": "integrations/openenv.py",
}
"""Foreign package → where it may be imported."""
ANYWHERE = {
    "active_environment",
    "errors",
    "others_files",
    "plugins",
    "scrubber",
    "shipped",
    "stop_reasons",
    "terminal_text",
    "threads",
    "values",
}
"""Modules of the package itself that every room may use."""


def rooms() -> list[str]:
    """The rooms in the order of the architecture's table: an import points to an earlier one."""
    table = (ROOT / "docs" / "architecture.md").read_text()
    return re.findall(r"^\| `(\w+)/`", table, re.MULTILINE)


@cache
def modules() -> list[tuple[str, ast.Module]]:
    """The modules of the package by their paths; all tests look at the same trees."""
    return [
        (str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


@cache
def imports(tree: ast.Module, *, at_top: bool = False) -> list[str]:
    """Full names of what is imported; type-checking blocks are left out, they import nothing."""
    found: list[str] = []
    for node in tree.body if at_top else _statements(tree):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


def _statements(block: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a block and in the blocks in it; expressions, most of a tree, are not looked into."""
    for node in ast.iter_child_nodes(block):
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case) and not _is_type_checking(node):
            yield node
            yield from _statements(node)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_every_folder_is_a_room_of_the_architecture() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - ANYWHERE
    assert folders == set(rooms())


def test_imports_point_one_way() -> None:
    order = {room: place for place, room in enumerate(rooms())}
    wrong = []
    for name, tree in modules():
        here = name.split("/")[0]
        for imported in imports(tree):
            parts = imported.split(".")
            if parts[0] != "hermes_rl" or len(parts) < 2 or parts[1] in ANYWHERE or here not in order:
                continue
            if order[parts[1]] > order[here]:
                wrong.append(f"{name} imports {imported}")
    assert wrong == []


def test_trainer_integrations_use_only_public_names() -> None:
    """What an adapter needs is public, so that anybody can write one."""
    import hermes_rl

    wrong = [
        f"{name} imports {imported}"
        for name, tree in modules()
        if name.startswith("integrations/")
        for imported in _names_of_ours(tree)
        if imported.removeprefix("hermes_rl.") not in hermes_rl.__all__
        and not imported.startswith(("hermes_rl.errors.", "hermes_rl.integrations.", "hermes_rl.spec.new_names."))
    ]
    assert wrong == []


def _names_of_ours(tree: ast.Module) -> Iterator[str]:
    """Full names of what is taken from this package, by imports and as attributes, for type checking too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("hermes_rl."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hermes_rl":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hermes_rl":
            yield f"hermes_rl.{node.attr}"


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for name, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}, "give the new class another name"


def test_each_room_says_what_it_owns_and_names_entry_points_that_exist() -> None:
    for init in sorted(PACKAGE.glob("*/__init__.py")):
        if init.parent.name in ANYWHERE:
            continue
        purpose = ast.get_docstring(ast.parse(init.read_text())) or ""
        named = re.search(r"\nOwns .*\nEntry points: (.*?)\.?\nLeft to others: ", purpose, re.DOTALL)
        assert named is not None, init
        entry_points = re.findall(r"`(\w+)`", named[1])
        code = "\n".join(path.read_text() for path in init.parent.rglob("*.py"))
        unknown = [each for each in entry_points if not re.search(rf"^(?:(?:async )?def |class |){each}\b", code, re.M)]
        assert entry_points and not unknown, (init, unknown)


def test_excerpts_of_the_path_of_a_row_are_code_of_their_files() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    excerpts = re.findall(r"\*\*(\d+)\. .*?```python\n# (\S+)\n(.*?)```", page, re.DOTALL)
    assert [int(step) for step, _, _ in excerpts] == list(range(1, 12))
    for step, file, excerpt in excerpts:
        code, position = re.sub(r"\n +", "\n", (PACKAGE / file).read_text()), 0
        for part in re.split(r"^ *\.\.\.\n", excerpt, flags=re.M):
            wanted = re.sub(r"^ +", "", part, flags=re.M)
            position = code.find(wanted, position)
            assert position >= 0, (step, file, part)


BYPASSES = {
    "replies of servers": (
        r"orjson|json\.loads|\.json\(",
        r"(servers|trainers)/(?!scripted/)",
        {},
    ),
    "messages of processes": (
        r"pickle\.(load|loads|Unpickler)\b",
        r"",
        {
            "user_code/process.py": "a child reads what the runner sends",
            "runs/worker.py": "a run worker reads what the run sends",
            "runs/rollout_worker.py": "a run worker reads what the run sends",
            "runs/packaging.py": "an actor of Ray reads what the run sends",
        },
    ),
    "failures of a rollout": (
        r"\brollout\.fail\(|\.state = RolloutState\.FAILED",
        r"",
        {
            "rollouts/runner.py": "the place",
            "rollouts/rollout.py": "the method itself",
            "runs/workers.py": "the process that ran it has died",
        },
    ),
    "files of others": (
        r"(?<!self)(?<!super\(\))\.read_(text|bytes)\(|(?<!def )(?<![\w.`])open\((?!descriptor|f?\"/proc)"
        r"|\bos\.open\((?!os\.devnull|f?\"/proc)|\b(gzip|bz2|lzma|tarfile|io)\.open\(|\.open\((\"[ra]|encoding)|\b(path|file)\.open\(\)",
        r"(?!sandbox/|tools/in_sandbox/)",
        {
            "others_files.py": "the place",
            "analysis/report.py": "a page of this package",
            "cli/explain.py": "a shipped reward",
            "cli/init.py": "a starter of this package",
            "cli/listing.py": "shipped rewards",
            "errors.py": "how this package was installed",
            "repositories/cache.py": "the lock of its own directory",
            "rollouts/admission.py": "files of the kernel",
            "rollouts/sandboxes.py": "a script of this package, an archive that the place has opened, new files",
            "runs/directory.py": "the lock of a run; through no link, waits for no pipe",
            "runs/journal.py": "what the place has opened for it",
            "scoring/isolated_import.py": "in a sandbox",
            "scoring/reporter.py": "in a sandbox",
            "spec/reference.py": "shipped specs",
            "tokens/tokenizer.py": "the tokenizer of this package",
            "tools/search.py": "in a sandbox",
            "tools/toolsets/code_execution.py": "a program of this package",
            "user_code/fork_server.py": "the descriptor that a client has sent",
            "user_code/worker.py": "a file of the kernel",
        },
    ),
}
"""Rule of docs/architecture.md → what code that bypasses its place contains, where it is looked for, and the files that
may contain it with the reason."""


@pytest.mark.parametrize("rule", BYPASSES)
def test_no_code_bypasses_the_place_of_a_rule(rule: str) -> None:
    pattern, rooms_searched, allowed = BYPASSES[rule]
    containing = {
        name
        for name, _ in modules()
        if re.match(rooms_searched, name) and re.search(pattern, (PACKAGE / name).read_text())
    }
    assert containing == set(allowed), rule


def test_graders_directories_are_made_by_one_function() -> None:
    graders = [*(ROOT / "rewards").glob("*.py"), *(ROOT / "specs").rglob("*.py")]
    made = [path.name for path in graders if re.search(r"(terminal|_run)\([^)]*mkdir", path.read_text())]
    assert not made
    using = {path.name for path in graders if ".empty_dir(" in path.read_text()}
    assert using >= {"reward_file.py", "terminal_bench_2.py"}


def test_no_circle_of_imports_inside_a_room() -> None:
    """Imports inside of functions and for type checking count: a reader has to follow them too."""
    trees = {f"hermes_rl/{name}".removesuffix(".py").removesuffix("/__init__"): tree for name, tree in modules()}
    known = {path.replace("/", "."): tree for path, tree in trees.items()}
    inside = {
        module: {one for one in _imported_modules(tree, known) if one.split(".")[1:2] == module.split(".")[1:2]}
        for module, tree in known.items()
        if module.split(".")[1:2]
    }
    while True:  # take off what imports nothing of the rest, and what nothing of the rest imports: circles stay
        imported = set().union(*inside.values())
        rest = {
            one: found & inside.keys() for one, found in inside.items() if found & inside.keys() and one in imported
        }
        if rest == inside:
            break
        inside = rest
    assert sorted(inside) == []


def _imported_modules(tree: ast.Module, known: Mapping[str, ast.Module]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (one if one in known else node.module for one in full)


def test_the_seam_for_trainers_knows_no_trainer() -> None:
    """Atropos is one module behind the seam: only the door for its environments names it."""
    naming = {name for name, tree in modules() if "hermes_rl.trainers.atropos" in imports(tree)}
    assert {name.split("/")[0] for name in naming} == {"env"}


def test_each_word_of_the_glossary_is_there() -> None:
    words = (ROOT / "docs" / "architecture.md").read_text().split("## Words")[1]
    named = {word for cell in re.findall(r"^\| (.*?) \|", words, re.MULTILINE) for word in re.findall(r"`(\w+)`", cell)}
    defined = {
        one.name if isinstance(one, ast.ClassDef) else one.targets[0].id
        for _, tree in modules()
        for one in tree.body
        if isinstance(one, ast.ClassDef) or (isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name))
    }
    assert len(named) > 10
    assert sorted(named - defined) == []


def test_each_third_party_package_is_imported_only_by_its_adapter() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, tree in modules()
        for imported in imports(tree)
        if (door := DOORS.get(imported.split(".")[0])) is not None and not name.startswith(door)
    ]
    assert wrong == []


def test_the_environment_of_the_process_is_never_changed() -> None:
    forbidden = re.compile(
        r"os\.environ\[[^\]]+\]\s*=|os\.environ\.(update|setdefault|pop)|os\.putenv|sys\.path\.(insert|append)"
    )
    found = [p.name for p in PACKAGE.rglob("*.py") if forbidden.search(p.read_text(encoding="utf-8"))]
    # A user's file finds its neighbours while it loads, and Ray reads its token nowhere else while a run is connected:
    # nothing of both stays. The others work in other processes.
    assert sorted(found) == [
        "cluster.py",
        "fork_server.py",
        "isolated_server.py",
        "plugins.py",
        "process.py",
        "reporter.py",
    ]


@pytest.mark.parametrize(
    "statement", ["import hermes_rl", "import hermes_rl.cli.main", "from hermes_rl import load_spec"]
)
def test_importing_loads_nothing_heavy(statement: str) -> None:
    heavy = "{'atroposlib', 'transformers', 'datasets', 'wandb', 'openai', 'aiohttp', 'numpy', 'torch'}"
    checks = f"assert not {heavy} & set(sys.modules)\nassert threading.active_count() == 1"
    code = f"import sys, threading\n{statement}\n{checks}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_core_runs_without_atroposlib() -> None:
    code = (
        "import sys, asyncio\nfrom hermes_rl.spec.load import load_spec\n"
        "from hermes_rl.rollouts.compiled import CompiledSpec\nfrom hermes_rl.rollouts.runner import RolloutRunner\n"
        "from hermes_rl.data.load import load_rows\n"
        "async def main():\n"
        "    spec = load_spec('terminal-files')\n"
        "    async with CompiledSpec(spec) as world:\n"
        "        group = await RolloutRunner(world).start(load_rows(spec, 'train', notify=print)[0], 'g', 2)\n"
        "        assert len(group.scores) == 2, group.detail\n"
        "asyncio.run(main())\nassert not {'atroposlib', 'wandb', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_the_public_names_are_the_ones_listed() -> None:
    import hermes_rl

    for name in hermes_rl.__all__:
        assert getattr(hermes_rl, name) is not None
    assert dir(hermes_rl) == hermes_rl.__all__
    assert set(hermes_rl.__all__) == {
        "AgentFault", "AgentResult", "Env", "Example", "Failure", "Group", "GroupRefused",
        "HermesAgentBaseEnv", "HermesAgentEnvConfig", "HermesAgentLoop", "HermesRLError", "JudgeFailure",
        "LogprobDifference", "Policy", "Registered", "Registration", "RewardFailure", "Rollout", "Row",
        "RunError", "Sampled", "Sampling", "SandboxFailure", "Score", "ServerFailure", "ServerType", "Session",
        "SessionTurn", "Spec", "SpecEnv", "SpecError", "Tool", "ToolContext", "ToolError", "ToolInputError",
        "ToolServerFailure", "Toolset", "Trainer", "TrainerState", "UserError",
        "StopReason", "__version__", "attach_provenance",
        "cleanup_all_environments", "cleanup_vm", "clear_task_env_overrides", "compile_spec", "connect_ray",
        "discounted_returns",
        "load_spec", "open_env", "register_task_env_overrides", "sync",
    }  # fmt: skip
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hermes_rl.nothing  # noqa: B018


def test_documents_speak_of_public_names_alone() -> None:
    import hermes_rl

    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        named = {name for names in re.findall(r"from hermes_rl import ([\w, ]+)", text) for name in names.split(", ")}
        named |= set(re.findall(r"\bhermes_rl\.([A-Za-z]\w+)\(", text)) | set(re.findall(r"raises `(\w+)\(", text))
        assert named <= set(hermes_rl.__all__), page
