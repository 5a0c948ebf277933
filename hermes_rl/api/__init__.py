"""Python API: run a spec with any trainer.

Owns environments that a program opens and steps, sessions whose turns a program samples itself, and the blocking form
of both.

Entry points: `open_env` opens a spec as an `Env`, `Session` is a rollout that is stepped from outside, `sync` makes an
environment blocking.
Left to others: rollouts and groups (`rollouts`), workers (`runs`), and classes for a trainer (`integrations`).
"""
