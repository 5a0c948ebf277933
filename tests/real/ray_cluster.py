"""Start a Ray cluster of several nodes on this machine, as Ray's own tests do; runs in the environment with Ray.

    python ray_cluster.py FOLDER

Prints the address of the head, which has one core, and then does what its input says, a word per line: `add` adds a
node with a core, `kill` ends the newest one like a loss of power, and the end of the input ends all. Answers each word
with `done`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray._common.utils
from ray.cluster_utils import Cluster

SMALL = {"num_cpus": 1, "object_store_memory": 80 << 20}


def main() -> None:
    # Ray writes the address of the newest cluster below its default folder, also where a cluster has another one.
    names = ("get_default_ray_temp_dir", "get_ray_temp_dir")  # of newer versions, and of older ones
    default_folder = next(found for name in names if (found := getattr(ray._common.utils, name, None)))
    Path(default_folder()).mkdir(exist_ok=True)
    cluster = Cluster(True, head_node_args={**SMALL, "include_dashboard": False, "temp_dir": sys.argv[1]})
    added: list[Any] = []
    try:
        say(cluster.address)
        for line in sys.stdin:
            if line.startswith("add"):
                marks = {"env_vars": {"NODE": line.split()[1]}} if line.strip() != "add" else {}
                added.append(cluster.add_node(**SMALL, **marks))
            else:
                cluster.remove_node(added.pop(), allow_graceful=False)
            say("done")
    finally:
        cluster.shutdown()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
