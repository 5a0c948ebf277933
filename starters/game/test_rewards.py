"""pytest test_rewards.py"""

from itertools import islice

from game import Game, few_guesses, found, rounds


def test_a_round_is_won_by_the_right_guess() -> None:
    game = Game({"number": 7, "highest": 10})
    assert game.guess(5) == "it is higher"
    assert (found(game).value, few_guesses(game)) == (0, 0.0)
    assert game.guess(7) == "that is it"
    assert found(game).value == 1


def test_many_guesses_are_worth_less() -> None:
    game = Game({"number": 10, "highest": 10})
    for number in range(1, 11):
        game.guess(number)
    assert 0 < few_guesses(game) < 0.5


def test_rounds_can_be_won() -> None:
    assert all(1 <= row["number"] <= row["highest"] for row in islice(rounds(seed=0, split="train"), 100))
