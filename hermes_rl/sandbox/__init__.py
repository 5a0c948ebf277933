"""Sandbox of a rollout: files and commands through one interface, whatever isolates them.

Owns the backends (bubblewrap, Docker, ssh and other remote machines, none), images, limits, network rules, and
sandboxed processes of user code.

Entry points: `create_sandbox` returns a `Sandbox` by its `SandboxConfig`.
Left to others: tools that an agent calls (`tools`), and when a sandbox starts and ends (`rollouts`).
"""
