"""Load rewards of atroposlib's registry: ``fn: atropos:NAME``.

They grade a list of completions at once, so each is a group-level reward here. The registry's own wrapper turns
every exception into a score of 0; here an exception is a failed reward, as for any other reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.plugins import did_you_mean


def load_reward(name: str) -> Callable[..., list[float]]:
    """Return atroposlib's reward `name`, whose arguments (`args` in a spec) atroposlib documents.

    Raises:
        UserError: the reward does not exist, or needs a package that is not installed (some need torch).
    """
    from atroposlib.envs.reward_fns import registry

    try:
        entry: Any = registry.get(name)
    except ImportError as error:
        reward_names = sorted(path.stem.removesuffix("_reward") for path in _reward_folder().glob("*_reward.py"))
        if name.removesuffix("_reward") not in reward_names:
            hint = did_you_mean(name, set(reward_names))
            raise UserError(f"atroposlib has no reward {name!r}{hint} (it has {', '.join(reward_names)})") from None
        raise UserError(f"atropos:{name} cannot be loaded: {error}") from error

    def reward(group: list[Any], **args: Any) -> list[float]:
        completions = [result.final_response for result in group]
        if not inspect.isclass(entry):
            return [float(value) for value in entry(completions, **args)]
        init_parameters = inspect.signature(entry.__init__).parameters
        settings = {key: args.pop(key) for key in list(args) if key in init_parameters}
        judge: Any = entry(**settings)
        return [float(value) for value in judge.compute(completions, **args)]

    reward.__name__ = name
    return reward


def _reward_folder() -> Path:
    from atroposlib.envs import reward_fns

    return Path(str(reward_fns.__file__)).parent
