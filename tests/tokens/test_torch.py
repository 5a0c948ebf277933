"""Processes of hermes-rl import no torch, and what they load is the same as with it.

The torch of these tests is a small package that records its import, installed as far as anybody can see.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_rl.tokens.hub import _light_config
from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.commands import ROOT, SECONDS, environment
from tests.tokens.loaded import KINDS, results_of_library, write_kinds

TORCH = """
import os, traceback
with open(os.environ["TORCH_IMPORTED"], "a") as file:
    traceback.print_stack(file=file)
class dtype:
    def __repr__(self): return "torch.bfloat16"
bfloat16 = float16 = float32 = half = dtype()
"""
METADATA = "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n"
SPEC = """
dataset: {items: [{q: hi}, {q: ho}]}
prompt: {user: '{{ q }}'}
servers: {policy: {type: scripted, tokenizer: ./model}}
"""


class Installed:
    """A directory in which torch is installed, and the programs that run with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "site" / "torch").mkdir(parents=True)
        (folder / "site" / "torch" / "__init__.py").write_text(TORCH)
        (folder / "site" / "torch" / "nn.py").write_text("")
        (folder / "site" / "torch-2.13.0.dist-info").mkdir()
        (folder / "site" / "torch-2.13.0.dist-info" / "METADATA").write_text(METADATA)
        self.imported = folder / "imported"

    def python(self, *arguments: str) -> str:
        """Run a program from the directory, and return its output."""
        variables = environment({"TORCH_IMPORTED": str(self.imported), "HF_HUB_OFFLINE": "1"})
        variables["PYTHONPATH"] = f"{self.folder / 'site'}:{ROOT}"
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def imports(self) -> str:
        """The stacks of all imports of torch so far."""
        return self.imported.read_text() if self.imported.exists() else ""


@pytest.fixture
def torch(tmp_path: Path) -> Installed:
    return Installed(tmp_path)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_kinds(tmp_path_factory.mktemp("kinds"))


@pytest.mark.slow
def test_library_alone_imports_torch(torch: Installed) -> None:
    """Without this the other tests show nothing, and `hermes_rl.tokens.hub` needs no care of its own any more."""
    torch.python("-c", "from transformers import AutoTokenizer")
    assert "modeling_rope_utils" in torch.imports()


@pytest.mark.slow
def test_tokenizers_match_the_transformers_library(torch: Installed, kinds: list[Path]) -> None:
    printed = torch.python("-m", "tests.tokens.loaded", str(kinds[0].parent))
    assert torch.imports() == ""
    found = json.loads(printed.splitlines()[-1])
    expected = {folder.name: json.loads(json.dumps(results_of_library(folder))) for folder in kinds}
    differences = [
        (kind, name) for kind in KINDS for name in expected[kind] if found[kind][name] != expected[kind][name]
    ]
    assert differences == []


@pytest.mark.slow
def test_commands_import_no_torch(torch: Installed) -> None:
    shutil.copytree(small_tokenizer_path(), torch.folder / "model")
    (torch.folder / "model" / "config.json").write_text('{"model_type": "qwen3", "dtype": "bfloat16"}')
    (torch.folder / "spec.yaml").write_text(SPEC)
    lines = [
        ["--version"],
        ["validate", "spec.yaml"],
        ["render", "spec.yaml", "--tokens", "--no-pager"],
        ["run", "spec.yaml", "process", "--env.group_size", "2", "--out", "played"],
        ["run", "spec.yaml", "process", "--workers", "2", "--env.group_size", "2", "--out", "shared"],
        ["show", "played", "--no-pager"],
        ["report", "played"],
    ]
    code = f"from hermes_rl.cli.main import status\nfor line in {lines}:\n    assert status(line) == 0, line"
    torch.python("-c", code)
    assert (torch.folder / "shared" / "rollouts.jsonl").exists()
    assert torch.imports() == ""


@pytest.mark.slow
def test_environment_of_a_trainer_imports_no_torch(torch: Installed) -> None:
    torch.python("-c", "import hermes_rl.env.multi_env, renderers.base; renderers.base._populate_registry()")
    assert torch.imports() == ""


@pytest.mark.slow
def test_later_users_find_torch(torch: Installed, kinds: list[Path]) -> None:
    torch.python(
        "-c",
        f"""
import importlib, sys
from hermes_rl.tokens.hub import HubTokenizer
HubTokenizer({str(kinds[2])!r})
from transformers import AutoConfig
from transformers.utils import is_torch_available
assert is_torch_available() and "torch" not in sys.modules
user = sys.modules["transformers.modeling_rope_utils"]
half = user.torch.bfloat16
import torch.nn
assert half is torch.bfloat16
assert user.torch is torch is sys.modules["torch"]
assert AutoConfig.from_pretrained({str(kinds[2])!r}).dtype is torch.bfloat16
""",
    )
    assert "modeling_rope_utils" not in torch.imports()


@pytest.mark.slow
def test_user_of_torch_keeps_it(torch: Installed, kinds: list[Path]) -> None:
    torch.python(
        "-c",
        f"""
import sys, torch
from hermes_rl.tokens.hub import HubTokenizer
HubTokenizer({str(kinds[2])!r})
assert sys.modules["transformers.modeling_rope_utils"].torch is torch
""",
    )


@pytest.mark.slow
def test_types_of_models_select_as_their_configurations_do(tmp_path: Path) -> None:
    """AutoTokenizer reads these attributes of a configuration, and the name of its class."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    compared = 0
    for model_type in CONFIG_MAPPING_NAMES:
        fields = {"model_type": model_type, "model_name": "acme", "tokenizer_class": "AcmeTokenizer"}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        light = _light_config(str(tmp_path), offline=True)
        if light is None:
            continue
        try:
            expected = AutoConfig.from_pretrained(tmp_path)
        except (ValueError, OSError, ImportError, StrictDataclassError):
            continue  # it has no configuration without further fields or packages
        compared += 1
        for name in ("model_type", "model_name", "tokenizer_class", "_name_or_path"):
            assert getattr(light, name) == getattr(expected, name), (model_type, name)
        assert type(light).__name__ == type(expected).__name__
    assert compared > len(CONFIG_MAPPING_NAMES) * 0.9
