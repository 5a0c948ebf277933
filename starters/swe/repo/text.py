"""Helpers for text."""


def slug(title: str) -> str:
    """Return a title as a part of an address: small letters, words joined by one hyphen."""
    return title.lower().replace(" ", "-")


def initials(name: str) -> str:
    """Return the first letters of a name's words, in capitals."""
    return "".join(word[0] for word in name.split(" ")).upper()
