"""Agents: the loop, the simulated user, agent programs and the result of a rollout."""
