"""The documentation site: it is built strictly, asks no other host for anything, and says what the package can do."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from tests.commands import hermes

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return built


@pytest.fixture(scope="module")
def pages() -> list[str]:
    """The paths of the pages, as the navigation names them."""
    text = re.sub(r"^hooks:.*$", "", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    return list(leaves(yaml.safe_load(text)["nav"]))


def leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(part)


class Asked(HTMLParser):
    """What a browser fetches or follows from a page, and the names that may be pointed at."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.followed: list[str] = []
        self.names: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.names |= {values["id"]} if "id" in values else set()
        if tag == "a":
            self.followed += [values["href"]] if "href" in values else []
        else:
            self.fetched += [values[name] for name in ("src", "href", "data", "poster") if name in values]


def test_every_page_of_docs_is_in_the_navigation_once(pages: list[str]) -> None:
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert set(pages) == written | {"spec-reference.md"}
    assert len(pages) == len(set(pages))


def test_no_page_fetches_anything_from_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        html = path.read_text()
        for address in Asked(html).fetched:
            assert not urlsplit(address).netloc, f"{path.name} fetches {address}"
        assert "mermaid" not in html, f"{path.name}: the theme fetches what draws that from another host"
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import\s*)[\"']?(https?:)?//", path.read_text()), path.name


def test_every_link_within_the_site_leads_to_a_page_and_a_place_on_it(site: Path) -> None:
    asked = {path.resolve(): Asked(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    count = 0
    for path, page in asked.items():
        for address in (*page.followed, *page.fetched):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.name}: {address}"
            if parts.fragment and target in asked:
                assert unquote(parts.fragment) in asked[target].names | {"__skip", "__tabbed"}, (
                    f"{path.name}: {address}"
                )
            count += 1
    assert count > 1000


def test_blocks_of_code_are_shown_as_such(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert "<p>```" not in path.read_text(), path.name


def test_llms_txt_lists_every_page_with_a_description(site: Path, pages: list[str]) -> None:
    text = (site / "llms.txt").read_text()
    assert re.match(r"# hermes-rl\n\n> \S.*\n\n## Tutorial\n\n- \[", text)
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): (\S.*)$", text, re.MULTILINE)
    assert [path for path, _ in listed] == pages
    for path, sentence in listed:
        assert len(sentence) > 15, path
        assert (site / path).read_text().startswith("# "), path


def test_the_reference_has_every_key_of_every_section_and_every_reward(site: Path) -> None:
    schema = json.loads((DOCS / "spec.schema.json").read_text())
    text = (site / "spec-reference.md").read_text()
    top = text.split("\n## ")[1]
    assert re.findall(r"^\| `(\w+)` \|", top, re.MULTILINE) == list(schema["properties"])
    tables = [
        re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE) for part in re.split(r"^##+ ", text, flags=re.MULTILINE)
    ]
    for name, section in schema["$defs"].items():
        if "properties" in section:
            assert list(section["properties"]) in tables, name
    for reward in re.findall(r"args_(\w+)", " ".join(schema["$defs"])):
        assert f"\n### {reward}\n" in text


def test_links_out_of_docs_became_names_of_files(site: Path) -> None:
    text = (site / "tools.md").read_text()
    assert "[example](../CONTRIBUTING.md#a-toolset)" in (DOCS / "tools.md").read_text()
    assert "(example (`CONTRIBUTING.md`))" in text
    assert "| `gsm8k` |" in (site / "specs.md").read_text()


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of docs/moving.md."""
    folder = tmp_path_factory.mktemp("moved")
    for _, title, text in FENCE.findall((DOCS / "moving.md").read_text()):
        if title:
            (folder / title).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("spec", "gold"),
    [
        *((spec, "1.000") for spec in ("from-verifiers", "from-lm-eval", "from-atropos", "wordle", "kuhn", "rubric")),
        ("prices", "1.200"),
        ("cart", "2.000"),
        ("from-inspect", "2.000"),
    ],
)
def test_what_was_moved_tells_right_answers_from_wrong_ones(spec: str, gold: str, moved: Path) -> None:
    done = hermes("validate", f"{spec}.yaml", "--deep", cwd=moved)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^ *gold +{re.escape(gold)}$", done.stdout + done.stderr, re.MULTILINE), done.stdout
    assert f"{spec}.yaml: valid" in done.stdout


@pytest.mark.parametrize("name", ["vf_prices", "vf_cart", "inspect_lines"])
def test_tables_of_moving_have_the_names_of_the_examples(name: str, moved: Path) -> None:
    tree = ast.parse((moved / f"{name}.py").read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_vf(node.value)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    used |= {each.name for node in imports if "inspect_ai" in (node.module or "") for each in node.names}
    tables = "\n".join(re.findall(r"^\| .* \|$", (DOCS / "moving.md").read_text(), re.MULTILINE))
    assert {each for each in used if not re.search(rf"\b{each}\b", tables)} <= {"Task", "task", "tool", "MemoryDataset"}


def test_table_of_lm_eval_has_the_keys_of_the_example(moved: Path) -> None:
    task = yaml.safe_load((moved / "lm-eval-capitals.yaml").read_text())
    table = (DOCS / "moving.md").read_text().split("\n## ")[2]
    assert table.startswith("lm-evaluation-harness")
    assert [key for key in task if not re.search(rf"^\| .*\b{key}\b", table, re.MULTILINE)] == []


def test_environment_of_atropos_graded_as_after_the_move(moved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(moved))
    doubles = importlib.import_module("atropos_doubles").Doubles
    assert [doubles.score(None, f"It is \\boxed{{{answer}}}.", 4) for answer in (8, 9)] == [1.0, 0.0]


def test_environment_of_verifiers_graded_as_after_the_move(moved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where verifiers up to 0.1 is installed, which CI does not do."""
    pytest.importorskip("verifiers.parsers.xml_parser")
    monkeypatch.syspath_prepend(str(moved))
    monkeypatch.setenv("OPENAI_API_KEY", "not-needed")
    prices, cart = (importlib.import_module(name) for name in ("vf_prices", "vf_cart"))
    parser = prices.load_environment().parser
    completion = [{"role": "assistant", "content": "<think>so</think><answer>7</answer>"}]
    assert [prices.right(parser, completion, answer) for answer in ("7", "8")] == [1.0, 0.0]
    assert "article" in str(cart.load_environment().tool_defs) and "cart" not in str(cart.load_environment().tool_defs)


def is_vf(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "vf"


def test_the_games_of_moving_keep_their_rules(moved: Path) -> None:
    wordle, kuhn = (runpy.run_path(str(moved / f"{name}.py")) for name in ("wordle", "kuhn"))
    marks = {("paper", "apple"): "YYGYX", ("llama", "label"): "GYYXX", ("crane", "crane"): "GGGGG"}
    assert {pair: wordle["compared"](*pair) for pair in marks} == marks
    game = wordle["Wordle"]({"word": "apple"})
    answers = [game.answer(words) for words in ["apple", "[paper]", "[apples]", "[house]", "hm", "[paper]"]]
    assert [answer["done"] for answer in answers] == [False] * 5 + [True]
    assert answers[-1] == {"say": "YYGYX", "done": True, "reward": 0.5}
    for cards, moves, won in (
        ("KJ", "check check", 1),
        ("JK", "check check", -1),
        ("KQ", "check bet fold", -1),
        ("KQ", "check bet call", 2),
        ("JQ", "bet fold", 1),
        ("JQ", "bet call", -2),
        ("KQ", "fold", -1),
        ("JQ", "bet raise", 1),
    ):
        table = kuhn["Kuhn"]({"cards": cards})
        hears = table.turn(None)
        for move in moves.split():
            (seat,) = hears
            hears = table.turn({seat: move})
        assert hears is None
        chips = {seat: kuhn["chips"](SimpleNamespace(seat=seat), table) for seat in ("first", "second")}
        assert chips == {"first": won, "second": -won}, (cards, moves)


def test_tables_of_moving_name_keys_that_are_there() -> None:
    """Whatever looks like a key in the column `here` is one, and every command that it names exists."""
    schema = json.loads((DOCS / "spec.schema.json").read_text())
    rows = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", (DOCS / "moving.md").read_text(), re.MULTILINE)]
    said = [name for row in rows for name in re.findall(r"`([^`]+)`", row[-1])]
    paths = [
        name
        for name in said
        if re.fullmatch(r"[a-z]+(\.[a-z_]+)+", name) and name.split(".")[0] in schema["properties"]
    ]
    assert len(paths) > 40
    for path in paths:
        assert leads(schema, schema, path.split(".")), f"{path} is no key of a spec"
    commands = {found for name in said for found in re.findall(r"^hermes-rl (\w+)", name)}
    assert commands >= {"run", "validate", "regrade", "view", "render"}
    assert commands <= set(re.findall(r"^  (\w+)  ", hermes("--help", cwd=ROOT).stdout, re.MULTILINE))


def leads(schema: dict[str, Any], value: dict[str, Any], keys: list[str]) -> bool:
    """Whether a value of this schema may have these keys, one in the other; `servers.judge` is any name."""
    if "$ref" in value:
        return leads(schema, schema["$defs"][value["$ref"].rpartition("/")[2]], keys)
    if any(leads(schema, part, keys) for kind in ("anyOf", "oneOf", "allOf") for part in value.get(kind, ())):
        return True
    if not keys:
        return bool(value)
    if keys[0] in value.get("properties", {}):
        return len(keys) == 1 or leads(schema, value["properties"][keys[0]], keys[1:])
    rest = value.get("additionalProperties")
    return isinstance(rest, dict) and bool(rest) and leads(schema, rest, keys[1:])


def test_the_first_commands_work(tmp_path: Path) -> None:
    """Every command of the start page but those that install."""
    commands = [
        line
        for kind, _, text in FENCE.findall((DOCS / "index.md").read_text())
        if kind == "bash"
        for line in text.splitlines()
        if line.startswith("hermes-rl ")
    ]
    assert len(commands) == 5
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-ec", "\n".join(commands)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
