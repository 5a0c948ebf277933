"""Run user code in separate processes: rewards, states, tools, and work on an agent's output.

Owns the fork server, processes and their messages, and what such a process sees of the environment.

Entry points: `POOL` calls functions in worker processes, `ForkServer` starts processes as forks.
Left to others: isolation in a sandbox (`sandbox`), and what a failure means (`scoring`, `tools`).
"""
