"""The core: run rollouts of a row, grade them, and make groups with advantages.

Owns the environment of a spec, the life of a rollout with its retries, admission by memory and load, and groups. It
imports no trainer and writes no file.

Entry points: `CompiledSpec` is the environment of a spec, `RolloutRunner` runs groups in any `Environment`, `Rollout`
is the result.
Left to others: the conversation (`agent`), reward functions (`scoring`), and which groups run and are kept (`runs`).
"""
