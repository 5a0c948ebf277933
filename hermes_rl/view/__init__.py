"""`hermes-rl view`: show runs in a browser, over HTTP on this machine.

Owns the index of run directories, queries over it, and who may ask.

Entry points: `view` serves directories, `RunIndex` knows their runs.
Left to others: the page and its figures (`analysis`).
"""
