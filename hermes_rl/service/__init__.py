"""`hermes-rl rollouts`: rollouts over HTTP, for trainers that cannot live in our interpreter.

Everything here stands on the public Python API (`hermes_rl.open_env`); a test forbids any other import. `serving` owns
the process, `app` the paths, `gate` what every request has to pass, `batches`, `sessions` and `nemo_gym` the answers.
"""
