"""`hermes-rl serve-http`: rollouts over HTTP, for trainers that cannot run in the same interpreter.

Owns requests, sessions, policies of a request, limits and tokens of access. The package uses only the public Python
API (`hermes_rl.open_env`), which a test enforces.

Entry points: `make_app` returns the application, `Service` holds the environments that it serves.
Left to others: rollouts (`api`).
"""
