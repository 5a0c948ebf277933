"""`hermes-rl view`: show runs in a browser, over HTTP on this machine; the page itself is in `hermes_rl/analysis`."""
