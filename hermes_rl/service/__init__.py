"""`hermes-rl rollouts`: rollouts over HTTP, for trainers that cannot live in our interpreter.

Everything here stands on the public Python API (`hermes_rl.open_env`), which a test enforces. `serving` owns the
process, `app` the paths, `environments` those of several specs, `gate` what every request has to pass, `batches`,
`sessions` and `nemo_gym` the answers.
"""
