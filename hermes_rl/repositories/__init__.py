"""Environments that lie in a repository: their addresses, how they are fetched, what is kept of them, and trust."""
