"""`hermes-rl serve-http`: rollouts over HTTP, for trainers that cannot run in the same interpreter.

The package uses only the public Python API (`hermes_rl.open_env`), which a test enforces.
"""
