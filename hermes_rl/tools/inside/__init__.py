"""Programs that run inside the sandbox: sent there as text, importing nothing of ours, for Python 3.8 and later."""
