"""Python packages of the default sandbox: made once of wheels, read-only, first on the way to programs."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_rl.cli.main import status
from hermes_rl.errors import SpecError, UserError
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import ResourceLimits, SandboxConfig
from hermes_rl.sandbox.packages import PACKAGES, npm_folder, package_folder
from hermes_rl.spec.fingerprint import fingerprint
from hermes_rl.spec.load import parse_spec
from tests.http_servers import Handler, serving
from tests.rootfs import small_root

BASE = "dataset: {items: [{q: a}]}\nprompt: {user: x}\n"


def wheel(folder: Path, name: str, version: str) -> None:
    """A package with a module that says its version, and a program of its name that prints it."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\ndef main():\n    print('{name}', VERSION)\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture
def wheels(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that the user's configuration of pip names, without any index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "tinytool", "1.0")
    wheel(folder, "tinytool", "2.0")
    (tmp_path / "pip.conf").write_text(f"[install]\nno-index = true\nfind-links = {folder}\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    package_folder.cache_clear()
    return folder


async def test_a_sandbox_has_the_packages_and_cannot_change_them(wheels: Path) -> None:
    for packages, version in ((("tinytool<2",), "1.0"), (("tinytool",), "2.0"), ((), None)):
        async with create_sandbox(SandboxConfig(packages=packages)) as sandbox:
            found = await sandbox.run(
                "tinytool; python3 -c 'import tinytool; print(tinytool.VERSION)'; command -v python3"
            )
            lines = found.output.split("\n")
            if version is None:
                assert f"{PACKAGES}/bin" not in found.output and "No module named 'tinytool'" in found.output
                continue
            assert lines[:3] == [f"tinytool {version}", version, f"{PACKAGES}/bin/python3"], found.output
            spoilt = await sandbox.run(f"echo 'VERSION = 3' > {PACKAGES}/lib/python3*/site-packages/tinytool.py")
            assert spoilt.exit_code != 0 and "Read-only file system" in spoilt.output
            moved = await sandbox.run(
                f"mv {PACKAGES} /elsewhere || rm -rf {PACKAGES}; mkdir -p {PACKAGES}/bin; tinytool"
            )
            assert moved.output.split("\n")[-2] == f"tinytool {version}", moved.output


@pytest.mark.slow
async def test_image_without_python_gets_packages_with_an_interpreter(wheels: Path, tmp_path: Path) -> None:
    image = str(small_root(tmp_path / "root", ["sh", "cat"]))
    config = SandboxConfig(image=image, packages=("tinytool",), limits=ResourceLimits(disk=64 << 20))
    async with create_sandbox(config) as sandbox:
        code = (
            "import ctypes, ssl, subprocess, sys; print(sys.prefix, flush=True); subprocess.run([sys.executable, '-V'])"
        )
        found = await sandbox.run(f'tinytool; python3 -I -c "{code}"; echo x > {PACKAGES}/x')
        lines = found.output.split("\n")
        assert lines[0] == "tinytool 2.0", found.output
        assert lines[1] == PACKAGES and lines[2].startswith("Python 3."), found.output
        assert "Read-only file system" in found.output


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
async def test_a_container_has_them(wheels: Path, registry: str, docker_host: str) -> None:
    config = SandboxConfig(backend="docker", packages=("tinytool",), npm=(registry,))
    async with create_sandbox(config) as sandbox:
        found = await sandbox.run("tinytool; command -v tinyjs python3; echo $OF_THE_IMAGE; touch /npm/x /python/x")
        lines = found.output.split("\n")
        assert lines[:4] == ["tinytool 2.0", "/npm/node_modules/.bin/tinyjs", "/usr/bin/python3", "yes"], found.output
        assert found.output.count("Read-only file system") == 2


@pytest.mark.slow
async def test_programs_of_an_image_come_first(wheels: Path, rootfs: Path) -> None:
    async with create_sandbox(SandboxConfig(image=str(rootfs), packages=("tinytool",))) as sandbox:
        found = await sandbox.run("command -v python3; tinytool")
        assert found.output == "/usr/bin/python3\ntinytool 2.0\n"


async def test_a_newer_python_is_brought_along_where_packages_need_it(wheels: Path) -> None:
    newest = sys.version_info[1]
    async with create_sandbox(SandboxConfig(packages=(f"python>=3.{newest}", "tinytool"))) as sandbox:
        found = await sandbox.run("tinytool; python3 -c 'import sys; print(sys.version_info[1])'")
        name, version = found.output.split("\n")[:2]
        assert (name, int(version) >= newest) == ("tinytool 2.0", True)
    with pytest.raises(UserError, match=r"asks for Python 3\.90 or later, and this machine has none"):
        package_folder(("python>=3.90", "tinytool"))


async def test_package_environment_contains_no_build_path(wheels: Path, own_cache: Path) -> None:
    folder = package_folder(("tinytool",))
    assert folder.is_relative_to(own_cache)
    for path in (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        assert str(own_cache).encode() not in path.read_bytes(), path


def test_it_is_made_once_for_each_list(wheels: Path) -> None:
    folder = package_folder(("tinytool",))
    made = (folder / "bin").stat().st_mtime_ns
    package_folder.cache_clear()
    for path in wheels.iterdir():
        path.unlink()
    assert package_folder(("tinytool",)) == folder and (folder / "bin").stat().st_mtime_ns == made
    with pytest.raises(UserError, match=r"sandbox\.python cannot be made"):
        package_folder(("tinytool==1.0",))


@pytest.mark.slow
def test_unavailable_package_is_a_user_error_and_leaves_no_files(wheels: Path, own_cache: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)No matching distribution found for nosuchtool.*find-links") as failed:
        package_folder(("nosuchtool",))
    assert "Traceback" not in str(failed.value)
    assert not list((own_cache / "hermes-rl").rglob("*.partial"))


@pytest.mark.parametrize(
    ("sandbox", "message"),
    [
        (
            "{backend: modal, image: debian, python: [pytest]}",
            "the backend `modal` does not see this machine's folders",
        ),
        ("{backend: none, python: [pytest]}", "this machine itself: install them here"),
        ("{python: ['--index-url=http://x']}", "expected a package such as pytest"),
        ("{python: [./wheel.whl]}", "expected a package such as pytest"),
        ("{python: ['a @ https://x/a.whl']}", "expected a package such as pytest"),
        ("{backend: ssh, npm: [tinytool@1.0.0]}", "`npm` is for bubblewrap and docker"),
        ("{backend: none, npm: [tinytool@1.0.0]}", "this machine itself: install them here"),
        *(
            (f"{{npm: ['{name}']}}", "expected a package of npm with its version")
            for name in (
                "tinytool",
                "--global",
                "./folder",
                "tinytool@latest",
                "a@file:b",
                "git+ssh://x/y@1.0.0",
                "../a@1.0.0",
            )
        ),
    ],
)
def test_unsupported_package_configuration_is_refused(sandbox: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_spec(f"{BASE}sandbox: {sandbox}\n")


def test_packages_are_written_as_pip_writes_them() -> None:
    packages = ["pytest", "numpy==2.1.0", "requests[socks]>=2,<3", "ruff ~= 0.5", "ruamel.yaml!=0.18.*"]
    spec = parse_spec(f"{BASE}sandbox: {{python: {json.dumps(packages)}}}\n")
    assert list(spec.sandbox.python) == packages
    assert fingerprint(spec) != fingerprint(parse_spec(BASE))


@pytest.mark.slow
@pytest.mark.parametrize(("package", "word"), [("tinytool", "ok"), ("nosuchtool", "FAIL")])
def test_doctor_reports_whether_packages_are_available(
    wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], package: str, word: str
) -> None:
    (tmp_path / "spec.yaml").write_text(f"{BASE}sandbox: {{python: [{package}]}}\n")
    status(["doctor", str(tmp_path / "spec.yaml")])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "sandbox.python:" in line]
    assert line.startswith(f"{word} ")


@pytest.mark.slow
async def test_sandbox_with_unavailable_packages_does_not_start(wheels: Path) -> None:
    sandbox = create_sandbox(SandboxConfig(packages=("nosuchtool",)))
    with pytest.raises(UserError, match="nosuchtool"):
        async with sandbox:
            pass


@pytest.fixture
def registry(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A registry of npm with one package, whose program prints its version and whose script would leave a mark."""
    manifest = {
        "name": "@tiny/tool",
        "version": "1.2.0",
        "bin": {"tinyjs": "tool.js"},
        "scripts": {"postinstall": "touch /tmp/ran-by-npm"},
    }
    files = {"package.json": json.dumps(manifest), "tool.js": "#!/usr/bin/env node\nconsole.log('tinyjs 1.2.0')\n"}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size, entry.mode = len(text), 0o755
            archive.addfile(entry, io.BytesIO(text.encode()))

    class Registry(Handler):
        def do_GET(self) -> None:  # noqa: N802 - the name is that of http.server
            url = f"http://127.0.0.1:{self.server.server_address[1]}/tool.tgz"
            version = {**manifest, "dist": {"tarball": url, "shasum": hashlib.sha1(packed.getvalue()).hexdigest()}}
            listed = {"name": "@tiny/tool", "dist-tags": {"latest": "1.2.0"}, "versions": {"1.2.0": version}}
            body = packed.getvalue() if self.path == "/tool.tgz" else json.dumps(listed).encode()
            self.answer(body, 200 if "tool" in self.path else 404)

    with serving(Registry) as address:
        monkeypatch.setenv("NPM_CONFIG_REGISTRY", f"{address}/")
        monkeypatch.setenv("NPM_CONFIG_CACHE", str(own_cache / "npm-cache"))
        npm_folder.cache_clear()
        yield "@tiny/tool@1.2.0"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
async def test_a_sandbox_has_packages_of_npm_whose_scripts_did_not_run(registry: str) -> None:
    for packages in ((registry,), ()):
        async with create_sandbox(SandboxConfig(npm=packages)) as sandbox:
            ran = await sandbox.run("tinyjs; command -v tinyjs; echo x > /npm/x")
            assert ("tinyjs 1.2.0\n/npm/node_modules/.bin/tinyjs" in ran.output) == bool(packages), ran.output
            assert "Read-only file system" in ran.output or not packages
    assert not Path("/tmp/ran-by-npm").exists()
    with pytest.raises(UserError, match=r"(?s)sandbox\.npm cannot be made: .*nosuch.*npm config set registry"):
        npm_folder(("nosuch@1.0.0",))


def test_missing_npm_is_reported(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(own_cache))
    npm_folder.cache_clear()
    with pytest.raises(UserError, match="needs npm on this machine"):
        npm_folder(("tinytool@1.0.0",))
