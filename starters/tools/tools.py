"""What the model may call."""

PRICES = {"tea": 2.5, "coffee": 3.0, "scone": 2.5}


def price(article: str) -> float:
    """Look up the price of one article, in Euro.

    Args:
        article: Its name, such as tea.
    """
    if article not in PRICES:
        # What a tool raises is told to the model, which may try again.
        raise ValueError(f"we do not sell {article}; we sell {', '.join(PRICES)}")
    return PRICES[article]
