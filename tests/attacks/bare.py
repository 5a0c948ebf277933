"""Inside of the outer namespaces: the attacks of `doctor --security` without a sandbox, where they get through.

    python -m tests.attacks.bare FOLDER

Prints a JSON object: from the name of each attack to whether it was held.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from hermes_rl.sandbox import escape_probes

OURS = "scheduling and limits of process 1"
"""Process 1 is this program here, which the attack would end."""


def main() -> None:
    folder = Path(sys.argv[1])
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    os.chdir(folder)
    del escape_probes.ATTACKS[OURS]
    sys.stdout.write(json.dumps({one.name: one.held for one in asyncio.run(escape_probes.trials("none"))}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
