"""Scoring: find reward functions, call them, and combine their values.

Owns who caused a failure of a reward, judges, evidence of test runs, and checks against forged results.

Entry points: `Grader` grades a rollout or a group, `RewardFunction` is a reward that can be called anywhere.
Left to others: the sandboxes that rewards look into (`rollouts`), and processes for user code (`user_code`).
"""
