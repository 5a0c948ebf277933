"""`hermes-rl view`: runs in a browser, over HTTP on this machine; the page itself lies in `hermes_rl/reading`."""
