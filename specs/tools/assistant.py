"""Small tools of an assistant. What they answer does not matter here: the calls do."""


def weather(city: str, days: int = 1) -> str:
    """Tell the weather.

    Args:
        city: Name of the city.
        days: For how many days.
    """
    return f"{city}: sunny for {days} day(s)"


def convert(amount: float, source: str, target: str) -> str:
    """Convert an amount of money.

    Args:
        amount: How much.
        source: Three-letter code of its currency.
        target: Three-letter code of the wanted currency.
    """
    return f"{amount:g} {source} in {target}: {amount * 1.25:g}"


def remind(text: str, at: str) -> str:
    """Set a reminder.

    Args:
        text: Of what.
        at: Time of day as HH:MM.
    """
    return f"At {at}: {text}"
