"""How good a patch is, beside the tests."""

from hermes_rl import Score, ToolContext

LARGE = 200


def small_patch(ctx: ToolContext) -> Score:
    """1 for a small patch, less for a long one, 0 for none. `ctx` has what was taken of the rollout's sandbox."""
    lines = ctx.artifact("patch").decode(errors="replace").splitlines()
    changed = sum(line.startswith(("+", "-")) and not line.startswith(("+++", "---")) for line in lines)
    return Score(max(0.0, 1 - changed / LARGE) if changed else 0.0, reason=f"{changed} lines changed")
