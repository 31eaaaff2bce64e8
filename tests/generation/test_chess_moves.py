"""Legal moves are counted by the rules of python-chess."""

from tests.chess_moves import count, play


def test_play_ends_at_the_first_illegal_move() -> None:
    assert play("1. e4 e5 2. Nf3 Nc6 1-0") == (4, False)
    assert play("1. e4 e5 2. Ke3 Nc6") == (2, True)
    assert play("1. f3 e5 2. g4 Qh4# 3. a3") == (4, True)
    assert play("1. what") == (0, True)


def test_count_ignores_a_last_word_that_may_be_cut_off() -> None:
    assert count(["1. e4 e5 2. N", "1. e4 e5 1-0", "1. e4 Ke7 2. a3 a6 1-0"]) == (5, 1, 1)
