"""Middle values."""


def median(numbers):
    """The middle of the numbers in order; of an even count the mean of the two in the middle."""
    return numbers[len(numbers) // 2]
