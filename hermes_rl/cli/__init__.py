"""Command line: parse arguments, call the modules that do the work, and print results."""

INTERRUPTED = 130
"""Exit status after Ctrl-C."""
