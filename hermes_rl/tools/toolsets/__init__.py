"""The toolsets, one per module: each declares ``TOOLSET``, and `hermes_rl.tools.catalogue` finds it."""
