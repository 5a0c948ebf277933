"""The recipes of docs/scale.md: what can be known of them without SLURM and Kubernetes."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml

from hermes_rl.cli.main import with_address

TEXT = (Path(__file__).parents[1] / "docs" / "scale.md").read_text()


def block(kind: str) -> str:
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return str(found)


def test_the_slurm_script_is_one_that_bash_reads() -> None:
    script = block("bash")
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    options = re.findall(r"^#SBATCH (--[a-z-]+)=\S+$", script, re.MULTILINE)
    assert {"--nodes", "--ntasks-per-node", "--cpus-per-task", "--time"} <= set(options)
    assert script.startswith("#!/bin/bash\n#SBATCH"), "SLURM reads them only before the first command"


def test_both_recipes_make_a_token() -> None:
    script = block("bash")
    made, started = script.index("export RAY_AUTH_TOKEN"), script.index("ray start --head")
    assert made < started
    (lines,) = re.findall(r"^(export [^\n]*RAY_AUTH_MODE=token\n.*?export RAY_AUTH_TOKEN)$", script, re.M | re.S)
    show = "printenv RAY_AUTH_MODE; printenv RAY_AUTH_TOKEN"
    done = subprocess.run(["bash", "-euc", f"{lines}\n{show}"], text=True, capture_output=True, check=True)
    assert re.fullmatch(r"token\n[0-9a-f]{64}\n", done.stdout)
    manifest = yaml.safe_load(block("yaml"))
    assert manifest["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}


def test_the_addresses_of_both_are_taken_as_such() -> None:
    (of_slurm,) = re.findall(r"hermes-rl (run .*?) &$", block("bash"), re.MULTILINE)
    words = shlex.split(of_slurm.replace("$address:$port", "10.0.0.1:6379"))
    assert with_address(words) == words
    manifest = yaml.safe_load(block("yaml"))
    words = shlex.split(manifest["spec"]["entrypoint"])
    assert with_address(words) == words


def test_the_manifest_has_what_kuberay_requires() -> None:
    manifest = yaml.safe_load(block("yaml"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    cluster = manifest["spec"]["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"] and workers["groupName"]
    for group in (head, workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] and container["image"] and container["resources"]["limits"]
        mounted = {one["name"] for one in container.get("volumeMounts", ())}
        assert mounted == {one["name"] for one in pod.get("volumes", ())}
        assert all("value" in one or "valueFrom" in one for one in container.get("env", ()))
    assert keys_of(workers) == [], "keys are the head's alone"
    assert f"ray=={cluster['rayVersion']}" in (Path(__file__).parent / "real/requirements/ray.txt").read_text()


def keys_of(group: Any) -> list[Any]:
    return [one for one in group["template"]["spec"]["containers"][0].get("env", ()) if "valueFrom" in one]
