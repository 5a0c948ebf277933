"""The agent: its loop, the simulated user, and the result."""
