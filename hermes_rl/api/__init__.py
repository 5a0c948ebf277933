"""Python API: run a spec with any trainer."""
