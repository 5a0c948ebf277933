"""A reward of the user's own."""


def short(result):
    """Return 1 for a final answer of at most 20 characters."""
    return len(result.final_response) <= 20
