"""Programs that run inside the sandbox: sent there as text, without imports of hermes_rl, for Python 3.8 and later."""
