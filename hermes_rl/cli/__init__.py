"""Command line: parse arguments, call the modules that do the work, and print results.

Owns options, messages for the terminal, exit statuses, and the live view of a run.

Entry points: `main` ends the process with an exit status, `status` returns that of a command.
Left to others: all work on specs and runs; a command only calls and prints.
"""

INTERRUPTED = 130
"""Exit status after Ctrl-C or SIGTERM."""
