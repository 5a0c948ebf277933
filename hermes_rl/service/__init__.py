"""`hermes-rl rollouts`: rollouts over HTTP, for trainers that cannot live in our interpreter.

Everything here stands on the public Python API (`hermes_rl.open_env`), which a test enforces.
"""
