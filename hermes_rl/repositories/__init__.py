"""Fetch environments from repositories: their addresses, fetching, the stored copies, and trust.

Owns the cache of commits, and the content that the user has agreed to run.

Entry points: `address_of` parses an address, `fetched` returns the directory of its commit.
Left to others: asking the user (`cli`), and loading the spec (`spec`).
"""
