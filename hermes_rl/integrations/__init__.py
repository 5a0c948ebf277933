"""Integrations with trainers, one module each.

Owns the classes that trainers load and their settings. They run a spec through the public names of `hermes_rl` and
import a trainer only when it is used.

Entry points: `TrainerAdapter` is the common base class, `BackgroundEnv` an environment for trainers without an event
loop.
Left to others: everything about rollouts (`api`).
"""
