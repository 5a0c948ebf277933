"""Runs: which groups run where, and what of them is kept on disk.

Owns the run controller, workers on this machine and on Ray, the run directory, output formats, regrading, and
`validate --deep`.

Entry points: `open_run` prepares a run, `Run` yields its groups, `RolloutStore` records them.
Left to others: running a rollout (`rollouts`), feeding a trainer (`trainers`), and showing results (`analysis`).
"""
