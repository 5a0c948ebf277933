"""Fetch environments from repositories: their addresses, fetching, the stored copies, and trust."""
