"""Rewards before they are loaded: does the function exist, and do the spec's arguments fit its signature?"""

from __future__ import annotations

from pathlib import Path

from hermes_rl.shipped import published_rewards, shipped_rewards
from hermes_rl.spec.annotations import type_of
from hermes_rl.spec.check_code import check_reference
from hermes_rl.spec.findings import Findings
from hermes_rl.spec.hints import parameters_of_rewards
from hermes_rl.spec.model.base import is_template, thaw
from hermes_rl.spec.model.scoring import Reward
from hermes_rl.spec.model.spec import Spec
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.signatures import CodeError, Function, function
from hermes_rl.spec.suggest import choices, did_you_mean
from hermes_rl.spec.templates import TemplateError, coerce

_ROLE_ARGUMENTS = ("server", "servers")
"""Arguments of shipped rewards that name server roles."""


def signature_of(spec: Spec, name: str) -> Function | None:
    """The signature of a reward's function, where its source is at hand."""
    place, inner = _place(spec.rewards[name].fn)
    try:
        return function(place, inner) if place is not None and place.is_file() else None
    except CodeError:
        return None


def _place(fn: str) -> tuple[Path | None, str]:
    file, colon, name = fn.rpartition(":")
    if colon and file.endswith(".py"):
        return Path(file), name
    if not colon:
        return shipped_rewards().get(fn), fn
    return None, name


def check_rewards(spec: Spec, findings: Findings) -> None:
    """Every reward of a spec."""
    if all(reward.weight == 0 and not reward.gate for reward in spec.rewards.values()):
        findings.warning(("rewards",), "every weight is 0, so every rollout scores the same", at="key")
    for name, reward in spec.rewards.items():
        if _exists(name, reward, findings):
            signature = signature_of(spec, name)
            if signature is not None:
                _check_arguments(spec, name, reward, signature, findings)


def _fn_place(name: str, findings: Findings) -> tuple[NodePath, bool]:
    """Where the function's name stands: at `fn`, or it is the reward's own name."""
    given = findings.spec.is_written(("rewards", name, "fn"))
    return (("rewards", name, "fn"), True) if given else (("rewards", name), False)


def _exists(name: str, reward: Reward, findings: Findings) -> bool:
    path, given = _fn_place(name, findings)
    fn = reward.fn
    if fn.startswith("atropos:"):
        return True  # the registry is atroposlib's, and importing that takes seconds
    if ":" in fn:
        return check_reference(path, fn, "function", findings)
    shipped = shipped_rewards()
    if fn in shipped:
        return True
    published = [point.name for point in published_rewards()]
    if published.count(fn) > 1:
        message = f"several installed packages publish a reward `{fn}`; name the one that is meant: package.module:{fn}"
        findings.problem(path, message, at="value" if given else "key")
    elif not published.count(fn):
        message = f"there is no reward `{fn}`{choices(fn, [*shipped, *published])}"
        findings.problem(path, message, at="value" if given else "key")
    return published.count(fn) == 1


def _check_arguments(spec: Spec, name: str, reward: Reward, signature: Function, findings: Findings) -> None:
    known = [one.name for one in signature.arguments() if one.name not in spec.servers]
    path: NodePath = ("rewards", name, "args")
    for argument in reward.args:
        if argument not in known and not signature.open:
            hint = choices(argument, known) if known else "; it takes none"
            findings.problem((*path, argument), f"`{signature.name}` has no argument `{argument}`{hint}", at="key")
    given = {*reward.args, *spec.servers}
    missing = [one.name for one in signature.arguments() if one.required and one.name not in given]
    if missing:
        own = ":" in reward.fn
        findings.problem(("rewards", name), _missing(signature, missing, spec, own=own), at="key")
    _check_values(path, reward, signature, findings)
    _check_roles(spec, path, reward, signature, findings)


def _missing(signature: Function, missing: list[str], spec: Spec, *, own: bool) -> str:
    """`own`: the function is the user's, who may have named what the run does not give."""
    role = next((hint for one in missing if (hint := did_you_mean(one, spec.servers))), "")
    needed = ", ".join(f"`{one}`" for one in missing)
    hint = role or (parameters_of_rewards(missing) if own else "")
    return f"`{signature.name}` needs {needed}, as an argument or as a server role{hint}"


def _check_values(path: NodePath, reward: Reward, signature: Function, findings: Findings) -> None:
    """Values without templates are coerced now; the others when sample rows are rendered."""
    for one in signature.arguments():
        kind = type_of(one.annotation)
        if kind is None or one.name not in reward.args:
            continue
        value = reward.args[one.name]
        if _has_template(value):
            continue
        try:
            coerce(thaw(value), kind)
        except TemplateError:
            findings.problem((*path, one.name), f"`{signature.name}` takes {one.annotation} here")


def _has_template(value: object) -> bool:
    if isinstance(value, dict):
        return any(_has_template(item) for item in value.values())
    if isinstance(value, tuple):
        return any(_has_template(item) for item in value)
    return is_template(value)


def _check_roles(spec: Spec, path: NodePath, reward: Reward, signature: Function, findings: Findings) -> None:
    for argument in _ROLE_ARGUMENTS:
        value = reward.args.get(argument)
        for role in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
            if isinstance(role, str) and not is_template(role) and role not in spec.servers:
                message = f"there is no server role `{role}`{choices(role, spec.servers)}"
                findings.problem((*path, argument), message)
