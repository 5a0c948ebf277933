"""Stands for a tool server in tests of the spec; it is never started there."""
