"""Sandbox of a rollout: provide files and commands through one interface, whatever isolates them."""
