"""Toolsets, one per module of its name: each declares ``TOOLSET``, and `hermes_rl.tools.catalogue` finds it."""
