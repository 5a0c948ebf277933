"""Accounts that cannot be overdrawn."""


class Account:
    """Money of one person."""

    def __init__(self, balance=0):
        self.balance = balance

    def withdraw(self, amount):
        """Take money out; ValueError where there is not enough."""
        self.balance -= amount
        return self.balance
