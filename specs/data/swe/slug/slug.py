"""Names for addresses."""


def slug(title):
    """A title in lower case, with words joined by hyphens."""
    return title.lower().replace(" ", "-")
